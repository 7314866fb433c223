"""`course.py progress`: what is solved, what comes next, how long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.lesson import road
from helpers.lesson.exercises import exercise, progress


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    monkeypatch.setattr(progress, "_session", {})
    return path


def solve(*names: str) -> None:
    for name in names:
        progress.note(name, exercise.ours(name), passed=True)


def test_before_the_first_one() -> None:
    table, _, rest = road.text().partition("\n\n")
    names = [path.name.partition("_")[0] for path in sorted(road.NOTEBOOKS.glob("[0-9]*.ipynb"))]
    assert [line.split()[0] for line in table.splitlines()] == names
    assert sum(len(stop.exercises) for stop in road.stops()) == len(exercise.GRADERS)
    assert all(" min to read" in line and len(line) <= 120 for line in table.splitlines())
    assert rest.startswith(
        f"0 of {len(exercise.GRADERS)} exercises solved.\nNext: 00_first_kernel, about 5 minutes, in "
    )
    minutes = sum(one.minutes for one in exercise.GRADERS.values())
    assert f"about {minutes // 60} h {minutes % 60:02} min." in rest and "The notebook takes about" in rest


def test_the_next_one_is_of_the_notebook_that_was_begun() -> None:
    solve("00_first_kernel", "02_load_tile")
    progress.note("02_no_conflicts", "int x;", passed=False)
    text = road.text()
    assert "2 of " in text and "Next: 02_no_conflicts, about" in text and "after 1 try, in 02_tiled.ipynb" in text
    assert "The notebook takes" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("02 "))
    assert "1 of 4 solved" in line


def test_guesses_count_where_they_were_answered(file: Path) -> None:
    told = {"a": {"guess": 1, "unit": "", "value": 2}, "b": {"guess": 1, "unit": "", "value": None}}
    file.write_text(json.dumps({"guesses": {"03": told}}))
    assert [stop.guesses for stop in road.stops()][3] == 1
    assert "  1 guess" in road.text() and "Next: 03_" in road.text()


def test_at_the_end() -> None:
    solve(*exercise.GRADERS)
    text = road.text()
    assert f"{len(exercise.GRADERS)} of {len(exercise.GRADERS)} exercises solved." in text and "certificate" in text
    assert "Next" not in text
