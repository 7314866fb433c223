"""Learners' copies of the notebooks: they follow the originals, and no cell of a learner's is ever lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import work_copy

ROOT = Path(__file__).resolve().parent.parent


class Course:
    """A small course in a folder: notebooks with a few cells."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks").mkdir()
        self.publish("00_first", "a = 1", "b = 2")
        self.publish("01_second", "c = 3")
        (root / "notebooks" / "glossary.md").write_text("# Words\n")

    def publish(self, name: str, *cells: str, outputs: str = "") -> None:
        self._write(self.root / "notebooks" / f"{name}.ipynb", cells, outputs)

    def save(self, name: str, *cells: str, outputs: str = "shown") -> None:
        """Save the learner's copy like JupyterLab."""
        self._write(self.root / "work" / f"{name}.ipynb", cells, outputs)

    @staticmethod
    def _write(path: Path, cells: tuple[str, ...], outputs: str) -> None:
        code = {"cell_type": "code", "metadata": {}, "execution_count": 1 if outputs else None}
        shown = [{"output_type": "stream", "name": "stdout", "text": outputs}] if outputs else []
        nb_cells = [{**code, "id": f"cell{i}", "source": text, "outputs": shown} for i, text in enumerate(cells)]
        path.write_text(json.dumps({"cells": nb_cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))

    def cells(self, name: str) -> list[str]:
        text = (self.root / "work" / f"{name}.ipynb").read_text()
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"]]

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.root / "work").iterdir() if not path.name.startswith("."))

    def refresh(self) -> list[str]:
        return work_copy.refresh(self.root)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    fresh = Course(tmp_path)
    assert fresh.refresh() == ["work/ has your copies of the notebooks; notebooks/ stays as it is"]
    return fresh


def test_copies_all_of_it(course: Course) -> None:
    assert course.names() == ["00_first.ipynb", "01_second.ipynb", "glossary.md"]
    for name in course.names():
        assert (course.root / "work" / name).read_text() == (course.root / "notebooks" / name).read_text()
    assert course.refresh() == []


def test_a_learners_cells_stay(course: Course) -> None:
    course.save("00_first", "a = 10", "b = 2", "mine = True")
    assert course.refresh() == []
    assert course.cells("00_first") == ["a = 10", "b = 2", "mine = True"]


def test_a_newer_original_takes_the_place_of_an_untouched_copy(course: Course) -> None:
    course.save("00_first", "a = 1", "b = 2", outputs="run, and nothing else")
    course.publish("00_first", "a = 1", "b = 22")
    assert course.refresh() == ["work/00_first.ipynb was brought up to date"]
    assert course.cells("00_first") == ["a = 1", "b = 22"] and course.refresh() == []


def test_a_newer_original_comes_beside_a_touched_copy(course: Course) -> None:
    course.save("00_first", "a = 10", "b = 2")
    course.publish("00_first", "a = 1", "b = 22")
    [sentence] = course.refresh()
    assert "as you left it" in sentence and "work/00_first (new).ipynb" in sentence
    assert course.cells("00_first") == ["a = 10", "b = 2"] and course.cells("00_first (new)") == ["a = 1", "b = 22"]
    assert course.refresh() == [], "it is said once"


def test_the_one_beside_follows_too(course: Course) -> None:
    course.save("00_first", "a = 10", "b = 2")
    course.publish("00_first", "a = 1", "b = 22")
    course.refresh()
    course.publish("00_first", "a = 1", "b = 222")
    assert course.refresh() == ["work/00_first (new).ipynb was brought up to date"]
    course.save("00_first (new)", "a = 1", "b = my own")
    course.publish("00_first", "a = 1", "b = 2222")
    [sentence] = course.refresh()
    assert "work/00_first (new 2).ipynb" in sentence
    assert course.cells("00_first") == ["a = 10", "b = 2"]
    assert course.cells("00_first (new)") == ["a = 1", "b = my own"]
    assert course.cells("00_first (new 2)") == ["a = 1", "b = 2222"]


def test_a_copy_that_became_the_newer_original_is_up_to_date(course: Course) -> None:
    """A learner who makes the correction by hand is not notified again."""
    course.publish("00_first", "a = 1", "b = 22")
    course.save("00_first", "a = 1", "b = 22")
    assert course.refresh() == [] and course.names() == ["00_first.ipynb", "01_second.ipynb", "glossary.md"]


def test_outputs_alone_are_no_newer_original(course: Course) -> None:
    course.save("00_first", "a = 10", "b = 2")
    course.publish("00_first", "a = 1", "b = 2", outputs="executed again")
    assert course.refresh() == [] and course.cells("00_first") == ["a = 10", "b = 2"]


def test_a_new_notebook_and_a_deleted_copy_come(course: Course) -> None:
    course.publish("02_third", "d = 4")
    (course.root / "work" / "01_second.ipynb").unlink()
    course.refresh()
    assert course.cells("02_third") == ["d = 4"] and course.cells("01_second") == ["c = 3"]


def test_what_the_learner_made_is_left_alone(course: Course) -> None:
    course.save("notes", "mine")
    (course.root / "work" / "data.bin").write_bytes(b"\xff\x00")
    course.refresh()
    assert course.cells("notes") == ["mine"] and (course.root / "work" / "data.bin").read_bytes() == b"\xff\x00"


@pytest.mark.parametrize("stamps", ["", "{", "[]", '{"00_first.ipynb": 1}'])
def test_without_its_notes_nothing_is_lost(course: Course, stamps: str) -> None:
    """A copy of unknown origin counts as edited if it differs."""
    course.save("00_first", "a = 10", "b = 2")
    (course.root / "work" / work_copy.STAMPS).write_text(stamps)
    course.refresh()
    assert course.cells("00_first") == ["a = 10", "b = 2"] and course.cells("00_first (new)") == ["a = 1", "b = 2"]
    assert course.cells("01_second") == ["c = 3"] and "01_second (new).ipynb" not in course.names()
    assert course.refresh() == []


def test_a_broken_copy_is_kept(course: Course) -> None:
    """JupyterLab was stopped during a save."""
    (course.root / "work" / "00_first.ipynb").write_bytes(b'{"cells": [{"cell_ty\xff')
    course.publish("00_first", "a = 1", "b = 22")
    course.refresh()
    assert (course.root / "work" / "00_first.ipynb").read_bytes() == b'{"cells": [{"cell_ty\xff'
    assert course.cells("00_first (new)") == ["a = 1", "b = 22"]


def test_a_write_that_fails_leaves_the_old_copy(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    course.publish("00_first", "a = 1", "b = 22")

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work_copy.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        course.refresh()
    monkeypatch.undo()
    assert course.cells("00_first") == ["a = 1", "b = 2"]
    assert not [path for path in (course.root / "work").iterdir() if path.suffix == ".tmp"]
    assert course.refresh() == ["work/00_first.ipynb was brought up to date"]


# ---- the course's own notebooks


def test_links_and_imports_work_from_there(tmp_path: Path) -> None:
    """work/ is as deep as notebooks/, and has everything that notebooks link to."""
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").iterdir():
        if path.is_file():
            (tmp_path / "notebooks" / path.name).write_bytes(path.read_bytes())
    work_copy.refresh(tmp_path)
    for path in sorted((tmp_path / "work").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)#\s]+)", re.sub("`[^`]*`", "", text)):
            if "://" in link:
                continue
            above = link.startswith("../")
            target = ROOT / link[3:] if above else path.parent / link
            assert target.exists(), f"{path.name} links to {link}"
    (tmp_path / "helpers").symlink_to(ROOT / "helpers")
    code = 'import sys; sys.path.insert(0, ".."); from helpers.lesson.predict import board'
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "work", check=True)


def test_git_and_the_tests_do_not_see_it() -> None:
    assert "/work/" in (ROOT / ".gitignore").read_text().splitlines()
    assert '"work"' in (ROOT / "pyproject.toml").read_text().partition("extend-exclude")[2].partition("\n")[0]
