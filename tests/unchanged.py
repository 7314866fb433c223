"""Notebooks and some tests are left out of most runs if they have passed unchanged.

These are tests of the engine, the X-ray, the set-up, exercises and the site.
The engine's, the X-ray's and the set-up's are a third of the tests, and no change of a kernel, a notebook or a stage
can break them. A test file reads its own text, what it imports from tests/, and the packages of helpers/ that it
imports; the set-up's tests also read the command line and the list of packages. Notebooks, exercises and the site read
so much that almost any change of the course runs them again. A file is left out

- if it has passed on this machine with all that it reads, and with the same versions of everything: an empty file next
to the builds has a hash of these as its name, or
- if all that it reads is as on the main branch of the repository that this one was cloned from: CI has run it there.
FIRST tests whether the engine and the course work with this machine's compiler, so it runs once on each; the `course.py
test` that runs the tests shows that the set-up works here.

`course.py test` leaves them out, with --all too; after `--`, --unchanged-too runs them. CI leaves them out for a pull
request (`.ci/run --changed-only`) and runs all on main.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from helpers.engine import compiler

ROOT = Path(__file__).resolve().parent.parent
TESTS, NOTEBOOKS = ROOT / "tests", ROOT / "notebooks"
FIRST = ("test_engine.py", "test_xray_report.py")
FIRST_NOTEBOOKS = ("00", "01", "02", "03", "04", "05")  # and their exercises
OF_THE_SET_UP = ("test_course.py",)
OF_THE_SITE = ("test_book.py", "test_slides.py", "test_moving.py")
READ_BY_NOTEBOOKS = ("helpers", "kernels", "notebooks/measured", "tests/sanitize.cfg")
READ_BY_THE_SITE = ("helpers", "kernels", "notebooks", "teachers", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
ALWAYS_READ = ("engine", "xray", "device")  # in helpers/
KERNELS_TOO = {"attention", "bench", "draw", "lesson", "site"}  # packages that read kernels/


def asked_for(config: Any) -> bool:
    """Tell whether this run of pytest leaves unchanged files out."""
    fast = config.getoption("--fast") and not os.environ.get("CI")
    return (fast or config.getoption("--changed-only")) and not config.getoption("--unchanged-too")


def may_be_left_out(path: Path) -> bool:
    """Tell whether a file is a notebook, or one of the test files that this module is about."""
    if path.parent == NOTEBOOKS:
        return path.suffix == ".ipynb"
    ours = path.name.startswith(("test_engine", "test_xray", "test_exercises_")) or path.name in OF_THE_SET_UP
    return (ours or path.name in OF_THE_SITE) and path.parent == TESTS


def _shared(path: Path) -> set[Path]:
    """Find the files of tests/ that a file imports, directly or indirectly."""
    found: set[Path] = set()
    left = [path, TESTS / "conftest.py"]
    while left:
        found.add(file := left.pop())
        names = re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(encoding="utf-8"), re.M)
        left += [other for other in {TESTS / f"{name}.py" for name in names} - found if other.is_file()]
    return found


def file_of(nodeid: str) -> str:
    """Return the file of a test or of a cell, whose ID in nbval is "notebooks/00_attention::ipynb::Cell 1"."""
    file, _, rest = nodeid.partition("::")
    return f"{file}.ipynb" if rest.startswith("ipynb::") else file


def runs_once(path: Path) -> bool:
    """Tell whether a file is among the first that each machine runs."""
    number = path.name.removeprefix("test_exercises_").partition("_")[0].removesuffix(".py")
    return path.name in FIRST or number in FIRST_NOTEBOOKS


def read_by(path: Path) -> Iterator[Path]:
    """List the files and folders that a notebook, or a test file, depends on."""
    if path.parent == NOTEBOOKS:
        yield from (path, *_shared(TESTS / "conftest.py"), *(ROOT / name for name in READ_BY_NOTEBOOKS))
        return
    text = path.read_text(encoding="utf-8")
    imported = {name for name in re.findall(r"^\s*(?:from|import) helpers\.(\w+)", text, re.M)}
    imported |= set(re.findall(r"\w+", " ".join(re.findall(r"^\s*from helpers import (.*)$", text, re.M))))
    shared = _shared(path) - {Path(__file__).resolve()}
    yield from shared
    for module, folder in (("hopper_tiles.py", "planted"), ("cuda_files.py", "cuda")):
        if TESTS / module in shared:  # hopper_tiles.py reads headers there, and planted_files.py all kernels
            yield TESTS / folder
    for name in {*ALWAYS_READ, *imported}:
        yield from (ROOT / "helpers" / f"{name}.py", ROOT / "helpers" / name)
    if imported & KERNELS_TOO:
        yield ROOT / "kernels"
    if path.name in OF_THE_SET_UP:
        yield from (ROOT / "environment.yml", ROOT / "helpers" / "course.py")
    if path.name in OF_THE_SITE or path.name.startswith("test_exercises_"):
        yield from (ROOT / name for name in READ_BY_THE_SITE)


@functools.cache
def _contents(path: Path) -> list[str]:
    """Return a line with a hash for each file in a folder, or for a file; none if nothing exists."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        f"{file.relative_to(ROOT).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}"
        for file in files
        if file.is_file() and file.suffix != ".pyc"
    ]


@functools.cache
def hash_of(path: Path) -> str:
    """Hash everything that a test file reads."""
    lines = sorted(line for file in read_by(path) for line in _contents(file))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@functools.cache
def _environment() -> str:
    """Describe what is installed, and the settings under which tests run."""
    packages = sorted(f"{each.metadata['Name']} {each.version}" for each in importlib.metadata.distributions())
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("COURSE_"))
    settings = [each for each in settings if not each.startswith(("COURSE_CACHE=", "COURSE_PROGRESS="))]
    try:
        command, version = compiler.compiler()
    except compiler.NoCompilerError:
        command, version = (), ""
    return "\n".join([sys.version, platform.platform(), *command, version, *packages, *settings])


def _mark_of(path: Path, whole: bool) -> Path:
    """Name the empty file which records that these tests have passed on this machine. whole: exhaustive ones too."""
    asked = "\n".join([path.name, hash_of(path), _environment(), *["whole"] * whole])
    return compiler.cache_dir() / f"passed-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"


def _git(*words: str) -> list[str] | None:
    """Run git in this repository, and return its output lines; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout.splitlines()


def changed_since_main() -> set[Path] | None:
    """Find the files that differ from the commit of the origin's main branch that this checkout is based on.

    None if there is no such commit: no clone, or no git.
    """
    base = _git("merge-base", "HEAD", "origin/HEAD")
    changed = _git("diff", "--name-only", "--no-renames", *base) if base else None
    new = _git("ls-files", "--others", "--exclude-standard")
    return None if changed is None or new is None else {ROOT / name for name in changed + new}


def unchanged(whole: bool = False) -> list[Path]:
    """List the test files that need not run again. whole: in a run of exhaustive tests too."""
    changed = changed_since_main()

    def is_as_on_main(path: Path) -> bool:
        places = set(read_by(path))
        return changed is not None and not any(places & {file, *file.parents} for file in changed)

    files = [path for path in sorted([*TESTS.glob("test_*.py"), *NOTEBOOKS.glob("*.ipynb")]) if may_be_left_out(path)]
    return [path for path in files if (not runs_once(path) and is_as_on_main(path)) or _mark_of(path, whole).exists()]


def keep(passed: Iterable[Path], whole: bool = False) -> None:
    """Record for this machine that these files' tests have passed, as far as they may be left out."""
    for path in passed:
        if may_be_left_out(path):
            for how in {False, whole}:
                _mark_of(path, how).touch()
