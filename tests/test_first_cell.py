"""In JupyterLab the set-up cell reports that it ran, and which cell may have been skipped."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.engine import first_build
from helpers.lesson import first_cell
from helpers.site import first_screen


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """List the callbacks before and after each cell, by event."""
    registered: dict[str, Any] = {"begun": []}
    shell = SimpleNamespace(events=SimpleNamespace(register=registered.__setitem__))
    monkeypatch.setattr(first_cell, "_watched", [])
    monkeypatch.setattr(first_build, "in_jupyterlab", lambda: True)
    monkeypatch.setattr(first_build, "begin", lambda: registered["begun"].append(True))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    first_cell.watch()
    first_cell.watch()
    return registered


def ran(events: dict[str, Any], cell: str, error: Exception | None = None) -> None:
    events["pre_run_cell"](SimpleNamespace(raw_cell=cell))
    result = SimpleNamespace(info=SimpleNamespace(raw_cell=cell), success=error is None, error_in_exec=error)
    events["post_run_cell"](result)


def test_it_says_when_it_is_done(events: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ran(events, first_screen.opening(7) + "\nimport numpy as np\n")
    assert re.fullmatch(r"Ready after \d+\.\d s, at \d\d:\d\d:\d\d\.\n", capsys.readouterr().out)
    assert events["begun"] == [True], "the engine is built meanwhile, once"
    ran(events, "import helpers")
    ran(events, first_screen.opening(7), ImportError("no"))
    assert capsys.readouterr().out == ""


def test_a_missing_name_may_be_of_a_cell_that_was_jumped_over(
    events: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ran(events, "three", NameError("name 'three' is not defined"))
    assert "Arrow keys jump over folded cells" in capsys.readouterr().out


def test_a_question_takes_the_place_of_all_that_its_cell_shows(
    events: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = SimpleNamespace(clear_output=lambda: print("[cleared]"))
    monkeypatch.setitem(sys.modules, "IPython.display", cleared)
    for error, shown in ((None, "[cleared]\nWhat is your guess?\n"), (ValueError("no"), "")):
        first_cell.show_instead("a line of a cell that was interrupted")
        events["pre_run_cell"](SimpleNamespace(raw_cell="x"))
        first_cell.show_instead("What is your guess?")
        result = SimpleNamespace(info=SimpleNamespace(raw_cell="x"), success=error is None, error_in_exec=error)
        events["post_run_cell"](result)
        assert capsys.readouterr().out == shown


def test_elsewhere_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_cell, "_watched", [])
    first_cell.watch()
    assert first_cell._watched == []
