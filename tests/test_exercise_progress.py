"""A learner's tries are kept: successive hints, the progress file, the board, our lines next to theirs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.attention import check, kernel
from helpers.device import cp
from helpers.lesson.exercises import exercise, hints, progress

NAME = "00_safe_softmax"
WRONG = exercise.ours(NAME).replace("expf(s[j] - m_i)", "expf(s[j])")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    monkeypatch.setattr(progress, "_session", {})
    hints.forget()
    return path


def hint_of(code: str) -> str:
    (line,) = (line for line in exercise.grade(NAME, code).text.splitlines() if line.startswith("Hint "))
    return line.partition(": ")[0]


# -------------------------------------------------------------------------------------------------------------- hints


def test_hints_go_on_with_the_tries_of_a_symptom() -> None:
    assert [hint_of(WRONG) for _ in range(4)] == [f"Hint {i} of 3" for i in (1, 2, 3, 3)]
    assert hint_of(WRONG + "oops").startswith("Hint 1 of "), "another symptom begins with its first hint"


def test_the_last_hint_is_held_back() -> None:
    """Another mistake with the same symptom does not reach it; a third failure with the same one does, or a request."""
    own = {"otherwise": ("look here", "nearly", "the line itself")}
    shown = [hints.hint("x", own, ("wrong",), slip=slip) for slip in "abcdd"]
    assert [text[:6] for text in shown] == ["Hint 1", "Hint 2", "Hint 2", "Hint 2", "Hint 2"]
    assert 'exercise.hint("x")' in hints.offer("x") and exercise.hint("x") == "the line itself"
    assert hints.hint("x", own, ("wrong",), slip="d") == "Hint 3 of 3: the line itself" and not hints.offer("x")
    assert [hints.hint("y", {"wrong": ("a", "b")}, ("wrong",))[:6] for _ in range(3)] == ["Hint 1", "Hint 1", "Hint 2"]
    assert hints.hint("z", {"wrong": ["only this"]}, ("wrong",)) == "Hint 1 of 1: only this" and not hints.offer("z")
    assert "no hint is due" in exercise.hint("w")


def test_how_to_ask_for_the_last_hint() -> None:
    assert "exercise.hint" not in exercise.grade(NAME, WRONG).text, "the second one comes first"
    assert f'exercise.hint("{NAME}")' in exercise.grade(NAME, WRONG).text
    assert exercise.hint(NAME) == exercise.GRADERS[NAME].hints["large"][-1]


def test_compile_errors_have_hints_of_their_own() -> None:
    """They use up none of the solution's hints, and show none: nothing has run yet."""
    assert [hint_of(WRONG + "oops") for _ in range(4)] == [f"Hint {i} of 3" for i in (1, 2, 3, 3)]
    assert hint_of(WRONG) == "Hint 1 of 3"
    hints.forget()
    for name, one in exercise.GRADERS.items():
        if "compile" not in one.hints:
            shown = [hints.hint(name, one.hints, ("compile",)).partition(": ")[2] for _ in range(4)]
            assert set(shown) == set(hints.GENERIC["compile"])


def test_how_to_give_up() -> None:
    text = exercise.grade(NAME, WRONG).text
    assert text.splitlines()[-1] == f'To give up: exercise.solution("{NAME}")'
    for code in (exercise.skeleton(NAME), exercise.ours(NAME)):
        assert "give up" not in exercise.grade(NAME, code).text
    shown = exercise.solution(NAME)
    assert repr(shown) == exercise.ours(NAME) and shown._repr_markdown_() == f"```c++\n{exercise.ours(NAME)}```"


def test_the_skeleton_counts_as_no_try() -> None:
    assert [hint_of(exercise.skeleton(NAME)) for _ in range(2)] == ["Hint 1 of 3"] * 2
    assert hint_of(WRONG) == "Hint 1 of 3"


@pytest.mark.parametrize(
    "of_try, own, wanted",
    [
        (("tail",), {"tail": ["mine"], "otherwise": ["any"]}, "Hint 1 of 1: mine"),
        (("index", "wrong"), {"wrong": ("a", "b")}, "Hint 1 of 2: a"),
        (("wrong",), {"otherwise": ["any"]}, "Hint 1 of 1: any"),
        (("crash", "bounds"), {"otherwise": ["any"]}, f"Hint 1 of 3: {hints.GENERIC['crash'][0]}"),
        (("crash", "bounds"), {"bounds": ["mine"]}, "Hint 1 of 1: mine"),
        (("no such symptom",), {}, ""),
    ],
)
def test_which_hint(of_try: tuple[str, ...], own: dict[str, Any], wanted: str) -> None:
    assert hints.hint("x", own, of_try) == wanted


def test_every_symptom_has_a_hint_that_is_always_true() -> None:
    assert set(hints.OF_FINDING.values()) <= set(hints.GENERIC)
    assert all(hints.hint("y", {}, (symptom,)) for symptom in hints.GENERIC)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint64, "bfloat16"])
def test_what_nobody_wrote_is_recognised(dtype: Any) -> None:
    a = np.zeros((3, 4), np.dtype(dtype) if dtype != "bfloat16" else np.dtype(__import__("ml_dtypes").bfloat16))
    hints.poison(a)
    assert hints.untouched(a).all()
    a[1] = np.nan if a.dtype.kind != "i" and a.dtype.kind != "u" else 0
    assert hints.untouched(a).sum() == 8 and not hints.untouched(a)[1].any()


@pytest.mark.parametrize(
    "change, place",
    [
        (lambda a: a[::-1], (5, 0)),
        (lambda a: np.roll(a, 1, axis=1), (0, 7)),
        (lambda a: 2 * a, None),
        (lambda a: a + 1e-3, None),
        (lambda a: np.zeros_like(a), None),
        (lambda a: a, None),
        (lambda a: np.where(a > 1, np.inf, a), None),
    ],
)
def test_values_in_other_places(change: Callable[[np.ndarray], np.ndarray], place: tuple[int, int] | None) -> None:
    expected = np.random.default_rng(0).standard_normal((6, 8))
    assert hints.displaced(change(expected).astype(np.float32), expected, 1e-5) == place


@pytest.mark.parametrize(
    "change, symptom",
    [
        (lambda a: np.where(np.arange(8) < 3, a, a + 1), "columns"),
        (lambda a: np.repeat(a[:, :1], 8, axis=1), "flat"),
        (lambda a: a * np.linspace(2, 3, 10)[:, None], "factor"),
        (lambda a: np.where(np.arange(8) < 3, a + 1, a), None),
        (lambda a: np.zeros_like(a), None),
        (lambda a: a + 1, None),
        (lambda a: a * (1 + 2e-5), None),
    ],
)
def test_what_wrong_rows_have_in_common(change: Callable[[np.ndarray], np.ndarray], symptom: str | None) -> None:
    expected = np.random.default_rng(0).standard_normal((10, 8))
    expected[4] = 0  # like those of a query of zeros
    got = change(expected)
    result = check.compare("O", got, expected, tolerance=1e-5)
    detected = hints.of_result("O", "N = 10", result, got, expected).symptoms
    assert detected == ((symptom, "wrong") if symptom else ("wrong",))


@pytest.mark.parametrize(
    "message, wanted",
    [
        ('cell:3: error: identifier "INFINITY" is undefined', "infinity"),
        ("cell:3: error: 'INFINITY' was not declared in this scope", "infinity"),
        ('cell:3: error: namespace "std" has no member "max"', "std"),
        ('cell:3: error: identifier "uint32_t" is undefined', "no header"),
        ("f declares 49,664 bytes of static __shared__ memory; a GPU's limit is 49,152", "shared memory"),
        ("cell:3: error: expected ';'\n     3 | float m = -INFINITY", "compile"),
        ('cell:3: error: expected a "("\n     3 | if i < n: x = 1;', "python"),
        ("cell:3: error: expected '(' after 'for'\n     3 | for j in range(n): x += j;", "python"),
        ("cell:3: error: use of undeclared identifier 'True'\n     3 | x = True;", "python"),
        ('cell:3: error: expected a ")"\n     3 | if (i == n) x = 1;', "compile"),
        ("cell:3: error: expected ';' after expression\n     3 | x = 1", "semicolon"),
        ('cell:4: error: expected a ";"\n     4 | }', "semicolon"),
        ("cell:3: error: use of undeclared identifier 'x'\n     3 | x = 1;", "undeclared"),
        ('cell:3: error: no operator "+" matches these operands\n     3 | i = 1 + threadIdx;', "part"),
        ('cell:3: error: no operator "+" matches these operands\n     3 | i = s + threadIdx.x;', "compile"),
        ("cell:3: error: read-only variable is not assignable\n     3 | x[0] = 1;", "read only"),
        ("cell:3: error: void function 'f' should not return a value\n     3 | return x;", "no value"),
        ("cell:3: error: subscripted value is not an array, pointer, or vector\n     3 | x[0][i]", "one index"),
        ('cell:3: error: no instance of overloaded function "max" matches\n     3 | max(X);', "arguments"),
        (
            "cell:3: error: expected ',' or ';' before 'for'\n     3 | float s = 0.0f  // for each key in the tile",
            "semicolon",
        ),
        ("cell:3: error: 'x' was not declared\n     3 | if (a) x = 1; else if (b) x = 2; else x = 3;", "undeclared"),
        ("cell:3: error: 'n' was not declared\n     3 | for (;;) if (a[j]) s += 1; else s += n;", "undeclared"),
        ("cell:3: error: 'n' was not declared\n     3 | float** p = n;", "undeclared"),
        ("cell:3: error: 'i' was not declared\n     3 | O[i] = 1;  // blockIdx times blockDim", "undeclared"),
    ],
)
def test_what_a_compiler_refuses(message: str, wanted: str) -> None:
    assert hints.of_refusal(message)[0] == wanted


@pytest.mark.parametrize(
    "line, found",
    [
        ("if (i < n);", True),
        ("for (int j = 0; j < n; ++j);", True),
        ("for (int j = 0; j < n; sum += X[j++]);", False),
        ("#define CHECK(a) if (a);", False),
        ("if (i < n) x = f(i);", False),
    ],
)
def test_a_semicolon_that_ends_a_statement_too_early(line: str, found: bool) -> None:
    assert (hints.of_warnings("", line, line) is not None) == found


def test_expected_infinities_are_no_hint() -> None:
    assert hints.displaced(np.zeros(4, np.float32), np.array([0.0, -np.inf, 1.0, 2.0]), 1e-5) is None


def test_one_value_everywhere_belongs_nowhere() -> None:
    """All zeros, and a 0 is expected somewhere."""
    expected = np.linspace(-1.0, 2.0, 301)
    assert hints.displaced(np.zeros(301, np.float32), expected, 1e-5) is None
    assert hints.displaced(np.roll(expected, 1).astype(np.float32), expected, 1e-5) == (300,)


# ------------------------------------------------------------------------------------------------------- the progress


def test_tries_are_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exercise.cuda(NAME, exercise.skeleton(NAME))
    assert not file.exists(), "the skeleton as it is is no try"
    exercise.cuda(NAME, WRONG)
    assert "1 try" in repr(exercise.progress())
    exercise.cuda(NAME, exercise.ours(NAME))
    exercise.cuda(NAME, WRONG)
    entry = json.loads(file.read_text())["exercises"][NAME]
    assert entry.pop("skeleton")
    assert entry == {"tries": 3, "solved": True, "text": exercise.ours(NAME)}
    progress._session.clear()  # another session
    shown = exercise.progress()
    assert "solved" in repr(shown) and f"1 of {len(exercise.GRADERS)} exercises solved" in repr(shown)
    assert "| 00 | safe softmax | " in shown._repr_markdown_()
    assert "Solved. exercise.compare" in capsys.readouterr().out


def test_the_last_text_that_compiles_can_be_looked_at(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("helpers.lesson.exercises.exercise"), "_tried", {})
    assert exercise.tried(NAME) == exercise.holes.complete(exercise.skeleton(NAME))
    for text, last in ((WRONG, WRONG), ("no C++", WRONG), (exercise.ours(NAME), exercise.ours(NAME))):
        exercise.cuda(NAME, text)
        assert exercise.tried(NAME) == exercise.holes.complete(last)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"exercises": []}', '{"exercises": {"00_safe_softmax": 1}}', "\0"])
def test_a_broken_file_never_breaks_grading(text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    exercise.cuda(NAME, exercise.ours(NAME))
    assert "[FAIL]" not in capsys.readouterr().out
    assert progress.read()[NAME].solved and json.loads(file.read_text())["exercises"]


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "no" / "folder" / "x.json"))
    progress.note(NAME, exercise.ours(NAME), passed=True)
    assert progress.read()[NAME].solved, "this session still has it"
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path))  # a folder
    progress.note(NAME, WRONG, passed=False)
    assert progress.read()[NAME].tries == 2 and not list(tmp_path.glob(".progress-*"))


def test_the_file_is_not_committed() -> None:
    root = kernel.KERNELS.parent
    assert ".progress.json" in (root / ".gitignore").read_text().split()


def test_minutes() -> None:
    assert exercise.minutes("00") == exercise.minutes("00_attention") >= exercise.GRADERS[NAME].minutes
    assert exercise.minutes("99") == 0


def test_a_workshop_has_exercises_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """03b next to 03: an exercise keeps its name, and counts where its notebook is."""
    before = exercise.minutes("03")
    (*_, moved) = sorted(name for name in exercise.GRADERS if name.startswith("03_"))
    minutes = exercise.GRADERS[moved].minutes
    monkeypatch.setitem(exercise.GRADERS, moved, replace(exercise.GRADERS[moved], notebook="03b"))
    assert (exercise.minutes("03_online_softmax"), exercise.minutes("03b_more")) == (before - minutes, minutes)
    board = exercise.progress()._repr_markdown_()
    assert f"| 03b | {moved[3:].replace('_', ' ')} |" in board and board.index("| 03b |") > board.rindex("| 03 |")


# ----------------------------------------------------------------------------------------------------- ours and theirs


def test_best_is_the_learners_once_solved() -> None:
    text, whose = exercise.best(NAME)
    assert whose == "ours" and "BEGIN hole" not in text
    mine = exercise.ours(NAME).replace("float m_i", "/* mine */ float m_i")
    progress.note(NAME, mine, passed=True)
    progress.note(NAME, WRONG, passed=False)
    text, whose = exercise.best(NAME)
    assert whose == "yours" and "/* mine */" in text
    run = kernel.load(text, "safe_softmax", defines={"BLOCK_M": 64})
    p = cp.empty((1, 2), np.float32)
    run((1,), (64,), (cp.zeros((1, 2), np.float32), p, np.int32(1), np.int32(2)))
    np.testing.assert_array_equal(cp.asnumpy(p), 0.5)


def test_a_text_of_an_exercise_that_has_changed_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    progress.note(NAME, exercise.ours(NAME), passed=True)
    monkeypatch.setattr(progress.holes, "skeleton", lambda name: "another one")
    assert exercise.best(NAME)[1] == "ours" and "1 of" in repr(exercise.progress())


def test_compare() -> None:
    assert "not solved yet" in exercise.compare(NAME)._repr_markdown_()
    progress.note(NAME, exercise.ours(NAME).replace("s[j] - m_i", "-m_i + s[j]"), passed=True)
    shown = exercise.compare(NAME)
    assert repr(shown) == f"{NAME}, yours is right; beside ours: 1 line ours, 1 yours"
    markup = shown._repr_html_()
    assert markup.splitlines()[1].startswith("<details><summary>")
    assert "-m_i + s[j]" in markup and "BEGIN hole" not in markup


def test_the_comments_of_the_skeleton_are_no_difference() -> None:
    ours = exercise.ours(NAME)
    progress.note(NAME, ours.replace("  float m_i", "  // TODO, about 2 lines: a float m_i\n  float m_i"), passed=True)
    assert "the same as ours" in exercise.compare(NAME)._repr_markdown_()


def test_the_difference_is_shown_once_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(exercise, "_shell", lambda: object())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.append))
    exercise.cuda(NAME, WRONG)
    assert not shown
    exercise.cuda(NAME, exercise.ours(NAME))
    assert "the same as ours" in repr(shown.pop())
    exercise.cuda(NAME, exercise.ours(NAME).replace("s[j] - m_i", "-m_i + s[j]"))
    assert len(shown) == 1 and "yours is right" in repr(shown[0])


def test_an_interrupt_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str, code: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exercise, "grade", interrupted)
    exercise.cuda(NAME, WRONG)
    assert capsys.readouterr().out == f"[FAIL] {NAME}: interrupted\n"


# -------------------------------------------------------------------------------------------------- what kernels print


def printing(condition: str, name: str = "00_first_kernel") -> str:
    return exercise.ours(name).replace("\n}", f'\n  if ({condition}) printf("i = %d of %d\\n", threadIdx.x, n);\n}}', 1)


def test_printf_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines are those of the first size, although the X-ray runs there as well, and other sizes follow."""
    exercise.cuda("00_first_kernel", printing("threadIdx.x + blockIdx.x == 0"))
    out = capsys.readouterr().out
    assert out.startswith("printf at n = 192, BLOCK = 128 (it prints at 5 more):\ni = 0 of 192\n[PASS]")
    assert out.count("i = ") == 1


def test_printf_is_that_of_the_size_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code = printing("threadIdx.x + blockIdx.x == 0").replace("if (i < n)", "if (i < n && n != 129)")
    exercise.cuda("00_first_kernel", code)
    out = capsys.readouterr().out
    assert out.startswith("printf at n = 129, BLOCK = 128 (it prints at 3 more):\ni = 0 of 129\n[PASS]")
    assert "[FAIL]" in out


def test_many_lines_are_cut_and_a_crash_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    exercise.cuda("00_first_kernel", printing("true").replace("if (i < n)", ""))
    out = capsys.readouterr().out
    assert out.startswith("printf at n = 192, BLOCK = 128:\n") and "\n... and " in out and " more lines\n" in out
    assert len(out.splitlines()) < 60
