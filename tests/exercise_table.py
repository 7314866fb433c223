"""The tables of typical answers to exercises, and the one check that all of them go through.

    TABLE = {
        "02_load_tile": (
            Wrong("forgets the tail", (("first + j < N_kv ? K[", "true ? K["),), "awkward", "elements wrong"),
            Right("with a while loop", (("for (int i", "int i"),)),
        ),
    }

    @pytest.mark.parametrize("name, answer", cases(TABLE))
    def test_answer(name: str, answer: Answer) -> None:
        check(name, answer)

An answer is our solution, without its markers, with some pieces of text replaced. A table has two wrong answers for
each row and symptom that the grader distinguishes, and those that mutants of the grader required.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.lesson.exercises import exercise, hints, trial

Edits = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Wrong:
    """A typical wrong answer.

    edits: (old, new) in order; each replaces the first occurrence of the old text. row: the one that must fail:
    "compiles", "first", "awkward", "X-ray" or "limit". words: must be in the printed text. symptom: that of the hint,
    if it matters.
    """

    name: str
    edits: Edits
    row: str
    words: str = ""
    symptom: str = ""


@dataclass(frozen=True)
class Right:
    """An answer that is as right as ours."""

    name: str
    edits: Edits


Answer = Wrong | Right
Table = Mapping[str, Sequence[Answer]]


def row_title(word: str) -> str:
    """Return the title of the row that contains this word."""
    (title,) = (title for title in trial.ROWS if word in title)
    return title


def edited(name: str, edits: Edits) -> str:
    """Return our solution with the edits."""
    text = exercise.ours(name)
    for old, new in edits:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def cases(answers: Table) -> list[Any]:
    """Return the answers of a table, for pytest.mark.parametrize("name, answer", ...).

    The fast run grades one answer per notebook, wrong at its first size, in addition to our solutions in
    test_exercises.py.
    """
    every = [(name, answer) for name, several in answers.items() for answer in several]
    wrong = [case for case in every if isinstance(case[1], Wrong)]
    fast = next((case for case in wrong if case[1].row == "first"), wrong[0])
    marks = {False: [pytest.mark.exhaustive], True: []}
    return [pytest.param(*case, id=f"{case[0]}: {case[1].name}", marks=marks[case is fast]) for case in every]


def check(name: str, answer: Answer) -> None:
    """Grade an answer, and check that it passes, or fails in its row with a short message and a hint.

    Its inputs are the same in every run.
    """
    hints.forget()
    seed = zlib.crc32(f"{name}: {answer.name}".encode())
    result = exercise.grade(name, edited(name, answer.edits), seed=seed)
    if isinstance(answer, Right):
        assert result, result.text
        return
    title = row_title(answer.row)
    assert title in result.failed(), f"{title!r} did not fail:\n{result.text}"
    assert answer.words in result.text, result.text
    assert not answer.symptom or result.symptom == answer.symptom, f"symptom {result.symptom!r}:\n{result.text}"
    assert "Hint 1 of " in result.text and "Traceback" not in result.text, result.text
    assert len(result.text.splitlines()) <= 16, result.text
