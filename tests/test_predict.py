"""Predictions: accepted or refused, compared with the answer, and never waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.engine import first_build
from helpers.lesson import first_cell
from helpers.lesson import predict as module
from helpers.lesson.exercises import progress
from helpers.lesson.predict import board, predict


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_asked", {})


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_without_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    gib = predict("S", unit="GiB")
    assert printed(capsys) == "S: write a number of GiB for the dots after guess=, and run this cell.\n"
    gib.answer(64.0, because="4 bytes a score.")
    assert printed(capsys) == "S: 64 GiB. No guess yet.\n4 bytes a score.\n"
    assert str(board()) == "0 right of 0 guesses; 1 predictions."


@pytest.mark.parametrize(
    "guess, answer, words, right",
    [
        (64, 64.0, "Your guess, 64, is right.", True),
        (60, 64, "Your guess, 60, is right.", True),
        (57, 64, "Your guess: 57, 1.12× too little.", False),
        (128, 64, "Your guess: 128, 2× too much.", False),
        (-2, 3, "Your guess: -2, 5 away.", False),
        (0, 3, "Your guess: 0, 3 away.", False),
        (0, 0, "Your guess, 0, is right.", True),
        (1, 0, "Your guess: 1, 1 away.", False),
        (1e6, np.int64(4_000_000), "Your guess: 1,000,000, 4× too little.", False),
        (0.5, np.float32(0.125), "Your guess: 0.5, 4× too much.", False),
    ],
)
def test_how_far_off(guess: float, answer: Any, words: str, right: bool, capsys: pytest.CaptureFixture[str]) -> None:
    asked = predict("x", guess=guess)
    asked.answer(answer, slips={57: "57 forgets Q.", 128: "128 counts S twice."})
    out = printed(capsys)
    assert words in out and asked.right() is right
    assert ("57 forgets" in out) == (guess == 57) and ("128 counts" in out) == (guess == 128)


def test_choices(capsys: pytest.CaptureFixture[str]) -> None:
    asked = predict("slowest", choices=("scores", "softmax"), guess="scores")
    asked.answer("softmax", slips={"scores": "Scores are arithmetic."})
    out = printed(capsys)
    assert "slowest: softmax. Your guess: scores.\nScores are arithmetic." in out
    with pytest.raises(ValueError, match="expected one of 'scores', 'softmax'"):
        predict("slowest", choices=("scores", "softmax"), guess="loads")
    with pytest.raises(TypeError, match="expected one of"):
        predict("slowest", choices=("scores", "softmax"), guess=1)
    with pytest.raises(ValueError, match="not one of the choices"):
        asked.answer("loads")


@pytest.mark.parametrize("guess", ["64", None, True, [1]])
def test_a_guess_is_a_number(guess: Any) -> None:
    with pytest.raises(TypeError, match="expected a number of GiB"):
        predict("S", unit="GiB", guess=guess)
    with pytest.raises(ValueError, match="expected a number"):
        predict("S", guess=float("nan"))


def test_a_cell_that_runs_again_keeps_the_typed_guess() -> None:
    predict("S").take(3)
    assert predict("S").guess == 3 and predict("S", unit="GiB").guess is None


def test_the_board(capsys: pytest.CaptureFixture[str]) -> None:
    predict("a", guess=1, unit="ms").answer(1.0)
    predict("b", guess=4000).answer(1000)
    predict("c").answer(0)
    predict("never answered", guess=1)
    predict("d", choices=("x", "y"), guess="y").answer("x")
    assert board()._repr_markdown_().splitlines()[2:6] == [
        "| a | 1 ms | 1 ms | right |",
        "| b | 4,000 | 1,000 | 4× too much |",
        "| c | – | 0 |  |",
        "| d | y | x |  |",
    ]
    assert str(board()) == "1 right of 3 guesses; 4 predictions."


def test_the_box_to_type_into(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In JupyterLab the guess comes from a widget, in any form that people type, which shows how it was read."""
    widgets = pytest.importorskip("ipywidgets")
    display = pytest.importorskip("IPython.display")
    shown: list[Any] = []
    monkeypatch.setattr(first_build, "in_jupyterlab", lambda: True)
    monkeypatch.setattr(display, "display", shown.append)
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    asked = predict("S", unit="GiB")
    label, row = shown.pop().children
    line, note, button = row.children
    assert isinstance(line, widgets.Text) and not line.continuous_update and "S</b> (GiB)" in label.value
    line.value = "1,024"
    assert asked.guess == 1024 and note.value == "noted: 1,024 GiB"
    predict("S", unit="GiB")
    assert shown.pop().children[1].children[0].value == "1024"
    for wrong, says in (("many", "a number, please"), ("1e999", "expected a number"), ("1,0000", "three digits")):
        line.value = wrong
        assert asked.guess == 1024 and says in note.value
    line.value = ""
    assert asked.guess is None and note.value == ""
    assert "course-show-answer" in button._dom_classes and button.layout.display == "none"
    choice = predict("which", choices=("x", "y"))
    buttons = shown.pop().children[1].children[0]
    buttons.value = "y"
    assert choice.guess == "y" and buttons.style.button_width == "auto", "all of a choice can be read"
    monkeypatch.setattr(first_cell, "_instead", [])
    asked.answer(16)
    assert "first make a guess" in first_cell._instead[0] and capsys.readouterr().out == ""
    asked.answer(16)
    assert capsys.readouterr().out == "S: 16 GiB. No guess yet.\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("16", 16), ("1,024", 1024), ("1 024", 1024), ("-2,097,152.5", -2097152.5), ("3.5×", 3.5), ("1e9", 1e9)],
        *[("0,135", 0.135), ("3,5", 3.5), ("25 %", 0.25), ("13.5%", 0.135), ("1/7", 1 / 7), ("1/1,024", 1 / 1024)],
        *[("exp(-2)", np.exp(-2)), ("e^-2", np.exp(-2)), ("e**-2", np.exp(-2)), ("2^20", 2**20), ("4 × 3", 12)],
        *[("log2(8) + sqrt(4)", 5), ("16 GiB", 16), ("−2", -2)],
    ],
)
def test_numbers_as_people_type_them(text: str, value: float) -> None:
    assert module.number(text, "GiB") == pytest.approx(value, rel=1e-15)


def test_per_cent_where_per_cent_is_asked_for() -> None:
    assert module.number("25 %", "%") == module.number("25", "%") == 25


@pytest.mark.parametrize(
    "text", ["", "x", "__import__('os')", "9^9^9^9", "1/0", "exp", "exp(1, 2)", "1,024,5", "[1]", "e.real"]
)
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"a number, please|a comma must be followed by three digits"):
        module.number(text)


# ---- after a restart


@pytest.fixture
def jupyterlab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pose as a cell that JupyterLab sent, of notebook 07; return where guesses are kept."""
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/work/07_mma (new).ipynb")
    monkeypatch.setattr(first_build, "in_jupyterlab", lambda: True)
    monkeypatch.setattr(module, "_shown_line", lambda asked: True)
    return tmp_path / "progress.json"


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_asked", {})


def test_guesses_outlive_the_kernel(jupyterlab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict("a", unit="ms").take(1)
    predict("b", choices=("x", "y")).take("y")
    restart(monkeypatch)
    assert predict("a", unit="ms").guess == 1 and predict("b", choices=("x", "y")).guess == "y"
    restart(monkeypatch)
    assert predict("a", unit="s").guess is None, "another question"
    assert predict("b", choices=("u", "v")).guess is None
    restart(monkeypatch)
    monkeypatch.setenv("JPY_SESSION_NAME", "08_backward.ipynb")
    assert predict("a", unit="ms").guess is None, "of another notebook"


def test_the_board_after_a_restart(jupyterlab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No guess has an answer yet" in str(board())
    predict("a", guess=1, unit="ms").answer(1.0)
    predict("b", choices=("x", "y"), guess="y").answer("x")
    predict("c", guess=5)
    restart(monkeypatch)
    assert str(board()) == "1 right of 2 guesses; 2 predictions."
    predict("a", unit="ms").answer(1.0)
    assert str(board()) == "1 right of 2 guesses; 2 predictions.", "none is there twice"


def test_what_is_solved_and_what_is_guessed_share_a_file(jupyterlab: Path) -> None:
    predict("a").take(1)
    progress.note("00_safe_softmax", "int x;", passed=False)
    predict("b").take(2)
    kept = json.loads(jupyterlab.read_text())
    assert set(kept["guesses"]["07"]) == {"a", "b"} and kept["exercises"]["00_safe_softmax"]["tries"] == 1
    jupyterlab.write_text("{]")
    predict("c").take(3)
    assert progress.guesses("07")["c"]["guess"] == 3
    jupyterlab.write_text('{"guesses": {"07": {"c": {"guess": [], "unit": ""}, "d": 4}}}')
    assert predict("e").guess is None and str(board()).startswith("No guess")


def test_elsewhere_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    predict("a", guess=1).answer(1)
    assert not (tmp_path / "progress.json").exists()
