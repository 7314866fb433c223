"""A notebook opened alone, as in Colab: its first cell fetches the course, and the rest of it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.engine import compiler, first_build
from helpers.lesson import colab
from helpers.site import first_screen, web_address

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def first_cell(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with the current files of this one."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, and the course as a clone")
    folder = tmp_path_factory.mktemp("published")
    listed = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    author = ["-c", "user.name=test", "-c", "user.email=test"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run([git, *words], cwd=folder, check=True)
    return folder


def run_alone(code: str, folder: Path, source: Path | str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new process, in a folder outside the course, where nothing of it can be imported."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COURSE_DEVICE")}
    settings = {"COURSE_REPOSITORY": f"file://{source}", **settings}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_cell_fetches_the_course_and_the_notebook_runs(clone: Path, tmp_path: Path) -> None:
    """All cells of 00 up to its first picture, in a separate copy of the notebook."""
    notebook = tmp_path / "content" / "00_attention.ipynb"
    notebook.parent.mkdir()
    shutil.copyfile(NOTEBOOKS[0], notebook)
    then = "\nimport os\nfrom helpers.attention.ladder import LADDER\n"
    then += "print(os.path.basename(os.getcwd()), os.path.exists('../kernels'), len(LADDER) > 5)"
    for again in (False, True):  # the second time, as in a restarted kernel, everything is there already
        done = run_alone(first_cell(notebook) + then, notebook.parent, clone)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "notebooks True True", again
        assert "\nready" in done.stdout
        assert (notebook.parent / "course" / "helpers" / "lesson" / "colab.py").is_file()
        assert "runs the kernels" in done.stdout or "the kernels run on the CPU engine" in done.stdout


def test_where_nothing_can_be_fetched_it_says_so(tmp_path: Path) -> None:
    done = run_alone(first_cell(NOTEBOOKS[0]), tmp_path, tmp_path / "nowhere")
    assert done.returncode != 0 and "nowhere" in done.stderr
    if not web_address.is_published():
        done = run_alone(first_cell(NOTEBOOKS[0]), tmp_path, "", COURSE_REPOSITORY="")
        assert done.returncode != 0 and "write its address into this cell" in done.stderr
        assert "(none is set)" in done.stderr
    done = run_alone(first_cell(NOTEBOOKS[0]), tmp_path, tmp_path, PATH=str(tmp_path))
    assert done.returncode != 0 and done.stderr.rstrip().endswith("under the name course (git is not installed).")


def test_where_nothing_can_be_installed_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Kaggle the internet is off by default."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(colab.PackagesMissing, match=r"needs ml_dtypes>=99, .*on Kaggle") as caught:
        colab._install(["ml_dtypes>=99"])
    [shown] = caught.value._render_traceback_()
    assert shown == str(caught.value) and "\n" not in shown


def test_in_a_notebook_that_is_one_sentence() -> None:
    """IPython shows an exception that renders itself without a traceback."""
    opening = first_screen.opening(0).replace("import helpers\n", "raise ModuleNotFoundError\n")
    with pytest.raises(ImportError) as caught:
        exec(opening.replace('sys.path.insert(0, "..")', "").replace('"course"', '"not here"'), {})
    shown = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert shown == [str(caught.value)] and "\n" not in shown[0] and caught.value.__suppress_context__


def test_inside_the_course_nothing_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho called >&2\nexit 1\n")
    (tmp_path / "git").chmod(0o755)
    code = first_cell(NOTEBOOKS[1]) + "\nimport os\nprint(os.path.exists('course'))"
    settings = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "notebooks", env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr
    assert "called" not in done.stderr


def test_each_notebook_says_what_its_kernels_need() -> None:
    calls = {
        path.name.partition("_")[0]: first_cell(path).partition("colab.set_up(")[2].partition(")")[0]
        for path in NOTEBOOKS
    }
    assert calls["00"] == "" and calls["04"] == "" and calls["07"] == "least=80" and calls["06"] == "least=80"
    assert calls["10"] == "least=90, only=True"


@pytest.mark.parametrize(
    ("gpu", "least", "only", "engine", "said"),
    [
        (None, 80, False, True, "CPU engine"),
        (("Tesla T4", 75), 0, False, False, "Tesla T4 (compute capability 7.5) runs the kernels"),
        (("Tesla T4", 75), 80, False, True, "need 8.0 or newer, so the CPU engine"),
        (("NVIDIA A100", 80), 80, False, False, "runs the kernels"),
        (("NVIDIA A100", 80), 90, True, True, "need 9.0 and no other"),
        (("NVIDIA H100", 90), 90, True, False, "runs the kernels"),
        (("NVIDIA B200", 100), 90, True, True, "need 9.0 and no other"),
    ],
)
def test_what_runs_the_kernels(
    gpu: tuple[str, int] | None, least: int, only: bool, engine: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colab, "gpu", lambda: gpu)
    monkeypatch.setenv("COURSE_DEVICE", "")
    monkeypatch.delenv("COURSE_DEVICE")
    assert said in colab._device(least, only)
    assert (os.environ.get("COURSE_DEVICE") == "cpu") == engine


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colab, "gpu", lambda: None)
    monkeypatch.setattr(colab.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("COURSE_DEVICE", "cpu")
    assert "install g++" in colab._device(0, False)


def test_it_installs_what_is_missing_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = {"numpy", "PIL", "matplotlib"}
    monkeypatch.setattr(colab.importlib.util, "find_spec", lambda name: name in installed or None)
    asked = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(argv[4:])
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(colab.subprocess, "run", run)
    monkeypatch.setattr(colab.os, "chdir", lambda folder: None)
    monkeypatch.setattr(colab, "_device", lambda least, only: "")
    monkeypatch.setattr(colab, "_has_compiler", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    colab.set_up()
    [[quiet, _, *packages]] = asked
    assert quiet == "--quiet" and [p.partition(">")[0] for p in packages] == ["ml_dtypes", "ipywidgets", "pyelftools"]
    assert all(">=" in package for package in packages), "as environment.yml has them"
    installed |= {"ml_dtypes", "ipywidgets", "elftools"}
    colab.set_up()
    assert len(asked) == 1


@pytest.mark.parametrize("is_built", [True, False])
def test_the_engine_is_compiled_meanwhile(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(compiler, "engine_is_built", lambda: is_built)
    monkeypatch.setattr(first_build, "begin", lambda: begun.append(True))
    said = colab._engine_built_ahead()
    assert said.startswith("ready") and ("being compiled" in said) == bool(begun) == (not is_built)


# ---- one name


def test_badges_come_from_the_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_address, "NAME", "OWNER/attention-course")
    assert "](" not in first_screen.badges() and first_screen._opens("01_naive.ipynb") == ""
    assert "github.com" not in first_screen.opening(1), "nothing is fetched from a name that may be somebody else's"
    monkeypatch.setattr(web_address, "NAME", "somebody/their-course")
    line = first_screen._opens("01_naive.ipynb")
    assert (
        "[Colab](https://colab.research.google.com/github/somebody/their-course/blob/main/notebooks/01_naive.ipynb)"
        in line
    )
    assert "mybinder.org/v2/gh/somebody/their-course/main?urlpath=lab/tree/notebooks/01_naive.ipynb" in line
    assert first_screen.badges().count("somebody/their-course") == 3
    opening = first_screen.opening(7)
    assert 'or "https://github.com/somebody/their-course"' in opening and "least=80" in opening
    assert max(map(len, opening.splitlines())) <= 120
    notebook = {"cells": [{"cell_type": "code", "source": [opening, "\nimport numpy as np\n"]}]}
    assert first_screen.lines(notebook) == 1, "the made lines take no time to read"


def test_no_other_file_knows_the_name() -> None:
    """Badges and cells are generated: in git, only repository.py and files generated from it contain the name."""
    owner = web_address.NAME.partition("/")[0]
    for path in (*ROOT.glob("*.md"), *ROOT.glob(".devcontainer/*"), *ROOT.glob(".binder/*")):
        text = first_screen.BADGES.sub("", path.read_text(encoding="utf-8"))
        assert f"{owner}/" not in text, path.name


def test_readme_has_the_badges_of_today() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert first_screen.BADGES.search(text) and first_screen.badges() in text, (
        "run python3 -m helpers.site.first_screen"
    )


# ---- Binder and the devcontainer


def test_binder_installs_what_notebooks_need() -> None:
    """Binder installs packages in the listed versions, and the C++ compiler from Debian."""
    wanted = (ROOT / ".binder" / "requirements.txt").read_text().split()
    listed = colab.the_list()[1]
    assert set(wanted) <= set(listed)
    names = {line.partition(">")[0] for line in wanted}
    assert set(colab.NEEDED) | {"jupyterlab", "ipykernel"} == names
    assert (ROOT / ".binder" / "apt.txt").read_text().split() == ["g++"]


def test_the_devcontainer_runs_the_course() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    command = settings["postCreateCommand"]
    assert "helpers/course.py" in command
    python = settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python.endswith("/.venv/bin/python")
    assert settings["hostRequirements"]["gpu"] == "optional", "a GPU is used where there is one, and not needed"


def test_a_workshop_about_one_kernel_runs_where_that_does() -> None:
    kernel = first_screen.kernel_of(Path("15b_fp16x3.ipynb"))
    assert kernel == "15_fp16x3.cu" and first_screen.kernel_of(Path("15_tf32.ipynb")) == ""
    assert "9.0" in first_screen.works_on(15, kernel) and "A100" in first_screen.works_on(15)
    assert "only=True" in first_screen.opening(15, kernel) and "only=True" not in first_screen.opening(15)
