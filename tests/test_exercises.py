"""Exercises: solutions pass, skeletons fail, and whatever a learner types ends in a line, not in a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from helpers import compile_report, cpu
from helpers.cuda_source import source
from helpers.exercises import exercise
from helpers.exercises.exercise import GRADERS, cell, cuda, grade, skeleton, solution

NAMES = sorted(path.stem for path in exercise.FOLDER.glob("*.cu"))
FIRST = "01_coalesced_scores"


def test_every_file_has_a_grader_and_every_grader_a_file() -> None:
    assert NAMES
    assert sorted(GRADERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name: str) -> None:
    found = grade(name, solution(name))
    assert found and "[FAIL]" not in found.text and found.text.count("[PASS]") >= 1, found.text


@pytest.mark.parametrize("name", NAMES)
def test_the_skeleton_compiles_runs_and_fails(name: str) -> None:
    found = grade(name, skeleton(name))
    assert not found and "[FAIL]" in found.text, found.text
    assert "does not compile" not in found.text and "stopped while it ran" not in found.text, found.text
    assert "Hint: " in found.text, "a learner who fails is told where to look"


@pytest.mark.parametrize("name", NAMES)
def test_the_skeleton_has_holes_and_keeps_the_solution_to_itself(name: str) -> None:
    holes = re.findall(r"// BEGIN hole.*?// END hole", solution(name), re.S)
    text = skeleton(name)
    assert holes and text.count("// TODO, about ") == len(holes)
    assert not re.search(r"BEGIN hole|END hole|DEFAULT", text)
    for hole in holes:
        inside = [line for line in hole.splitlines()[1:-1] if not line.strip().startswith("// DEFAULT")]
        assert inside and "\n".join(inside) not in text
    assert text.isascii(), "some compilers and editors take nothing else"
    assert cell(name) == f"%%cuda {name}\n{text}".rstrip()


@pytest.mark.parametrize("name", NAMES)
def test_nvrtc_takes_it(name: str) -> None:
    kernels = source.kernels(solution(name))
    assert kernels
    for kernel in kernels:
        try:
            report = compile_report.compile_report(f"exercises/{name}.cu", {"HEAD_DIM": 64}, "sm_80", name=kernel)
        except compile_report.NvrtcMissing as error:
            pytest.skip(str(error))
        assert report.spill_bytes == 0, report


# ------------------------------------------------------------------------------------------ what learners may type


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("acc[c] / l_i;", "acc[c] / l_i", "does not compile:\ncell:5"),
        ("HEAD_DIM + c] = acc", "HEAD + c] = acc", "does not compile:\ncell:5"),
        ("if (row >= N) return;", "", "stopped while it ran: illegal read of Q["),
        ("naive_coalesced(", "mine(", "no kernel 'naive_coalesced'; it has mine"),
        ("float* __restrict__ O, int N", "float* __restrict__ O, float* X, int N", "takes 9 arguments, got 8"),
        ("acc[c] / l_i;", "acc[c];", "[FAIL] O: wrong at "),
        ("O[(size_t)row", "if (row != 5) O[(size_t)row", "8 NaN"),
        ("softmax_scale * dot;", "dot;", "[FAIL] O: wrong at "),
    ],
)
def test_a_mistake_is_told_in_a_few_lines(old: str, new: str, words: str) -> None:
    text = solution(FIRST).replace(old, new, 1)
    assert text != solution(FIRST)
    found = grade(FIRST, text)
    assert not found and words in found.text, found.text
    assert "Traceback" not in found.text and len(found.text.splitlines()) <= 8


def test_a_cell_that_never_ends_in_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    cuda(FIRST, "")
    cuda(f"  {FIRST} ", skeleton(FIRST))
    cuda("02_no_such", skeleton(FIRST))
    cuda("", skeleton(FIRST))
    out = capsys.readouterr().out
    assert out.count("[FAIL]") == 4 and out.count(f"no such exercise; there are: {', '.join(sorted(GRADERS))}") == 2
    with pytest.raises(KeyError, match="02_no_such"):
        grade("02_no_such", "")


def test_line_numbers_are_those_of_the_cell() -> None:
    """Line 1 of a cell is the magic's, so that Jupyter's line numbers are the compiler's."""
    lines = cell(FIRST).splitlines()
    place = next(i for i, line in enumerate(lines) if "float l_i" in line)
    lines[place] += " oops;"
    found = grade(FIRST, "\n".join(lines[1:]))
    assert f"cell:{place + 1}: error" in found.text, found.text


def test_inputs_are_fresh() -> None:
    """No output can be learnt by heart."""
    a, b = (exercise.Trial(FIRST, "", cpu, False).inputs(8, 8, 4)[0] for _ in range(2))
    assert not np.array_equal(a, b)


# ----------------------------------------------------------------------------------------------- on a GPU's machine


def test_the_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wild pointer must not reach the GPU, where it would spoil every later cell."""
    seen: list[bool] = []
    original = exercise.Trial.__init__

    def note(self: exercise.Trial, name: str, code: str, device: object, on_gpu: bool) -> None:
        seen.append(on_gpu)
        original(self, name, code, device, on_gpu)

    monkeypatch.setattr(exercise.Trial, "__init__", note)
    monkeypatch.setattr(exercise, "ON_GPU", True)
    assert grade(FIRST, solution(FIRST)) and seen == [False, True]
    seen.clear()
    assert not grade(FIRST, solution(FIRST).replace("if (row >= N) return;", "")) and seen == [False]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(trial: exercise.Trial) -> None:
        if not trial.on_gpu:
            raise cpu.NoCompilerError("no C++ compiler")
        trial.expect("O", "here", np.zeros(1), np.zeros(1))

    monkeypatch.setitem(GRADERS, FIRST, none)
    monkeypatch.setattr(exercise, "ON_GPU", False)
    assert grade(FIRST, "").text == f"[FAIL] {FIRST}: no C++ compiler"
    monkeypatch.setattr(exercise, "ON_GPU", True)
    assert grade(FIRST, "")


# -------------------------------------------------------------------------------------------------------- skeletons


@pytest.mark.parametrize(
    "text",
    [
        "// BEGIN hole: about 1 line - x\na;\n",
        "a;\n// END hole\n",
        "// BEGIN hole: about 1 line - x\n// BEGIN hole: about 1 line - y\na;\n// END hole\n",
        "// BEGIN hole: one line\na;\n// END hole\n",
        "// BEGIN hole: about 1 line - x\na;\n// END hole here\n",
        "// DEFAULT: a;\n",
    ],
)
def test_malformed_holes_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "FOLDER", tmp_path)
    (tmp_path / "x.cu").write_text(text)
    with pytest.raises(ValueError, match=r"x\.cu"):
        skeleton("x")


def test_holes_become_todos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "FOLDER", tmp_path)
    (tmp_path / "x.cu").write_text(
        "a;\n  // BEGIN hole: about 2 lines - add, then store\n"
        "  // DEFAULT: b = 0;\n  b = 1;\n  c = 2;\n  // END hole\nd;\n"
        "// BEGIN hole: about 1 line - nothing by default\ne;\n// END hole\n"
    )
    assert skeleton("x") == (
        "a;\n  // TODO, about 2 lines: add, then store\n  b = 0;\nd;\n// TODO, about 1 line: nothing by default\n"
    )
    with pytest.raises(FileNotFoundError, match="no exercise 'y'; there are: x"):
        solution("y")
