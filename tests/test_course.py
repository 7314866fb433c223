"""The command line: its set-up, run for real with tiny wheels and no network, and its messages."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.cli import commands
from helpers.setup import environment, host_compiler, progress, requirements, script, version

REPOSITORY = Path(__file__).resolve().parent.parent
HELPERS = REPOSITORY / "helpers"
SCRIPT = HELPERS / "course.py"
# The script and the modules that it imports, which also run on a Python without packages or one that is too old.
SETUP = ("__init__", "environment", "host_compiler", "progress", "requirements", "script", "startup", "version")
CLI = ("__init__", "commands", "quick_pytest", "work_copy")
MODULES = ("course", *(f"cli/{name}" for name in CLI), *(f"setup/{name}" for name in SETUP))

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the set-up is tested on Linux and macOS")
HANGS = 600  # seconds: the limit for waits that may never end, however slow or busy the machine is
needs_venv = pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python cannot make a .venv")

ENVIRONMENT = """\
name: tiny-course    # not the course's own name
dependencies:
  - python>=3.10
  - pip:
      - pytest>=8              # stands for the real one
      - ruff
      - mypy
      - jupyterlab
      - not_made_for_this; sys_platform == "no such system"
"""

# A package that reports how it was called, and exits with the requested code.
TELLS = """\
import json, os, sys
print(json.dumps({
    "name": %r, "argv": sys.argv[1:], "prefix": sys.prefix, "cwd": os.getcwd(),
    "env": {name: os.environ.get(name) for name in (
        "PYTHONPATH", "JUPYTER_PATH", "PATH", "COURSE_READY", "PYTHONDONTWRITEBYTECODE", "COURSE_CPU_OPTIMISATION"
    )},
}), flush=True)
sys.exit(int(os.environ.get("LEAVE_" + %r, "0")))
"""

BENCH = """\
import json, sys, time
def ladder(argv):
    print(json.dumps({"name": "ladder", "argv": argv, "prefix": sys.prefix, "path": sys.path}), flush=True)
    if "sleep" in argv:
        time.sleep(60)
    return 7 if "fail" in argv else 0
def bench(argv):
    print(json.dumps({"name": "bench", "argv": argv}), flush=True)
    return 0
"""


def make_wheel(folder: Path, name: str, version: str = "9.0", needs: str = "") -> None:
    """Make a wheel of one package whose `python -m name` runs TELLS. needs: its dependencies."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/__main__.py": TELLS % (name, name.upper()),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\ntiny-{name} = {name}.__main__:main\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(zipfile.ZipInfo(path), text)  # the same bytes, whenever it is made


class TinyCourse:
    """A copy of course.py and its modules in a separate folder, with a list of tiny wheels next to it."""

    def __init__(self, root: Path, wheels: Path) -> None:
        self.root, self.wheels = root, wheels
        self.venv = root / ".venv"
        self.script = root / "helpers" / "course.py"

    def write(self) -> TinyCourse:
        for folder in ("helpers/setup", "helpers/cli", "helpers/bench", "tests", "notebooks"):
            (self.root / folder).mkdir(parents=True)
        for name in MODULES:
            shutil.copy(HELPERS / f"{name}.py", self.root / "helpers" / f"{name}.py")
        (self.root / "environment.yml").write_text(ENVIRONMENT)
        (self.root / "helpers" / "bench" / "command.py").write_text(BENCH)
        self.wheels.mkdir(exist_ok=True)
        for name in ("pytest", "ruff", "mypy", "jupyterlab"):
            make_wheel(self.wheels, name)
        self.lock("base", "pytest==9.0", "ruff==9.0", "mypy==9.0", "jupyterlab==9.0")
        self.lock("cuda12")
        self.lock("cuda13")
        return self

    def lock(self, part: str, *packages: str, add: bool = False) -> None:
        """Write a part of the lock, or add to it, with the hashes of the existing wheels."""
        path = self.root / "helpers" / "setup" / "locked" / f"{part}.txt"
        path.parent.mkdir(exist_ok=True)
        text = path.read_text() if add else "# Written by a test.\n"
        for package in packages:
            wheel = self.wheels / f"{package.replace('==', '-')}-py3-none-any.whl"
            digest = hashlib.sha256(wheel.read_bytes() if wheel.exists() else b"").hexdigest()
            text += f"{package} \\\n    --hash=sha256:{digest}\n"
        path.write_text(text)

    def environment(self, *, network: bool = True, **changes: str | None) -> dict[str, str]:
        """Return this machine's environment without pip settings; the network is the folder of wheels, or is down."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "CONDA_", "COURSE_"))}
        for key in ("PYTHONPATH", "VIRTUAL_ENV", "JUPYTER_PATH", "CXX", "JUPYTER_PORT"):
            kept.pop(key, None)
        kept["PIP_CONFIG_FILE"] = os.devnull
        if network:
            kept.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.wheels))
        else:
            kept.update(PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1", PIP_NO_CACHE_DIR="1")
        kept.update({key: value for key, value in changes.items() if value is not None})
        return kept

    def start(
        self, *words: str, before: str = "", cwd: Path | None = None, **settings: object
    ) -> subprocess.Popen[str]:
        """Start course.py in its own process group; `before` is Python code to run in it first."""
        argv = [sys.executable, str(self.script)]
        if before:
            code = f"import sys, runpy; sys.argv = sys.argv[1:]\n{before}\n"
            argv[1:] = ["-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')", str(self.script)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            [*argv, *words],
            cwd=cwd or self.root,
            env=self.environment(**settings),
            start_new_session=True,
            **pipes,
        )

    def run(self, *words: str, code: int = 0, **settings: object) -> tuple[str, str]:
        """Return (stdout, stderr) of a run of course.py that must exit with `code`, and never with a traceback."""
        child = self.start(*words, **settings)
        out, err = child.communicate(timeout=HANGS)
        assert child.returncode == code, f"left with {child.returncode}, not {code}:\n{out}\n{err}"
        assert "Traceback (most recent call last)" not in out + err
        return out, err

    def stamp_is_lost(self) -> None:
        """Pretend that a set-up was interrupted: the next one installs packages."""
        (self.venv / "course.json").unlink()

    def told(self, *words: str, **settings: object) -> dict[str, dict]:
        """Return what each started package was passed, by name; the set-up must have had nothing to do."""
        out, err = self.run(*words, **settings)
        assert "making" not in err and "installing" not in err, err
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyCourse:
    """A course after its first run: two started at once, one of which waited."""
    folder = tmp_path_factory.mktemp("made")
    tiny = TinyCourse(folder / "a folder", folder / "wheels").write()
    children = [tiny.start("ladder") for _ in range(2)]
    results = [child.communicate(timeout=HANGS) for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    waited, err = sorted((err for _, err in results), key=len)
    assert "another course.py is setting up .venv: waiting" in waited and "making" not in waited
    assert "first run: making .venv with Python" in err
    assert "installing the list of environment.yml" in err
    assert "installed in" in err
    return tiny


@pytest.fixture
def copied(made: TinyCourse, tmp_path: Path) -> TinyCourse:
    """A copy of it for a test to damage, repaired after its move."""
    shutil.copytree(made.root, tmp_path / "copy", symlinks=True)
    tiny = TinyCourse(tmp_path / "copy", made.wheels)
    _, err = tiny.run("ladder", network=False)
    assert f".venv was moved here from {made.venv}" in err
    return tiny


@pytest.fixture
def new(made: TinyCourse, tmp_path: Path) -> TinyCourse:
    """A course that was never run."""
    return TinyCourse(tmp_path / "new", made.wheels).write()


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < end, f"waited {HANGS} s for {what}"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ the list


def test_the_list_is_what_conda_reads() -> None:
    yaml = pytest.importorskip("yaml")
    text = (REPOSITORY / "environment.yml").read_text()
    tree = yaml.safe_load(text)
    blocks = [entry["pip"] for entry in tree["dependencies"] if isinstance(entry, dict)]
    assert requirements.read_list(text) == (tree["name"], blocks[0])


def test_the_list_keeps_markers_and_drops_comments_and_quotes() -> None:
    text = """
# name: wrong
name: "right"   # a comment
dependencies:
  - python>=3.10
  - pip:
    - plain
      # a comment of its own
    - pinned==1.2.*   # why

    - marked>=3; sys_platform != "darwin"
    - "quoted>=1; python_version < '3.12'"
    - a @ https://example.org/a.whl#sha256=0
  - after
variables:
  - not: a package
"""
    wanted = [
        "plain",
        "pinned==1.2.*",
        'marked>=3; sys_platform != "darwin"',
        "quoted>=1; python_version < '3.12'",
        "a @ https://example.org/a.whl#sha256=0",
    ]
    assert requirements.read_list(text) == ("right", wanted)


@pytest.mark.parametrize("text", ["name: x\ndependencies:\n  - pip\n", "dependencies:\n  - pip:\n    - a\n", ""])
def test_a_list_without_name_or_block_is_refused(text: str) -> None:
    with pytest.raises(script.Problem, match=r"environment.yml has no (pip: block|name:)"):
        requirements.read_list(text)


def test_an_extra_is_read_from_comments() -> None:
    text = (
        "name: x\n- pip:\n  - a\n  # extra big: b>=2  # why\n  # extra big: c; sys_platform == 'x'\n  # extra no: d\n"
    )
    assert requirements.read_list(text) == ("x", ["a"])
    assert requirements.read_extra(text, "big") == ["b>=2", "c; sys_platform == 'x'"]
    with pytest.raises(script.Problem, match="no extra 'other'"):
        requirements.read_extra(text, "other")


def test_a_missing_list_is_named(new: TinyCourse) -> None:
    (new.root / "environment.yml").unlink()
    _, err = new.run("ladder", code=1)
    assert "cannot read" in err and "environment.yml" in err and "whole copy" in err


# -------------------------------------------------------------------------------------------- which Python


@pytest.mark.parametrize("name", MODULES)
def test_an_old_python_can_read_the_script(name: str) -> None:
    tree = ast.parse((HELPERS / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 6))
    for node in ast.walk(tree):
        # These parse in Python 3.6 but do not run there.
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for note in notes:
            assert not isinstance(note, ast.BinOp | ast.Subscript), f"line {node.lineno}: quote this annotation"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__", "from __future__ import annotations came with Python 3.7"


def test_an_old_python_says_so(new: TinyCourse) -> None:
    before = "sys.version_info = (3, 8, 1, 'final', 0); sys.version = '3.8.1 (simulated)'"
    _, err = new.run("lab", code=1, before=before)
    assert "Python 3.8.1" in err and "too old, 3.10 or newer is needed" in err
    assert "Fix: " in err
    assert not new.venv.exists()


def test_a_newer_python_of_the_machine_is_named(new: TinyCourse, tmp_path: Path) -> None:
    for name, body in (("python3.13", "exit 127"), ("python3.12", "exit 0")):  # the first is an empty shim
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    before = "sys.version_info = (3, 8, 1, 'final', 0)"
    _, err = new.run("lab", code=1, before=before, PATH=str(tmp_path))
    assert "this machine has python3.12. Run: python3.12 helpers/course.py lab" in err


@pytest.mark.parametrize("name", ["python3.6", "python3.7", "python3.8", "python3.9"])
def test_a_real_old_python_says_so(new: TinyCourse, name: str) -> None:
    if not shutil.which(name) or subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL):
        pytest.skip(f"this machine has no {name}")
    done = subprocess.run([name, str(new.script), "test"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "is too old" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_what_to_install(new: TinyCourse, module: str) -> None:
    _, err = new.run("test", code=1, before=f"sys.modules[{module!r}] = None")
    assert "cannot make a .venv" in err
    assert "sudo apt install python3-venv" in err
    assert not new.venv.exists()


@needs_venv
def test_a_named_conda_environment_is_used_as_it_is(new: TinyCourse) -> None:
    changes = {"CONDA_DEFAULT_ENV": "tiny-course", "CONDA_PREFIX": sys.prefix}
    out, err = new.run("ladder", **changes)
    assert json.loads(out)["prefix"] == sys.prefix
    assert "jupyterlab" not in err or find_spec("jupyterlab") is None
    assert not new.venv.exists()
    # Another environment with that name, which this Python does not belong to, does not count.
    changes["CONDA_PREFIX"] = "/nowhere"
    _, err = new.run("ladder", code=1, before="sys.modules['venv'] = None", **changes)
    assert "cannot make a .venv" in err


def test_this_python_is_told_what_is_missing(new: TinyCourse) -> None:
    text = ENVIRONMENT.replace("ruff\n", "ruff>=99999\n      - no-such-distribution>=2\n")
    (new.root / "environment.yml").write_text(text)
    out, err = new.run("ladder", "--this-python")
    assert json.loads(out)["prefix"] == sys.prefix
    assert "ruff>=99999" in err and "no-such-distribution>=2" in err
    assert f'{sys.executable} -m pip install "ruff>=99999" "no-such-distribution>=2"' in err
    assert "not_made_for_this" not in err, "its marker leaves it out here"
    (new.root / "environment.yml").write_text(text + "      - no-such-headers==4.2  # no-deps: headers only\n")
    _, err = new.run("ladder", "--this-python")
    assert f'{sys.executable} -m pip install --no-deps "no-such-headers==4.2"' in err
    assert not new.venv.exists()


@pytest.mark.parametrize(
    ("command", "module"),
    [("lab", "jupyterlab"), ("progress", "ml_dtypes"), ("ladder", "matplotlib"), ("export", "jinja2")],
)
def test_this_python_without_what_a_command_needs(command: str, module: str, new: TinyCourse) -> None:
    _, err = new.run("--this-python", command, code=1, before=f"sys.modules[{module!r}] = None")
    assert f"this command needs {module}. Install" in err


# ------------------------------------------------------------------------------------- the set-up and repairs


@needs_venv
def test_the_second_run_starts_one_program_and_needs_no_network(made: TinyCourse) -> None:
    """It only asks the Python of .venv for its version, and starts the command on it."""
    before = """if True:
        import subprocess
        start = subprocess.Popen.__init__
        def counted(self, argv, *rest, **options):
            print("STARTED", argv[0], file=sys.stderr)
            start(self, argv, *rest, **options)
        subprocess.Popen.__init__ = counted"""
    out, err = made.run("ladder", network=False, before=before)
    assert json.loads(out)["prefix"] == str(made.venv)
    assert re.findall("STARTED (.*)", err) == [str(made.venv / "bin" / "python")], err


@needs_venv
def test_a_killed_set_up_is_noticed(new: TinyCourse, monkeypatch: pytest.MonkeyPatch) -> None:
    child = new.start("ladder")
    wait_for((new.venv / "pyvenv.cfg").exists, "the start of the set-up")
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    need, said = venv_needs(new, monkeypatch)
    assert need == "make" and said


def venv_needs(tiny: TinyCourse, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return what the next run would do to this .venv, and why."""
    stamp, python = tiny.venv / "course.json", tiny.venv / "bin" / "python"
    for name, path in {"VENV": tiny.venv, "VENV_PYTHON": python, "STAMP": stamp}.items():
        monkeypatch.setattr(environment, name, path)
    monkeypatch.setattr(requirements, "LOCKED", tiny.root / "helpers" / "setup" / "locked")
    return environment.venv_needs([])


@needs_venv
def test_interrupting_the_set_up_says_how_to_go_on(new: TinyCourse) -> None:
    child = new.start("ladder")
    wait_for((new.venv / "pyvenv.cfg").exists, "the start of the set-up")
    os.killpg(child.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    _, err = child.communicate(timeout=HANGS)
    assert child.returncode == 130
    assert "Run the same command again" in err and "Traceback" not in err


@needs_venv
@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("record", "half-written package"),
        ("tilde", "half-written package"),
        ("pip", "half-written package"),
        ("python gone", "the Python it was made from is gone"),
        ("python broken", "its Python does not start"),
        ("python newer", "was made with Python 3.1, which is 3."),
        ("python too old", "was made with Python 3.9, which is too old"),
        ("config", "an earlier set-up was stopped"),
    ],
)
def test_a_broken_venv_is_noticed(copied: TinyCourse, monkeypatch: pytest.MonkeyPatch, harm: str, why: str) -> None:
    site = next(copied.venv.glob("lib/python*/site-packages"))
    stamp, python = copied.venv / "course.json", copied.venv / "bin" / "python"
    assert venv_needs(copied, monkeypatch) == ("ready", "")
    if harm == "record":
        (site / "ruff-9.0.dist-info" / "RECORD").unlink()
    elif harm == "pip":
        for path in site.glob("pip-*"):
            shutil.rmtree(path)
    elif harm == "tilde":
        (site / "~uff").mkdir()
    elif harm == "python newer":
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "python": "3.1"}))
    elif harm == "config":
        (copied.venv / "pyvenv.cfg").unlink()
    else:
        python.unlink()
        script = {"python broken": "exit 1", "python too old": f"echo 3.9\necho '{site}'"}.get(harm)
        if script:
            python.write_text(f"#!/bin/sh\n{script}\n")
            python.chmod(0o755)
        else:
            python.symlink_to("/nowhere/python3")
    need, said = venv_needs(copied, monkeypatch)
    assert need == "make" and why in said


@pytest.mark.exhaustive  # a set-up that is made, or finished in place
@needs_venv
def test_a_broken_venv_is_made_anew_from_inside(copied: TinyCourse) -> None:
    site = next(copied.venv.glob("lib/python*/site-packages"))
    (site / "~uff").mkdir()
    argv = [str(copied.venv / "bin" / "python"), str(copied.script), "ladder"]
    done = subprocess.run(argv, env=copied.environment(), capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "making .venv with Python" in done.stderr
    assert json.loads(done.stdout)["prefix"] == str(copied.venv)


@needs_venv
def test_a_moved_venv_is_mended_without_network(copied: TinyCourse, tmp_path: Path) -> None:
    for place in ("one place", "another"):
        copied.root.rename(tmp_path / place)
        copied = TinyCourse(tmp_path / place, copied.wheels)
        ladder = copied.run("ladder", network=False)[0]
        assert json.loads(ladder)["prefix"] == str(copied.venv)
    script = (copied.venv / "bin" / "tiny-ruff").read_text()
    assert str(copied.venv) in script
    copied.told("ladder", network=False)


@needs_venv
def test_an_extra_is_installed_when_asked_for_and_stays(copied: TinyCourse) -> None:
    """With a build that the index chooses, and what that needs."""
    make_wheel(copied.wheels, "tinytorch", "2.0")
    make_wheel(copied.wheels, "tinyneeded", "3.0")
    make_wheel(copied.wheels, "tinybuild", "2.13.0+cpu", needs="tinyneeded>=3")
    (copied.root / "environment.yml").write_text(ENVIRONMENT + "      # extra torch: tinytorch>=2  # tensors\n")
    copied.lock("torch", "tinytorch==2.0")
    (copied.root / "helpers" / "setup" / "locked" / "torch.unhashed.txt").write_text("tinybuild==2.13.0\n")
    site = next(copied.venv.glob("lib/python*/site-packages"))
    copied.told("lab", network=False)
    assert not (site / "tinytorch").exists()
    _, err = copied.run("lab", "--torch")
    assert "or an extra is asked for" in err and (site / "tinytorch").exists()
    assert {"tinybuild", "tinyneeded"} <= set(json.loads((copied.venv / "course.json").read_text())["packages"])
    for words in (["lab", "--torch"], ["lab"], ["test"], ["test", "--torch"], ["ladder"]):
        copied.told(*words, network=False)
    for path in site.glob("tinytorch*"):
        shutil.rmtree(path)
    _, err = copied.run("ladder")
    assert ".venv has lost tinytorch" in err and (site / "tinytorch").exists()
    _, err = copied.run("test", "--extra", "unknown", code=1)
    assert "no extra 'unknown'" in err


@needs_venv
def test_only_what_the_lock_names_is_installed(copied: TinyCourse) -> None:
    make_wheel(copied.wheels, "tinyheaders", "4.2", needs="not-in-the-folder-of-wheels")
    copied.lock("base", "tinyheaders==4.2", add=True)
    make_wheel(copied.wheels, "tinyheaders", "4.2", needs="changed-since")
    _, err = copied.run("ladder", code=1)
    assert "DO NOT MATCH THE HASHES" in err and "tinyheaders" in err, "pip's last lines are shown"
    assert "setup.log" in err and "Fix: " in err and "no network" not in err
    copied.lock("base", "tinyheaders==4.2", add=False)
    _, err = copied.run("ladder")
    assert "installing the list" in err
    assert list(copied.venv.glob("lib/python*/site-packages/tinyheaders/__main__.py"))
    copied.told("ladder", network=False)


def test_the_lock_is_installed_in_halves(tmp_path: Path) -> None:
    """Each package is in one of them, with all its hashes; a build that the index chooses comes after both."""
    parts = ["base", "cuda12", "torch"]
    halves, *later = requirements.pip_installs(parts, tmp_path)
    texts = [Path(half[-1]).read_text() for half in halves]
    assert [half[:2] for half in halves] == [["--no-deps", "--require-hashes"]] * 2
    first, second = (set(re.findall(r"^([\w.-]+)==", text, re.M)) for text in texts)
    assert abs(len(first) - len(second)) < 2 and not first & second
    assert first | second == set().union(*map(requirements.locked_names, parts))
    locked = "".join((requirements.LOCKED / f"{part}.txt").read_text() for part in parts).splitlines()
    assert sorted("".join(texts).splitlines()) == sorted(line for line in locked if not line.startswith("#"))
    assert later == [[["-r", str(requirements.LOCKED / "torch.unhashed.txt")]]]


GPUS = {
    "580.65, 9.0": 13,
    "580.65, 9.0\n580.65, 7.5": 13,
    "575.1.2, 9.0": 12,
    "580.65, 9.0\n580.65, 7.0": 12,
    "No devices": 12,
}


@pytest.mark.parametrize("answer", GPUS)
def test_cupy_is_for_the_cuda_that_gpus_and_driver_have(
    answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requirements.cuda_version() == 12, "there is no GPU"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    assert requirements.cuda_version() == GPUS[answer]


@needs_venv
def test_cuda_is_chosen_once_and_the_other_cupy_goes(copied: TinyCourse, tmp_path: Path) -> None:
    make_wheel(copied.wheels, "tinycupy12", "14.2")
    make_wheel(copied.wheels, "tinycupy13", "14.2")
    copied.lock("cuda12", "tinycupy12==14.2")
    copied.lock("cuda13", "tinycupy13==14.2")
    stamp = copied.venv / "course.json"
    copied.run("ladder")
    assert json.loads(stamp.read_text())["cuda"] == "cuda12"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.65, 9.0\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    copied.told("ladder", PATH=path, network=False)
    copied.stamp_is_lost()
    _, err = copied.run("ladder", PATH=path)
    assert "removing tinycupy12" in err
    written = json.loads(stamp.read_text())
    assert (
        written["cuda"] == "cuda13" and "tinycupy13" in written["packages"] and "tinycupy12" not in written["packages"]
    )


@needs_venv
def test_a_file_in_the_place_of_the_venv(new: TinyCourse) -> None:
    new.venv.write_text("")
    _, err = new.run("ladder", code=1)
    assert "is a file, but a folder is needed" in err


def test_a_folder_in_which_it_cannot_make_files(new: TinyCourse) -> None:
    (new.root / ".cache").write_text("")
    _, err = new.run("ladder", code=1)
    assert "the set-up stopped: [Errno 17] File exists" in err
    assert "Fix: check that" in err


@needs_venv
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(new: TinyCourse) -> None:
    new.root.chmod(0o555)
    try:
        _, err = new.run("ladder", code=1)
    finally:
        new.root.chmod(0o755)
    assert "Permission denied" in err


# ------------------------------------------------------------------------------------------ failures


@needs_venv
def test_a_changed_list_is_installed_or_no_network_said_and_mended_by_running_again(copied: TinyCourse) -> None:
    make_wheel(copied.wheels, "tinyextra", "1.5")
    copied.lock("base", "tinyextra==1.5", add=True)
    (copied.venv / "mine").write_text("kept")
    _, err = copied.run("ladder", code=1, network=False)
    assert "the list in environment.yml has changed" in err and "making .venv" not in err
    assert "there is no network, or the package index does not answer" in err
    assert "Fix: connect" in err
    assert "run the same command again: python3 helpers/course.py ladder" in err
    assert len(err.splitlines()) < 20, "a wall of text"
    _, err = copied.run("ladder")
    assert "is half made" in err and "making .venv" not in err, "the .venv itself was in order"
    assert (copied.venv / "mine").exists(), "what the user put there was lost"
    assert list(copied.venv.glob("lib/python*/site-packages/tinyextra/__main__.py"))
    copied.told("ladder", network=False)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full.* GB.*TMPDIR"),
        ("Temporary failure in name resolution", "there is no network"),
        ("ReadTimeoutError: HTTPSConnectionPool(host='x'): Read timed out.", "there is no network"),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))", "PIP_CERT"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "PIP_FIND_LINKS"),
        ("ERROR: Could not find a version that satisfies x (from versions: none)", "or does not answer"),
        ("error: subprocess-exited-with-error", "Python 3.10 to 3.14"),
    ],
)
def test_a_failure_is_explained(line: str, wanted: str) -> None:
    problem = progress.explain("installing", ["first", line])
    assert re.search(wanted, str(problem), re.S)
    assert "run the same command again" in str(problem)


# ----------------------------------------------------------------------------------------- the C++ compiler


@needs_venv
def test_without_a_compiler_ziglang_is_installed_once(copied: TinyCourse, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    make_wheel(copied.wheels, "ziglang")
    copied.lock("compiler", "ziglang==9.0")
    (copied.root / "helpers" / "engine").mkdir()
    engine = "def engine_library():\n    open('compiled', 'w').close()\n"
    (copied.root / "helpers" / "engine" / "compiler.py").write_text(engine)
    copied.stamp_is_lost()
    try:
        _, err = copied.run("ladder", PATH=str(nothing))
    finally:
        next(copied.wheels.glob("ziglang*")).unlink()
    said, packages = err.index("no C++ compiler found"), err.index("installing the list of environment.yml")
    assert said < packages and "100 MB" in err, "it is said before packages are waited for"
    assert (copied.root / "compiled").exists(), "the first compilation was left to the notebooks"
    copied.told("ladder", PATH=str(nothing), network=False)


@needs_venv
def test_without_a_compiler_and_network_it_goes_on(made: TinyCourse, tmp_path: Path) -> None:
    out, err = made.run("ladder", PATH=str(tmp_path), network=False)
    assert "going on without a C++ compiler" in err and "sudo apt install g++" in err
    assert json.loads(out)["name"] == "ladder"


@needs_venv
def test_lab_compiles_the_engine_and_says_so(copied: TinyCourse) -> None:
    (copied.root / "helpers" / "engine").mkdir()
    engine = """
from pathlib import Path
def engine_is_built():
    return Path("compiled").exists()
def engine_library():
    Path("compiled").write_text("")
"""
    (copied.root / "helpers" / "engine" / "compiler.py").write_text(engine)
    (copied.root / "helpers" / "engine" / "__init__.py").write_text("")
    _, err = copied.run("ladder")
    assert "CPU engine" not in err and not (copied.root / "compiled").exists()
    _, err = copied.run("lab")
    assert "compiling the CPU engine (half a minute, once on this machine)" in err
    assert (copied.root / "compiled").exists()
    _, err = copied.run("lab")
    assert "CPU engine" not in err
    (copied.root / "compiled").unlink()
    (copied.root / "helpers" / "engine" / "__init__.py").write_text("import numpy_that_is_not_here")
    copied.stamp_is_lost()
    _, err = copied.run("ladder")  # while packages are installed, on a Python without them
    wait_for((copied.root / "compiled").exists, "the engine")


def test_the_compiler_of_cxx_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert host_compiler.compiler() is None
    own = tmp_path / "my-c++"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", "my-c++ -O1")
    assert host_compiler.compiler() == str(own)


# ------------------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("words", [[], ["--help"], ["lab", "-h"], ["test", "--help"], ["export", "-h"]])
def test_help_needs_no_set_up(new: TinyCourse, words: list[str]) -> None:
    out, _ = new.run(*words, code=0 if words else 2)
    assert out.startswith("usage: course.py")
    assert not new.venv.exists()
    if words == ["--help"]:
        assert all(
            name in out
            for name in ("lab", "progress", "ladder", "test", "bench", "export", "book", "--this-python", ".venv")
        )
        assert "--originals" in out


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["export", "naive"], {"COURSE_DEVICE": "tpu"}, "COURSE_DEVICE is 'cpu' or 'gpu', not 'tpu'"),
        (
            ["ladder", "--n", "8", "--stage", "naive"],
            {"COURSE_DEVICE": "cpu", "COURSE_CPU_TIMEOUT": "soon"},
            "COURSE_CPU_TIMEOUT must be a number of seconds",
        ),
    ],
    ids=["device", "engine"],
)
def test_a_variable_that_is_refused_is_a_line(words: list[str], variables: dict[str, str], said: str) -> None:
    argv = [sys.executable, str(HELPERS / "course.py"), "--this-python", *words]
    done = subprocess.run(argv, env={**os.environ, **variables}, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"course: {said}"), done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_newest_of_the_changelog(new: TinyCourse) -> None:
    """Printed without a set-up; a copy without the file still runs."""
    assert new.run("--version")[0] == "course.py unknown\n"
    (new.root / "CHANGELOG.md").write_text("# Changelog\n\nwords\n\n## 2.10.0\n\n- new\n\n## 2.9.1\n\n- old\n")
    assert new.run("--version")[0] == "course.py 2.10.0\n"
    assert not new.venv.exists()
    real = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(version.version())}$", real, re.M)
    assert version.changes() in real and "## " not in version.changes()


@pytest.mark.parametrize(
    "words", [["lab", "--port", "1"], ["progress", "01"], ["test", "-x"], ["tests"], ["--", "lab"]]
)
def test_a_wrong_command_line_makes_no_venv(new: TinyCourse, words: list[str]) -> None:
    _, err = new.run(*words, code=2)
    assert "error:" in err
    assert not new.venv.exists()


@needs_venv
def test_ladder_and_bench_get_their_arguments_and_give_their_code(made: TinyCourse) -> None:
    assert made.told("ladder", "--n", "64", "--", "-x")["ladder"]["argv"] == ["--n", "64", "-x"]
    assert made.told("bench", "--json")["bench"]["argv"] == ["--json"]
    assert made.told("ladder", "--help")["ladder"]["argv"] == ["--help"]
    made.run("ladder", "fail", code=7)


@needs_venv
def test_it_works_from_any_folder(made: TinyCourse, tmp_path: Path) -> None:
    ladder = made.told("ladder", cwd=tmp_path)["ladder"]
    assert ladder["path"][0] == str(made.root)
    assert str(made.root / "helpers") not in ladder["path"], "helpers/ holds modules of a package, not top-level ones"
    test = made.told("test", cwd=tmp_path)["pytest"]
    assert test["cwd"] == str(made.root)


@needs_venv
def test_the_tests_run_in_the_venv_with_all_options(made: TinyCourse) -> None:
    sanitize = made.root / "tests" / "sanitize.cfg"
    sanitize.write_text("")
    files = [made.root / "tests" / f"test_{number}.py" for number in range(100)]
    for file in files:
        file.write_text("")
    foreign = {"PYTHONPATH": "/foreign", "JUPYTER_PATH": "/kernels", "PYTHONDONTWRITEBYTECODE": "1"}
    out, _ = made.run("test", "--", "-k", "naive", **foreign)
    for file in (sanitize, *files):
        file.unlink()
    ruff, ruff_format, pytest_told, mypy = (json.loads(line) for line in out.splitlines()[:4])
    assert ruff["argv"] == ["check", "."] and ruff_format["argv"] == ["format", "--check", "."]
    assert mypy["name"] == "mypy" and mypy["argv"] == []
    line = f"tests notebooks --fast --nbval --nbval-current-env --nbval-cell-timeout {commands.CELL_SECONDS}"
    line += f" --nbval-kernel-startup-timeout {commands.CELL_SECONDS}"
    line += " --nbval-sanitize-with tests/sanitize.cfg -p helpers.cli.quick_pytest"
    line += f" -n {commands.workers()} --dist loadfile -k naive"
    assert pytest_told["argv"] == line.split()
    assert pytest_told["prefix"] == str(made.venv)
    env = pytest_told["env"]
    assert env["PYTHONPATH"] == str(made.root), "packages of another Python's were let in"
    assert env["JUPYTER_PATH"] == f"{made.venv}/share/jupyter{os.pathsep}/kernels"
    assert env["PATH"].startswith(f"{made.venv}/bin{os.pathsep}")
    assert env["PYTHONDONTWRITEBYTECODE"] is None, "each of its programs would compile the course's modules"
    assert env["COURSE_READY"] is None, "a course.py started from a test would skip its check"
    verdict = r"course: ruff passed, ruff format passed, mypy passed, pytest passed in 0 min \d+ s \(\d+ s of CPU\)"
    assert re.fullmatch(verdict, out.splitlines()[-1])


@needs_venv
def test_chosen_tests_and_all(made: TinyCourse, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("")
    argv = made.told("test", "--", "test_one.py::test_x", "-x", cwd=tmp_path)["pytest"]["argv"]
    assert f"{tmp_path}/test_one.py::test_x" in argv and "tests" not in argv and argv[-1] == "-x"
    assert "--fast" not in argv, "a file that is named is run whole"
    out, _ = made.run("test", "--all", "--", "-x", COURSE_CPU_OPTIMISATION=None)
    (told,) = (line for line in map(json.loads, out.splitlines()[:-1]) if line["name"] == "pytest")
    argv, level = told["argv"], told["env"]["COURSE_CPU_OPTIMISATION"]
    told = made.told("test", "--", "-x", COURSE_CPU_OPTIMISATION=None)["pytest"]
    fast = told["argv"]
    assert (level, told["env"]["COURSE_CPU_OPTIMISATION"]) == ("1", "g")
    assert fast[:4] == ["tests", "notebooks", "--fast", "--nbval"]
    assert argv == [*fast[:2], *["--changed-only"] * (not os.environ.get("CI")), *fast[3:]]
    assert argv[-5:] == ["-n", "1", "--dist", "loadfile", "-x"], "there is no file to test: one process is enough"


def test_the_layout_of_kernels_is_checked_where_there_are_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert "clang-format" not in commands.checks()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one.cu").write_text("")
    assert commands.checks()["clang-format"][-2:] == ["--Werror", str(tmp_path / "kernels" / "one.cu")]


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(1, 64, 1), (2, 23.5, 2), (16, 128, 16), (16, 8, 5), (4, 1, 1), (64, 30, 20)]
)
def test_all_cores_test_where_their_memory_is_enough(
    monkeypatch: pytest.MonkeyPatch, cores: int, gigabytes: float, expected: int
) -> None:
    monkeypatch.setattr(commands.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(commands, "memory", lambda: int(gigabytes * 2**30))
    monkeypatch.setattr(commands, "_numbers", lambda path: [])
    assert commands.workers() == expected


def test_a_container_has_fewer_cores_and_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = commands.memory()
    assert 2**28 < machine < 2**50
    files = {"/sys/fs/cgroup/cpu.max": "250000 100000", "/sys/fs/cgroup/memory.max": str(4 << 30)}
    monkeypatch.setattr(commands, "_numbers", lambda path: [int(word) for word in files.get(path, "").split()])
    monkeypatch.setattr(commands.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert commands.memory() == min(machine, 4 << 30)
    monkeypatch.setattr(commands, "memory", lambda: 64 << 30)
    assert commands.workers() == 3  # two and a half cores
    monkeypatch.undo()
    (tmp_path / "max").write_text("max 100000\n")
    assert commands._numbers(str(tmp_path / "max")) == commands._numbers(str(tmp_path / "none")) == []


@needs_venv
@pytest.mark.parametrize(("ruff", "mypy", "tests", "code"), [(1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 5, 5), (1, 1, 2, 2)])
def test_either_failure_fails_the_command(made: TinyCourse, ruff: int, mypy: int, tests: int, code: int) -> None:
    out, _ = made.run("test", code=code, LEAVE_RUFF=str(ruff), LEAVE_MYPY=str(mypy), LEAVE_PYTEST=str(tests))
    words = ["passed" if number == 0 else "FAILED" for number in (ruff, mypy, tests)]
    assert re.search(rf"course: ruff {words[0]}, .*, mypy {words[1]}, pytest {words[2]} in", out.splitlines()[-1])


@needs_venv
def test_interrupting_a_command_ends_it(made: TinyCourse) -> None:
    child = made.start("ladder", "sleep")
    assert child.stdout is not None
    assert "ladder" in child.stdout.readline()
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=HANGS)
    assert child.returncode == 130 and "Traceback" not in err


# -------------------------------------------------------------------------------------------- JupyterLab


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is already in use."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(5)
        yield server.getsockname()[1]


@needs_venv
def test_lab_opens_the_first_notebook(made: TinyCourse, taken: int) -> None:
    page = "--LabApp.default_url=/lab/tree/"
    assert made.told("lab")["jupyterlab"]["argv"][0] == f"--ServerApp.root_dir={made.root}"
    (made.root / "README.md").write_text("")
    assert made.told("lab")["jupyterlab"]["argv"][-1] == page + "README.md"
    for name in ("01_naive", "00_attention"):
        (made.root / "notebooks" / f"{name}.ipynb").write_text("")
    lab = made.told("lab", "--", "--no-browser")["jupyterlab"]
    assert lab["argv"][-2:] == [page + "work/00_attention.ipynb", "--no-browser"]
    assert lab["cwd"] == str(made.root)
    assert (made.root / "work" / "01_naive.ipynb").is_file()
    assert made.told("lab", "--originals")["jupyterlab"]["argv"][-1] == page + "notebooks/00_attention.ipynb"
    assert (made.venv / "etc" / "ipython" / "ipython_config.py").is_file()
    chosen = str(made.root / "notebooks" / "01_naive.ipynb")
    argv = made.told("lab", "--", "notebooks/01_naive.ipynb")["jupyterlab"]["argv"]
    assert argv[-1] == chosen and not any(word.startswith(page) for word in argv)


@needs_venv
def test_lab_tells_of_copies(copied: TinyCourse) -> None:
    shutil.rmtree(copied.root / "work", ignore_errors=True)  # left by other tests
    notebook = copied.root / "notebooks" / "00_attention.ipynb"
    notebook.write_text('{"cells": []}')
    _, err = copied.run("lab")
    assert "work/ has your copies of the notebooks" in err
    (copied.root / "work" / "00_attention.ipynb").write_text('{"cells": [{"cell_type": "code", "source": "mine"}]}')
    notebook.write_text('{"cells": [{"cell_type": "code", "source": "newer"}]}')
    _, err = copied.run("lab")
    assert "work/00_attention.ipynb is as you left it; the course has a newer one" in err
    assert "mine" in (copied.root / "work" / "00_attention.ipynb").read_text()
    shutil.rmtree(copied.root / "work")
    (copied.root / "work").write_text("a file of that name")
    out, err = copied.run("lab")
    assert "was not brought up to date" in err and "notebooks/00_attention.ipynb" in out


@pytest.mark.skipif(find_spec("jupyterlab") is None, reason="JupyterLab is not installed here")
def test_the_real_jupyterlab_starts_here(taken: int, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        str(SCRIPT),
        "lab",
        "--originals",
        "--this-python",
        "--",
        "--no-browser",
        "--IdentityProvider.token=open",
    ]
    env = dict(os.environ, JUPYTER_PORT=str(taken), JUPYTER_CONFIG_DIR=str(tmp_path), JUPYTER_DATA_DIR=str(tmp_path))
    env["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    log = tmp_path / "log"
    with log.open("w") as file:
        child = subprocess.Popen(argv, stdout=file, stderr=file, env=env, cwd=tmp_path, start_new_session=True)
    try:
        url = r"http://(localhost|127\.0\.0\.1):(\d+)/lab/tree/notebooks/00_attention.ipynb\S*"
        wait_for(lambda: child.poll() is not None or re.search(url, log.read_text()), "JupyterLab")
        found = re.search(url, log.read_text())
        assert found, log.read_text()
        assert int(found[2]) != taken
        names: list[str] = []

        def answers() -> bool:
            port = [match[1] for match in re.findall(url, log.read_text())][-1]  # it may have taken another
            address = f"http://127.0.0.1:{port}/api/contents/helpers?token=open"
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(address, timeout=HANGS) as page:
                names.extend(entry["name"] for entry in json.load(page)["content"])
            return child.poll() is not None or bool(names)

        wait_for(answers, "an answer of JupyterLab's")  # on a busy machine it may print before it listens
        assert "course.py" in names, log.read_text()
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(HANGS)


# ----------------------------------------------------------------------------------------- the notebooks


@pytest.mark.skipif(find_spec("nbval") is None or find_spec("xdist") is None, reason="nbval or xdist is not installed")
def test_notebooks_run_on_this_python_and_find_helpers(new: TinyCourse, tmp_path: Path) -> None:
    """With the real pytest and nbval; a broken python3 kernel installed by the user must not be used."""
    for name in ("own", "data"):
        kernel = tmp_path / name / "kernels" / "python3"
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(
            json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"})
        )
    (new.root / "helpers" / "__init__.py").write_text("")
    right = {
        "cell_type": "code",
        "execution_count": 1,
        "id": "right",
        "metadata": {},
        "source": "import sys, helpers.bench.command\nprint(sys.prefix)",
        "outputs": [{"name": "stdout", "output_type": "stream", "text": sys.prefix + "\n"}],
    }
    wrong = {**right, "id": "wrong", "outputs": []}
    notebook = {"cells": [right, wrong], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (new.root / "notebooks" / "00_half_right.ipynb").write_text(json.dumps(notebook))
    (new.root / "ruff.toml").write_text('exclude = ["*"]\n')
    settings = {"JUPYTER_PATH": str(tmp_path / "own"), "JUPYTER_DATA_DIR": str(tmp_path / "data")}
    out, _ = new.run("test", "--this-python", "--", "notebooks/00_half_right.ipynb", "-n0", code=1, **settings)
    assert "1 failed, 1 passed" in out
    assert re.search(r"FAILED notebooks/00_half_right.ipynb::Cell 1", out)
    assert "course: ruff passed, ruff format passed" in out.splitlines()[-1]
