"""The engine as a package, rawkernel: its wheel, and its example without the course."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

from helpers.engine import compiler
from helpers.engine.compiler import HERE

IMPORTS = re.compile(r"^\s*(?:from|import) +(helpers\S*)", re.M)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel using only installed packages."""
    # Read from its metadata, because an import fails in a process that has loaded Python 3.11's own distutils.
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools 77 reads the license of pyproject.toml")
    folder = tmp_path_factory.mktemp("wheel")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    # Without PYTHONPATH: "." would add the engine's folder, whose array.py is not Python's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "pip", "wheel", *how, str(HERE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.exhaustive
def test_what_is_in_the_wheel(wheel: Path) -> None:
    """All sources and headers, nothing of the course, and no path of the machine that built it."""
    left_out = ("setup.py", "plugin/", "examples/", "build/")
    files = (path for path in HERE.rglob("*") if path.suffix in (".py", ".cpp", ".h") or "include" in path.parts)
    ours = {path.relative_to(HERE).as_posix() for path in files if path.is_file() and path.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    inside = {name.partition("/")[2] for name in texts if name.startswith("rawkernel/")}
    assert inside == {name for name in ours if not name.startswith(left_out)}
    assert "pytest_rawkernel.py" in texts
    for name, text in texts.items():
        assert not IMPORTS.search(text) or not name.endswith(".py"), (name, IMPORTS.findall(text))
        for place in (HERE.parent.parent, Path.home(), Path(sys.prefix)):
            assert str(place) + os.sep not in text, (name, place)
    assert not list(HERE.glob("build")) and not list(HERE.glob("*.egg-info"))


@pytest.mark.exhaustive
def test_the_example_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an environment with pytest and NumPy and without the course."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "installed.pth").write_text(f"{Path(numpy.__file__).parent.parent}\n")
    how = ["install", "--no-deps", "--no-index", "-q", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *how], check=True)
    shutil.copytree(HERE / "examples", tmp_path / "project")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("COURSE_", "PYTHON"))}
    env["RAWKERNEL_CACHE"] = str(compiler.cache_dir())
    for option in ("--cuda-on-cpu", "--cuda-sanitize"):
        command = [str(python), "-m", "pytest", option, "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = subprocess.run(command, cwd=tmp_path / "project", env=env, capture_output=True, text=True)
        assert "4 passed, 1 skipped, 1 xfailed" in done.stdout, done.stdout + done.stderr
        looked = "looked at 5 launches of 2 kernels" if option == "--cuda-sanitize" else "looked at 1 launches"
        assert looked in done.stdout and "rawkernel: 0.1.0, CUDA on the CPU" in done.stdout, done.stdout
    alone = "import sys, rawkernel.xray, rawkernel.nvrtc; print([m for m in sys.modules if m.startswith('helpers')])"
    done = subprocess.run([str(python), "-c", alone], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_license_is_the_courses() -> None:
    assert (HERE / "LICENSE").read_bytes() == (HERE.parent.parent / "LICENSE").read_bytes()
