"""The first build of the engine: reported while it runs, started early, and silent if it is done."""

from __future__ import annotations

import threading
import time

import pytest

from helpers.engine import compiler, first_build


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is shown in a terminal or JupyterLab."""
    shown: list[str] = []
    monkeypatch.setattr(first_build, "SOON", 0.05)
    monkeypatch.setattr(first_build, "_line", lambda: lambda text, *, last: shown.append(f"{text}{'.' * last}"))
    return shown


def test_what_is_soon_done_is_not_said(lines: list[str]) -> None:
    assert first_build.run_with_message(lambda: 3, "counting") == 3 and lines == []


def test_what_takes_long_is_said_until_it_is_done(lines: list[str]) -> None:
    assert first_build.run_with_message(lambda: time.sleep(1.3) or 4, "counting") == 4
    assert lines[0] == "counting ... 0 s" and lines[-1] == "counting ... done in 1 s." and len(lines) >= 3


def test_what_fails_is_raised(lines: list[str]) -> None:
    def fail() -> None:
        raise compiler.CompileError("no")

    with pytest.raises(compiler.CompileError, match="no"):
        first_build.run_with_message(fail, "counting")


def test_where_nobody_looks_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_build, "_line", lambda: None)
    assert first_build.run_with_message(threading.current_thread, "x") is threading.main_thread()


def test_a_programs_run_of_a_notebook_shows_no_line() -> None:
    assert not first_build.in_jupyterlab()


def test_it_begins_in_a_thread_and_leaves_failures_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()

    def fail() -> None:
        called.set()
        raise compiler.NoCompilerError

    fail.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(compiler, "engine_library", fail)
    first_build.begin()
    assert called.wait(60)


def test_it_is_known_whether_it_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory) -> None:
    compiler.engine_library()
    assert compiler.engine_is_built()
    monkeypatch.setenv("COURSE_ENGINE_FLAGS", "-DNOBODY_ASKED_FOR_THIS")
    assert not compiler.engine_is_built()
