"""Exercises: solutions pass, skeletons fail, and whatever a learner types ends in a table, not in a traceback."""

from __future__ import annotations

import importlib
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from exercise_table import Right, Wrong, edited

from helpers import engine
from helpers.attention import compile_report
from helpers.engine import first_build, nvrtc
from helpers.engine.cuda_source import source
from helpers.lesson.exercises import exercise, hints, holes
from helpers.lesson.exercises import grade as grading
from helpers.lesson.exercises.exercise import GRADERS, cell, cuda, grade, skeleton, solution
from helpers.lesson.exercises.trial import AWKWARD, COMPILES, FIRST, XRAY, Exercise, Row, Trial

NAMES = sorted(path.stem for path in exercise.FOLDER.glob("*.cu"))
COALESCED = "01_coalesced_scores"


@pytest.fixture(autouse=True)
def no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    hints.forget()
    return path


def test_every_file_has_a_grader_and_every_grader_a_file() -> None:
    assert NAMES
    assert sorted(GRADERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_typical_answers_are_tested(name: str) -> None:
    """tests/test_exercises_NN.py has at least five wrong answers and a right one of each exercise."""
    answers = importlib.import_module(f"test_exercises_{name[:2]}").TABLE[name]
    assert len({answer.edits for answer in answers if isinstance(answer, Wrong)}) >= 5
    assert any(isinstance(answer, Right) for answer in answers)


@pytest.mark.parametrize("name", NAMES)
def test_typical_answers_are_edits_of_the_solution(name: str) -> None:
    """All of them, including those that only the full run grades."""
    for answer in importlib.import_module(f"test_exercises_{name[:2]}").TABLE[name]:
        assert edited(name, answer.edits) != exercise.ours(name), answer.name


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_has_hints_and_a_time(name: str) -> None:
    one = GRADERS[name]
    assert one.name == name and 1 <= one.minutes <= 20
    assert one.hints, "a learner who fails is told where to look"


HINTS = r"(\[[\w ]+\]\n(\S.*:\n(  - \S.+\n(    \S.+\n)*)+)+\n?)+"


def test_files_of_hints_hold_nothing_else() -> None:
    """Every line of them is read, and every exercise in them exists."""
    for file in Path(hints.__file__).parent.rglob("*.txt"):
        assert re.fullmatch(HINTS, file.read_text(encoding="utf-8")), f"{file.name} has a line that is not read"
        assert set(hints.read(file)) <= {*NAMES, "any exercise"}


RUN_HERE = [
    pytest.param(
        name, marks=[pytest.mark.skipif(bool(missing), reason=missing or "")] + [pytest.mark.exhaustive] * cute
    )
    for name in NAMES
    for cute in [nvrtc.uses_cute(solution(name))]
    for missing in [cute and nvrtc.why_no_cute()]
]

FIRST_OF_EACH = list({param.values[0][:2]: param for param in reversed(RUN_HERE)}.values())  # by notebook
SIZES_OF = ("00_", "02_no_conflicts", "04_float4_rows", "04_pad_the_tile")  # graded at another HEAD_DIM within a size


@pytest.mark.exhaustive(one_of_each=lambda name: name[:2])
@pytest.mark.parametrize("name", RUN_HERE)
def test_the_solution_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head_dim above the tiles of 01 to 05 is graded, 72; a failure there is attributed to it."""
    seen: dict[int, str] = {}
    original = Trial.launch

    def note(self: Trial, *args: object, **defines: object) -> object:
        seen.setdefault(int(str(defines.get("HEAD_DIM", 0))), self._awkward)
        return original(self, *args, **defines)  # type: ignore[arg-type]

    monkeypatch.setattr(Trial, "launch", note)
    result = grade(name, solution(name), seed=zlib.crc32(name.encode()))
    assert result and "[FAIL]" not in result.text and "not tried" not in result.text, result.text
    if name < "06" and not name.startswith(SIZES_OF):
        assert {8, 72} <= set(seen)
        assert "width" in seen.values() or name == "03_rescale", "there the first size is the wide one"


@pytest.mark.exhaustive(one_of_each=lambda name: None)
@pytest.mark.parametrize("name", FIRST_OF_EACH)  # notebooks grade all of them
def test_the_skeleton_compiles_runs_and_fails(name: str) -> None:
    result = grade(name, skeleton(name), seed=zlib.crc32(name.encode()))
    assert not result and result.rows[COMPILES].passed, result.text
    assert result.symptom not in ("crash", "null", "never ends"), result.text
    assert "Hint 1 of " in result.text and len(result.text.splitlines()) <= 14, result.text


@pytest.mark.parametrize("name", NAMES)
def test_the_skeleton_has_holes_and_keeps_the_solution_to_itself(name: str) -> None:
    holes = re.findall(r"// BEGIN hole.*?// END hole", solution(name), re.S)
    text = skeleton(name)
    assert holes and text.count("// TODO, about ") == len(holes)
    assert not re.search(r"BEGIN hole|END hole|DEFAULT", text + exercise.ours(name))
    for hole in holes:
        inside = [line for line in hole.splitlines()[1:-1] if not line.strip().startswith("// DEFAULT")]
        assert inside and "\n".join(inside) not in text
    assert text.isascii(), "some compilers and editors take nothing else"
    assert cell(name) == f"%%cuda {name}\n{text}".rstrip()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUN_HERE)
def test_nvrtc_takes_it(name: str) -> None:
    kernels = source.kernels(solution(name))
    assert kernels
    assert solution(name).count("__launch_bounds__") >= len(kernels)
    for kernel in kernels:
        try:
            arch = f"sm_{GRADERS[name].only_cc}a" if GRADERS[name].only_cc else "sm_80"
            report = compile_report.compile_report(f"exercises/{name}.cu", {"HEAD_DIM": 64}, arch, name=kernel)
        except compile_report.NvrtcMissing as error:
            pytest.skip(str(error))
        assert report.spill_bytes == 0 and not report.warnings, report


def test_without_cutes_headers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "cute_folder", lambda: None)
    result = grade("12_swizzle_layout", solution("12_swizzle_layout"))
    assert not result and result.text.startswith("[FAIL] 12_swizzle_layout: ") and "\n" not in result.text
    assert f"-m pip install --no-deps {nvrtc.CUTLASS}" in result.text


# ------------------------------------------------------------------------------------------ what learners may type


class Mistake(NamedTuple):
    """A learner's mistake that replaces `old`; the row that fails, words of its text, the hint's symptom."""

    old: str
    new: str
    row: str
    words: str
    symptom: str


MISTAKES = [
    Mistake("acc[c] / l_i;", "acc[c] / l_i", COMPILES, "cell:5", "semicolon"),
    Mistake("HEAD_DIM + c] = acc", "HEAD + c] = acc", COMPILES, "cell:5", "undeclared"),
    Mistake("acc[c] / l_i;", "acc[c] / end;", COMPILES, "cell:5", "undeclared"),
    Mistake("naive_coalesced(", "mine(", COMPILES, "no kernel 'naive_coalesced'; it has mine", "signature"),
    Mistake("float* __restrict__ O, int N", "float* O, float* X, int N", COMPILES, "takes 9 arguments", "signature"),
    Mistake("return (size_t)j * N + row;", ";", COMPILES, "ends without a return", "return"),
    Mistake("if (row >= N) return;", "", FIRST, "illegal read of Q[", "crash"),
    Mistake("if (row >= N) return;", "", XRAY, "out of bounds: ", "crash"),
    Mistake("q = Q + (size_t)row", "q = (const float*)nullptr + (size_t)row", FIRST, "null pointer", "null"),
    Mistake("float dot = 0.0f;", "float dot = *(const float*)0;", FIRST, "null pointer", "null"),
    Mistake("acc[c] / l_i;", "acc[c];", FIRST, "wrong by the same factor", "factor"),
    Mistake("O[(size_t)row", "if (row != 5) O[(size_t)row", FIRST, "8 of 320 elements were never", "empty"),
    Mistake("acc[c] / l_i;", "acc[c] / (l_i - l_i) * 0.0f;", FIRST, "NaN at row 0", "nan"),
    Mistake("O[(size_t)row", "O[(size_t)(N - 1 - row)", FIRST, "has the value that belongs to", "index"),
    Mistake("if (row >= N) return;", "if (row >= N || row >= 64) return;", AWKWARD, "never written", "empty"),
    Mistake("acc[c] += p", "if (N_kv % 2 == 0 || j) acc[c] += p", AWKWARD, "elements wrong", "tail"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.symptom}: {mistake.old}")
def test_a_mistake_is_told_in_a_few_lines(mistake: Mistake) -> None:
    text = exercise.ours(COALESCED).replace(mistake.old, mistake.new, 1)
    assert text != exercise.ours(COALESCED)
    result = grade(COALESCED, text)
    assert mistake.row in result.failed() and mistake.words in result.text, result.text
    assert result.symptom == mistake.symptom, result.text
    assert "Traceback" not in result.text and len(result.text.splitlines()) <= 14, result.text


@pytest.mark.parametrize(
    "loop", ["for (;;) {}", "for (int i = 0; i < 9;) O[0] += 1.0f;", "while (true) __syncthreads();"]
)
def test_an_endless_loop_is_stopped_and_its_line_told(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.5")
    text = exercise.ours(COALESCED).replace("  float m_i = NEG_INF;", f"  {loop}\n  float m_i = NEG_INF;")
    line = next(i for i, one in enumerate(text.splitlines(), start=2) if loop in one)
    result = grade(COALESCED, text)
    assert result.failed() == [FIRST] and result.symptom == "never ends"
    assert re.search(rf"stopped after 0.5 s: .* at cell:({line - 3}|{line}|{line + 1})\n", result.text), result.text


def test_a_cell_that_never_ends_in_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    cuda(COALESCED, "")
    cuda(f"  {COALESCED} ", skeleton(COALESCED))
    cuda("02_no_such", skeleton(COALESCED))
    cuda("", skeleton(COALESCED))
    out = capsys.readouterr().out
    assert out.count("[FAIL]") >= 4 and out.count(f"no such exercise; there are: {', '.join(sorted(GRADERS))}") == 2
    with pytest.raises(KeyError, match="02_no_such"):
        grade("02_no_such", "")


def test_line_numbers_are_those_of_the_cell() -> None:
    """Line 1 of a cell is the magic, so that Jupyter's line numbers are the compiler's."""
    lines = cell(COALESCED).splitlines()
    place = next(i for i, line in enumerate(lines) if "float l_i" in line)
    lines[place] += " oops;"
    result = grade(COALESCED, "\n".join(lines[1:]))
    assert f"cell:{place + 1}: error" in result.text, result.text


def test_pasted_headers_keep_the_lines_of_the_cell() -> None:
    text = '// x\n#include "ptx.cuh"\nint a;\n#include "mine.cuh"\n'
    lines = source.line_table(holes.complete(text), "kernel.cu")
    assert lines["cell", 4] == "int a;" and ("ptx.cuh", 1) in lines
    assert '#include "mine.cuh"' in holes.complete(text)


def test_inputs_are_fresh() -> None:
    """No output can be memorised; a seed repeats a trial."""
    a, b, *seeded = (Trial(COALESCED, "", engine, False, seed=s).inputs(8, 8, 4)[0] for s in (None, None, 1, 1))
    assert not np.array_equal(a, b) and np.array_equal(*seeded)


def test_one_query_is_all_zeros() -> None:
    """Its scores are 0, so that no grader mistakes a score of 0 for a missing key."""
    for n in (3, 8, 33):
        q, _, _ = Trial(COALESCED, "", engine, False).inputs(n, 8, 4)
        assert (q == 0).all(axis=1).sum() == 1
    assert (Trial(COALESCED, "", engine, False).inputs(1, 8, 4)[0] != 0).all()


def test_arrays_beyond_32_bits_take_no_memory() -> None:
    trial = Trial(COALESCED, "", engine, False)
    (array,) = trial.far(2**33) or pytest.skip("the system gives no such room")
    array[-1] = 1
    assert array.size == 2**33 and array[2**32] == 0 and isinstance(array, engine.ndarray)
    trial.rows[FIRST].fail(["wrong"], "wrong")
    assert trial.far(8) is None, "nothing is launched after a failure"


def test_nvrtc_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that NVRTC refuses fails, although the CPU engine accepts it. COURSE_NVRTC=0 skips NVRTC."""
    asked: list[tuple[str, ...]] = []

    def refuse(code: str, options: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> str:
        asked.append(options)
        return 'cell:5: error: identifier "uint32_t" is undefined'

    monkeypatch.setattr(nvrtc, "refusal", refuse)
    result = grade(COALESCED, solution(COALESCED))
    assert result.failed() == [COMPILES] and result.symptom == "no header" and "NVRTC" in result.text
    assert len(asked) == 1 and "-DHEAD_DIM=8" in asked[0], "once for a text"
    monkeypatch.setenv("COURSE_NVRTC", "0")
    assert grade(COALESCED, solution(COALESCED)) and len(asked) == 1


# ----------------------------------------------------------------------------------------------- on a GPU's machine


def test_the_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wild pointer must not reach the GPU, where it would make every later cell fail."""
    seen: list[bool] = []
    original = Trial.__init__

    def note(self: Trial, name: str, code: str, device: object, on_gpu: bool, *others: object) -> None:
        seen.append(on_gpu)
        original(self, name, code, engine, False, *others)

    monkeypatch.setattr(Trial, "__init__", note)
    monkeypatch.setattr(grading, "ON_GPU", True)
    assert grade(COALESCED, solution(COALESCED)) and seen == [False, True]
    seen.clear()
    assert not grade(COALESCED, solution(COALESCED).replace("if (row >= N) return;", "")) and seen == [False]


def test_a_gpu_without_the_instructions_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebook 10's exercises are for compute capability 9.0; elsewhere only the CPU engine grades them."""
    for here, expected in ((90, True), (80, False), (100, False)):
        device = SimpleNamespace(compute_capability=str(here))
        monkeypatch.setattr(grading, "cp", SimpleNamespace(cuda=SimpleNamespace(Device=lambda device=device: device)))
        monkeypatch.setattr(grading, "ON_GPU", True)
        assert grading._has_gpu_for("10_ring") is expected and grading._has_gpu_for(COALESCED)
    monkeypatch.setattr(grading, "ON_GPU", False)
    assert not grading._has_gpu_for("10_ring")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(trial: Trial) -> None:
        if not trial.on_gpu:
            raise engine.NoCompilerError("no C++ compiler")
        for _ in trial.sizes("N", 1):
            trial.rows[COMPILES].passed = True
            trial.launch("nothing", 1, 1)
            trial.expect("O", np.zeros(1), np.zeros(1))

    monkeypatch.setattr(Trial, "_compiled", lambda *_: lambda grid, block, args: None)
    monkeypatch.setitem(GRADERS, COALESCED, Exercise(COALESCED, none, 1, {}))
    monkeypatch.setattr(grading, "ON_GPU", False)
    assert grade(COALESCED, "").text == f"[FAIL] {COALESCED}: no C++ compiler"
    monkeypatch.setattr(grading, "ON_GPU", True)
    result = grade(COALESCED, "")
    assert result and "clean under the X-ray    not tried: the CPU engine has no C++ compiler" in result.text


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
    monkeypatch.setattr(holes, "FOLDER", tmp_path)
    (tmp_path / "x.cu").write_text(text)
    with pytest.raises(ValueError, match=r"x\.cu"):
        skeleton("x")


def test_holes_become_todos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holes, "FOLDER", tmp_path)
    (tmp_path / "x.cu").write_text(
        "a;\n  // BEGIN hole: about 2 lines - add, then store\n"
        "  // DEFAULT: b = 0;\n  b = 1;\n  c = 2;\n  // END hole\nd;\n"
        "// BEGIN hole: about 1 line - nothing by default\ne;\n// END hole\n"
    )
    assert skeleton("x") == (
        "a;\n  // TODO, about 2 lines: add, then store\n  b = 0;\nd;\n// TODO, about 1 line: nothing by default\n"
    )
    assert exercise.ours("x") == "a;\n  b = 1;\n  c = 2;\nd;\ne;\n"
    with pytest.raises(FileNotFoundError, match="no exercise 'y'; there are: x"):
        solution("y")


def test_jupyterlab_gets_a_table_that_fits_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere each reason is one line: numbers of different lengths would move the breaks of committed outputs."""
    rows = {FIRST: Row(False, ["a reason " * 20, "    12 |  " + "code " * 30])}
    assert len(grading.table(rows).splitlines()) == 2
    monkeypatch.setattr(first_build, "in_jupyterlab", lambda: True)
    *reasons, code = grading.table(rows).splitlines()
    assert len(reasons) > 2 and max(map(len, reasons)) <= 100 < len(code)
    assert all(line.startswith(" " * 34) for line in reasons[1:]) and " ".join(code.split()).startswith("12 | code")
