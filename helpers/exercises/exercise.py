"""Exercises: a skeleton made from its solution, a cell that compiles and grades itself.

    from helpers.exercises import exercise        # in a notebook: adds the cell magic

    %%cuda 01_coalesced_scores
    ...CUDA C++...

`kernels/exercises/<name>.cu` is a complete, correct kernel with marked holes. The notebook holds `skeleton(name)`: the
same text with a TODO in each hole. Running the cell compiles it, launches it on fresh random inputs at awkward sizes,
compares with NumPy and says in a few lines what is right, what is not, and where to look. It never ends in a traceback.
A new exercise is one .cu file, and one grader here.

A hole in the solution:

    // BEGIN hole: about 1 line - the index of the score of (row, j)
    // DEFAULT: return (size_t)row * N_kv + j;
    return (size_t)j * N + row;
    // END hole

DEFAULT lines (none, one or more) are what the skeleton has in place of the solution, so that it compiles.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import cpu, kernel, reference
from helpers.check import TOLERANCE, CheckResult, check, make_inputs, tolerance_for
from helpers.device import ON_GPU, cp

FOLDER = kernel.KERNELS / "exercises"

# (N, N_kv, d): one row, one key, a warp and one more, a block and less one, more rows than keys, an odd head dimension.
# Two head dimensions, because each is a compilation.
SIZES = ((1, 1, 8), (33, 65, 8), (64, 1, 8), (63, 257, 3), (130, 31, 3))

_BEGIN = re.compile(r"(\s*)// BEGIN hole: (about \d+ lines?) - (.+)")
_DEFAULT = re.compile(r"\s*// DEFAULT: (.*)")


def solution(name: str) -> str:
    """The text of `kernels/exercises/<name>.cu`.

    Raises:
        FileNotFoundError: there is no such exercise; the message lists those there are.
    """
    path = FOLDER / f"{name}.cu"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in FOLDER.glob("*.cu")))
        raise FileNotFoundError(f"no exercise {name!r}; there are: {names}")
    return path.read_text(encoding="utf-8")


def skeleton(name: str) -> str:
    """The solution with each hole replaced by a TODO comment and the hole's DEFAULT lines.

    Raises:
        ValueError: a hole that is not closed, is closed twice, or does not say how long it is and what goes in.
    """
    lines: list[str] = []
    indent: str | None = None  # of the open hole
    for number, line in enumerate(solution(name).splitlines(), start=1):
        begin, default = _BEGIN.fullmatch(line), _DEFAULT.fullmatch(line)
        if indent is None and begin:
            indent = begin[1]
            lines.append(f"{indent}// TODO, {begin[2]}: {begin[3]}")
        elif indent is not None and line.strip() == "// END hole":
            indent = None
        elif re.search(r"// (BEGIN|END) hole", line) or (default and indent is None):
            raise ValueError(
                f"{name}.cu, line {number}: {line.strip()!r} is out of place. A hole is "
                "'// BEGIN hole: about 2 lines - what to write', DEFAULT lines, the solution, '// END hole'"
            )
        elif indent is None:
            lines.append(line)
        elif default:
            lines.append(indent + default[1])
    if indent is not None:
        raise ValueError(f"{name}.cu: the last hole has no '// END hole'")
    return "\n".join(lines) + "\n"


def cell(name: str) -> str:
    """The notebook cell of an exercise: the magic and the skeleton."""
    return f"%%cuda {name}\n{skeleton(name)}".rstrip("\n")


# ------------------------------------------------------------------------------------------------------ grading


@dataclass(frozen=True)
class Grade:
    """What grading found. True in an `if` when all is right. text: the lines to print."""

    passed: bool
    text: str

    def __bool__(self) -> bool:
        return self.passed


class Trial:
    """One grading on one device: compiles the learner's text and collects what was compared."""

    def __init__(self, name: str, code: str, device: Any, on_gpu: bool) -> None:
        self.name, self.code, self.xp, self.on_gpu = name, code, device, on_gpu
        self.found: dict[str, list[tuple[CheckResult, str, str]]] = {}  # output -> (result, where, hint)
        self.rng = np.random.default_rng()

    def inputs(self, n: int, n_kv: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fresh q (n, d), k and v (n_kv, d): float32, of non-zero mean."""
        return make_inputs(n, n_kv, d, seed=int(self.rng.integers(2**31)))

    def kernel(self, name: str, **defines: int) -> Callable[..., None]:
        """The learner's kernel `name`, compiled with -DNAME=value, launched as kernel(grid, block, args)."""
        headers = kernel.headers(self.code) if self.on_gpu else ()
        module = self.xp.RawModule(code=self.code, options=(*kernel.options(defines), *headers))
        # The CPU engine checks arguments by itself; on a GPU the typed launch does.
        return kernel.typed(module, name, self.code) if self.on_gpu else module.get_function(name)

    def empty(self, *shape: int) -> Any:
        """A float32 output, poisoned with NaN: what nobody writes shows."""
        return self.xp.full(shape, math.nan, dtype=np.float32)

    def expect(
        self, output: str, where: str, got: Any, expected: np.ndarray, *, hint: str = "", tolerance: float = TOLERANCE
    ) -> None:
        """Compare one output of one launch with NumPy's. `hint` is what a learner reads if it is wrong."""
        with contextlib.redirect_stdout(io.StringIO()):
            result = check(output, self.xp.asnumpy(got), expected, tolerance=tolerance, must_pass=False)
        self.found.setdefault(output, []).append((result, where, hint))

    def grade(self) -> Grade:
        """The findings, a line for each output and a hint under the first wrong one."""
        lines, hinted = [], False
        for output, found in self.found.items():
            wrong = [entry for entry in found if not entry[0].passed]
            if not wrong:
                worst = max(entry[0].max_error for entry in found)
                limit = max(entry[0].tolerance for entry in found)
                lines.append(
                    f"[PASS] {output}: matches NumPy at {len(found)} of {len(found)} sizes "
                    f"(max error: {worst:.1e} <= {limit:.1e})"
                )
                continue
            result, where, hint = wrong[0]
            what = result.message.partition(": ")[2]
            lines.append(f"[FAIL] {output}: wrong at {len(wrong)} of {len(found)} sizes, first at {where}: {what}")
            if not hinted:
                if result.nan and not hint:
                    hint = "outputs start as NaN: an element that is NaN was perhaps never written"
                lines += [f"       Hint: {hint}"] if hint else []
                hinted = True
        return Grade(not any(line.startswith("[FAIL]") for line in lines), "\n".join(lines))


Grader = Callable[[Trial], None]
GRADERS: dict[str, Grader] = {}


def grader(name: str) -> Callable[[Grader], Grader]:
    """Decorator: this function grades the exercise `name`."""

    def register(function: Grader) -> Grader:
        GRADERS[name] = function
        return function

    return register


def grade(name: str, code: str) -> Grade:
    """Compile a learner's text, run it, compare it with NumPy.

    On a GPU the CPU engine goes first, where there is a C++ compiler: there a wild pointer is a message, on a GPU it
    would spoil every later cell.

    Raises:
        KeyError: no exercise of that name.
    """
    if name not in GRADERS:
        raise KeyError(f"no exercise {name!r}; there are: {', '.join(sorted(GRADERS))}")
    text = f'#line 2 "cell"\n{code}'  # line 1 of the cell is the magic's
    result = Grade(False, f"[FAIL] {name}: nothing ran")
    for device, on_gpu in ((cpu, False), (cp, True)) if ON_GPU else ((cpu, False),):
        trial = Trial(name, text, device, on_gpu)
        try:
            GRADERS[name](trial)
            result = trial.grade()
        except cpu.NoCompilerError as error:
            if ON_GPU:
                continue
            result = Grade(False, f"[FAIL] {name}: {error}")
        except Exception as error:  # whatever a learner's kernel makes of it: a line, never a traceback
            result = Grade(False, _explain(name, error))
        if not result.passed:
            break
    return result


def _explain(name: str, error: Exception) -> str:
    """What went wrong before anything could be compared."""
    get_message = getattr(error, "get_message", None)  # CuPy's compile error
    text = str(get_message() if get_message else error).strip()
    if get_message or isinstance(error, cpu.CompileError):
        return f"[FAIL] {name} does not compile:\n{text}"
    if isinstance(error, cpu.LaunchError):
        return f"[FAIL] {name} stopped while it ran: {text}"
    if isinstance(error, (TypeError, ValueError)):
        return f"[FAIL] {name}: {text}\n       Hint: keep the kernel's name and its parameters as they were"
    return f"[FAIL] {name}: {type(error).__name__}: {text}"


def cuda(line: str, cell: str) -> None:
    """The cell magic %%cuda NAME: grade the cell's text and print what came out."""
    name = line.strip()
    if name not in GRADERS:
        print(f"[FAIL] %%cuda {name}: no such exercise; there are: {', '.join(sorted(GRADERS))}")
        return
    print(grade(name, cell).text)


def _register() -> None:
    # IPython is not imported for this: where a notebook runs, it is there already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.register_magic_function(cuda, magic_kind="cell", magic_name="cuda")


_register()


# ------------------------------------------------------------------------------------------------------ graders


def attention_parts(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Mapping[str, np.ndarray]:
    """What kernels hold on the way, float64: S (scaled scores), m (row maxima), P = exp(S - m), l (row sums), O."""
    s = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(q.shape[1])
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    return {"S": s, "m": m, "P": p, "l": p.sum(axis=1), "O": reference.attention(q, k, v)}


def where(n: int, n_kv: int, d: int) -> str:
    """The size, as a failure names it."""
    return f"N = {n}, N_kv = {n_kv}, d = {d}"


@grader("00_safe_softmax")
def _safe_softmax(trial: Trial) -> None:
    block = 64
    run = trial.kernel("safe_softmax", BLOCK_M=block)
    for n, n_kv, d in SIZES:
        q, k, _ = trial.inputs(n, n_kv, d)
        ordinary = q @ k.T / np.float32(math.sqrt(d))
        # Every other row lies far below 0, where a maximum that starts at 0 is wrong as well.
        large = 10 * ordinary + np.where(np.arange(n) % 2, 1000, -1000).astype(np.float32)[:, None]
        large[::3, -1] += 200  # nor may the maximum miss the last key
        hint = "exp of 1000 is inf and exp of -1000 is 0: subtract the largest score of the row, whatever its sign"
        for name, s in (("P of ordinary scores", ordinary), ("P of scores near -1000 or 1000", large)):
            p = trial.empty(n, n_kv)
            run((-(-n // block),), (block,), (trial.xp.asarray(s), p, np.int32(n), np.int32(n_kv)))
            trial.expect(name, f"N = {n}, N_kv = {n_kv}", p, reference.softmax(s), hint=hint)


@grader("01_coalesced_scores")
def _coalesced_scores(trial: Trial) -> None:
    block = 64
    for n, n_kv, d in SIZES:
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("naive_coalesced", HEAD_DIM=d, BLOCK_M=block)
        s, o = trial.empty(n_kv, n), trial.empty(n, d)
        args = (*map(trial.xp.asarray, (q, k, v)), s, o, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        run((-(-n // block),), (block,), args)
        parts = attention_parts(q, k, v)
        hint = "every use of the scratch goes through at(row, j, ...)"
        trial.expect("O", where(n, n_kv, d), o, parts["O"], hint=hint)
        hint = "S[j][row] is element j * N + row: for one j, the 32 rows of a warp then lie side by side"
        trial.expect("S, stored as (N_kv, N)", where(n, n_kv, d), s, parts["P"].T, hint=hint)


@grader("03_merge_halves")
def _merge_halves(trial: Trial) -> None:
    block = 64
    # (N, N_kv, d), where the second part begins, and a factor on q: a part without keys; scores whose exp overflows.
    cases = [(size, size[1] // 2, 1.0) for size in SIZES] + [((33, 65, 8), 65, 1.0), ((33, 65, 8), 32, 100.0)]
    for (n, n_kv, d), split, factor in cases:
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        half = trial.kernel("online_softmax_part", HEAD_DIM=d, BLOCK_M=block)
        merge = trial.kernel("merge", HEAD_DIM=d, BLOCK_M=block)
        inputs, scale = tuple(map(trial.xp.asarray, (q, k, v))), np.float32(1 / math.sqrt(d))
        parts = []
        for first, last in ((0, split), (split, n_kv)):
            part = trial.empty(n, d), trial.empty(n), trial.empty(n)
            args = (*inputs, *part, np.int32(n), np.int32(first), np.int32(last), scale)
            half((-(-n // block),), (block,), args)
            parts += part
        o, lse = trial.empty(n, d), trial.empty(n)
        merge((-(-n * d // block),), (block,), (*parts, o, lse, np.int32(n)))
        expected, expected_lse = reference.attention(q, k, v, return_lse=True)
        at = f"{where(n, n_kv, d)}, second part from key {split}" + ", large scores" * (factor > 1)
        hint = "a part's sums are relative to that part's m; bring both to one m, as the loop does: exp(m_i - m_new)"
        tolerance = tolerance_for(q, k)
        trial.expect("O", at, o, expected, hint=hint, tolerance=tolerance)
        hint = "m is the larger of the two maxima, l the sum of both rescaled sums"
        lse_tolerance = max(TOLERANCE, float(np.abs(expected_lse).max()) * 2.0**-20)
        trial.expect("lse = m + log(l)", at, lse, expected_lse, hint=hint, tolerance=lse_tolerance)


@grader("02_one_barrier")
def _one_barrier(trial: Trial) -> None:
    block, block_n = 64, 16
    single_tile = ((1, 1, 8), (40, block_n, 8))  # first, so that the recurrence is judged before the barriers
    sizes = (*single_tile, *(size for size in SIZES if size[1] > block_n))
    for n, n_kv, d, factor in (*((*size, 1) for size in sizes), (130, 257, 8, 300)):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        run = trial.kernel("row_lse", HEAD_DIM=d, BLOCK_M=block, BLOCK_N=block_n)
        lse = trial.empty(n)
        args = (*map(trial.xp.asarray, (q, k)), lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        run((-(-n // block),), (block,), args)
        parts = attention_parts(q, k, v)
        expected = parts["m"] + np.log(parts["l"])
        if factor > 1:
            hint = "expf of a large score is infinite: take exponentials of score - maximum"
            # float32 keeps 7 digits, and these values lie near a thousand.
            trial.expect("LSE of large scores", where(n, n_kv, d), lse, expected, hint=hint, tolerance=1e-2)
            continue
        hint = "wrong for a single tile already: when the maximum grows, l_i shrinks by exp(m_i - m_new)"
        if n_kv > block_n:
            hint = "right for one tile, wrong for several: where does a fast thread load to, and who still reads there?"
        trial.expect("LSE", where(n, n_kv, d), lse, expected, hint=hint)
    barriers = re.sub(r"//[^\n]*|/\*.*?\*/", "", trial.code, flags=re.DOTALL).count("__syncthreads")
    if barriers > 1:  # one is wanted, and said nothing of
        hint = "with two tiles that take turns, one barrier is enough"
        count, wanted = np.array([barriers]), np.array([1])
        trial.expect("barriers in the kernel", "the text of the cell", count, wanted, hint=hint)


@grader("04_register_tile")
def _register_tile(trial: Trial) -> None:
    for n, n_kv, d in SIZES:
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("tile_lse", HEAD_DIM=d)
        m, lse = trial.empty(n), trial.empty(n)
        args = (*map(trial.xp.asarray, (q, k)), m, lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        run((-(-n // 64),), (128,), args)
        parts = attention_parts(q, k, v)
        hint = "a thread sees 4 of a tile's 32 keys: are all 16 products in s, and are all 8 threads of the row asked?"
        trial.expect("M, the row maxima", where(n, n_kv, d), m, parts["m"], hint=hint)
        hint = "l_i is the sum over one thread's keys; the row's sum is that of its 8 threads"
        trial.expect("LSE", where(n, n_kv, d), lse, parts["m"] + np.log(parts["l"]), hint=hint)


@grader("05_sliding_window")
def _sliding_window(trial: Trial) -> None:
    block = 64
    # (N, N_kv, d) and the window: more keys than rows, more rows than keys, a window of one key, one of all keys.
    cases = (((33, 65, 8), 5), ((130, 31, 3), 7), ((64, 1, 8), 0), ((63, 257, 3), 300), ((1, 1, 8), 0))
    for (n, n_kv, d), left in cases:
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("sliding_window", HEAD_DIM=d, BLOCK_M=block)
        o, lse = trial.empty(n, d), trial.empty(n)
        visited = trial.xp.full(n, -1, dtype=np.int32)
        sizes = np.int32(n), np.int32(n_kv), np.int32(left), np.float32(1 / math.sqrt(d))
        run((-(-n // block),), (block,), (*map(trial.xp.asarray, (q, k, v)), o, lse, visited, *sizes))
        expected, expected_lse = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        seen = reference.visible(n, n_kv, window=(left, 0)).sum(axis=1)
        at = f"{where(n, n_kv, d)}, window_left = {left}"
        hint = "row i is at key i + N_kv - N; the first key it may see is not before 0, the last not after N_kv - 1"
        trial.expect("keys visited by each row", at, visited, seen, hint=hint)
        hint = "if rows that see nothing are NaN: 1 / 0 is infinite, and 0 times infinity is NaN"
        trial.expect("O", at, o, expected, hint=hint)
        trial.expect("lse", at, lse, expected_lse, hint=hint)


@grader("06_row_of_scores")
def _row_of_scores(trial: Trial) -> None:
    from helpers.xray import xray  # which draws pictures: no other exercise waits for that

    for n, n_kv, d in ((33, 65, 16), (1, 1, 16), (16, 16, 64), (16, 257, 64), (50, 31, 16)):
        q, k, _ = (a.astype(np.float16) for a in trial.inputs(n, n_kv, d))
        run = trial.kernel("row_lse", HEAD_DIM=d)
        lse, grid = trial.empty(n), (-(-n // 16),)
        args = (*map(trial.xp.asarray, (q, k)), lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        run(grid, (32,), args)
        if not trial.on_gpu and n == 33:  # first: a race may be why lse is wrong
            races = [finding for finding in xray(run, grid, (32,), args).findings if finding.kind == "race"]
            hint = "a lane reads a row of S that other lanes have not stored yet: how do lanes wait for each other?"
            trial.expect("races", where(n, n_kv, d), np.array([len(races)]), np.array([0]), hint=hint)
            lse[...] = math.nan
            run(grid, (32,), args)
        _, expected = reference.attention(q, k, k, return_lse=True)
        hint = "K^T: row j of K is column j of the right operand. And which keys of the last tile are none?"
        trial.expect("lse", where(n, n_kv, d), lse, expected, hint=hint, tolerance=1e-4)


@grader("07_two_products")
def _two_products(trial: Trial) -> None:
    from helpers.xray import xray  # which draws pictures: no other exercise waits for that

    trial.code = _with_ptx(trial.code)
    for n, n_kv in ((16, 16), (1, 1), (33, 17), (64, 50)):
        q, k, v = (a.astype(np.float16) for a in trial.inputs(n, n_kv, 64))
        run = trial.kernel("two_products")
        o = trial.empty(n, 64)
        grid, args = (-(-n // 16),), (*map(trial.xp.asarray, (q, k, v)), o, np.int32(n), np.int32(n_kv))
        run(grid, (32,), args)
        s, values = q.astype(np.float64) @ k.astype(np.float64).T, v.astype(np.float64)
        rounding = np.abs(s.astype(np.float16).astype(np.float64) @ values - s @ values).max()
        at = f"N = {n}, N_kv = {n_kv}"
        hint = "rows g and g + 8, columns 2t and 2t + 1 of S[0] are keys 2t and 2t + 1, of S[1] keys 2t + 8 and 2t + 9"
        trial.expect("O", at, o, s @ values, hint=hint, tolerance=max(2 * float(rounding), 1e-3))
        if not trial.on_gpu and n == 16:  # one block of whole tiles is enough to see how shared memory is asked
            conflicts = sum(figures.conflicts for figures in xray(run, grid, (32,), args).shared.values())
            hint = "ldmatrix reads the same chunk of 8 rows at once: which banks may they not share?"
            trial.expect("bank conflicts", at, np.array([conflicts]), np.array([0]), hint=hint)


def _with_ptx(code: str) -> str:
    """A cell's text with ptx.cuh in it; line numbers go on as in the cell."""
    include = '#include "ptx.cuh"\n'
    before, _, after = code.partition(include)
    line = before.count("\n") + 2  # the text begins with a #line of its own
    return f'{before}{kernel.source("ptx.cuh")}#line {line} "cell"\n{after}' if include in code else code
