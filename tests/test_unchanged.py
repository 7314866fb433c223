"""Notebooks, and tests of packages that few changes affect, are left out if nothing that they read has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import conftest
import pytest
import unchanged

ENGINE, SET_UP, COURSE = (unchanged.TESTS / f"test_{name}.py" for name in ("engine_math", "course", "attention"))
NOTEBOOK, EXERCISES = unchanged.NOTEBOOKS / "13_hopper_backward.ipynb", unchanged.TESTS / "test_exercises_13.py"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "builds"))


def test_what_a_file_of_tests_reads() -> None:
    names = {path.relative_to(unchanged.ROOT).as_posix() for path in unchanged.read_by(ENGINE)}
    assert {
        "tests/test_engine_math.py",
        "tests/conftest.py",
        "tests/two_speeds.py",
        "helpers/engine",
        "tests/cuda",
    } <= names
    assert "helpers/xray" in names and "tests/half_gradients.py" not in names and "kernels" not in names
    of_set_up = {path.relative_to(unchanged.ROOT).as_posix() for path in unchanged.read_by(SET_UP)}
    assert {"environment.yml", "helpers/course.py", "helpers/cli", "helpers/setup"} <= of_set_up
    of_kernels = set(unchanged.read_by(unchanged.TESTS / "test_xray_counters.py"))
    assert {unchanged.ROOT / "kernels", unchanged.ROOT / "helpers" / "attention"} <= of_kernels
    of_notebook = {path.relative_to(unchanged.ROOT).as_posix() for path in unchanged.read_by(NOTEBOOK)}
    of_notebook -= {f"tests/{name}.py" for name in ("browser", "conftest", "skips", "two_speeds", "unchanged")}
    assert of_notebook == {"notebooks/13_hopper_backward.ipynb", *unchanged.READ_BY_NOTEBOOKS}


def test_the_file_of_a_test_and_of_a_cell(request: pytest.FixtureRequest) -> None:
    assert unchanged.file_of(request.node.nodeid) == "tests/test_unchanged.py"
    assert (
        unchanged.file_of("notebooks/13_hopper_backward::ipynb::Cell 0")
        == NOTEBOOK.relative_to(unchanged.ROOT).as_posix()
    )


@pytest.mark.parametrize("path", [NOTEBOOK, ENGINE])
def test_what_is_unchanged_is_not_collected(path: Path, request: pytest.FixtureRequest) -> None:
    """Pytest calls the hooks of the path's folder, and the notebooks' folder has no conftest."""
    hooks, stash = request.session.gethookproxy(path.parent), request.config.stash
    before = stash[conftest._unchanged]
    try:
        for left_out in ([], [path]):
            stash[conftest._unchanged] = left_out
            ignored = hooks.pytest_ignore_collect(collection_path=path, config=request.config)
            assert bool(ignored) == bool(left_out)
    finally:
        stash[conftest._unchanged] = before


def test_a_file_that_has_passed_is_left_out_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "changed_since_main", lambda: None)
    assert unchanged.unchanged() == []
    unchanged.keep([ENGINE, SET_UP, COURSE, NOTEBOOK, unchanged.NOTEBOOKS / "glossary.md"])
    assert unchanged.unchanged() == [NOTEBOOK, SET_UP, ENGINE]


def test_a_fast_run_does_not_stand_for_exhaustive_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "changed_since_main", lambda: None)
    unchanged.keep([ENGINE])
    assert unchanged.unchanged(whole=True) == []
    unchanged.keep([SET_UP], whole=True)
    assert unchanged.unchanged(whole=True) == [SET_UP] and unchanged.unchanged() == [SET_UP, ENGINE]


@pytest.mark.parametrize("what", ["hash_of", "_environment"])
def test_a_change_of_what_is_read_or_of_a_setting_counts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "changed_since_main", lambda: None)
    unchanged.keep([ENGINE])
    monkeypatch.setattr(unchanged, what, lambda *path: "another")
    assert unchanged.unchanged() == []


def test_what_is_as_on_main_has_passed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """But some files run once on each machine."""

    def left_out(*changed: str) -> set[Path]:
        monkeypatch.setattr(unchanged, "changed_since_main", lambda: {unchanged.ROOT / name for name in changed})
        return set(unchanged.unchanged())

    every = {path for folder in (unchanged.TESTS, unchanged.NOTEBOOKS) for path in folder.iterdir()}
    every = {path for path in every if unchanged.may_be_left_out(path)}
    files = {path for path in every if not unchanged.runs_once(path)}
    first = {path.name for path in every - files}
    assert {*unchanged.FIRST, "00_attention.ipynb", "test_exercises_05.py"} <= first and len(first) == 2 + 6 + 6
    assert {ENGINE, SET_UP, NOTEBOOK, EXERCISES} <= files and left_out() == files
    of_site = {unchanged.TESTS / name for name in unchanged.OF_THE_SITE}
    of_pages = {path for path in files if path.name.startswith("test_exercises_")} | of_site
    assert left_out("notebooks/05_heads_and_masks.ipynb") == files - of_pages
    assert left_out("notebooks/13_hopper_backward.ipynb") == files - of_pages - {NOTEBOOK}
    notebooks = set(unchanged.NOTEBOOKS.glob("*.ipynb"))
    assert left_out("notebooks/measured/new.json") == files - of_pages - notebooks
    assert ENGINE in left_out("kernels/07_mma.cu") and left_out("kernels/07_mma.cu").isdisjoint(of_pages | notebooks)
    assert left_out("tests/test_engine_math.py") == files - {ENGINE}
    assert left_out("helpers/engine/cpp/checker.cpp") == left_out("tests/conftest.py") == set()
    assert left_out("environment.yml") == files - {SET_UP}
    for name in ("helpers/course.py", "helpers/setup/locked/base.txt"):
        assert left_out(name) == files - {SET_UP} - of_pages - notebooks
    of_kernels = unchanged.TESTS / "test_xray_counters.py"
    assert of_kernels not in left_out("kernels/new.cuh") and ENGINE in left_out("kernels/new.cuh")


def test_what_a_clone_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *words], cwd=unchanged.ROOT, check=True, capture_output=True)

    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    monkeypatch.setattr(unchanged, "ROOT", origin)
    assert unchanged.changed_since_main() is None, "no repository"
    git("init")
    for name in ("one", "two", "three"):
        (origin / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "first")
    assert unchanged.changed_since_main() is None, "no origin"
    git("clone", str(origin), str(clone))
    monkeypatch.setattr(unchanged, "ROOT", clone)
    assert unchanged.changed_since_main() == set()
    (clone / "one").write_text("changed")
    git("commit", "-a", "-m", "second")
    (clone / "two").rename(clone / "new")
    assert unchanged.changed_since_main() == {clone / "one", clone / "two", clone / "new"}
