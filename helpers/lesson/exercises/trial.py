"""One trial of a learner's text on one device, as a grader sees it, and the register of exercises.

    from helpers.lesson.exercises.trial import Trial, exercise

    @exercise("02_load_tile", minutes=6)
    def load_tile(trial: Trial) -> None:
        for n, n_kv, d in trial.sizes("N, N_kv, d", (40, 16, 8), (33, 65, 8)):       # the first size, then awkward ones
            q, k, v = trial.inputs(n, n_kv, d)
            o = trial.empty(n, d)
            trial.launch("tiled", blocks(n, 64), 64, q, k, v, o, n, n_kv, d**-0.5, HEAD_DIM=d)
            trial.expect("O", o, expected)
        if trial.report:
            trial.limit("bank conflicts", trial.figures("K_smem").conflicts, at_most=0)

`sizes` ends after a wrong first size. A launch at the first size is X-rayed on the CPU before it is made, one at the
first awkward size after it; outputs are filled with bits that identify unwritten elements. Each kind of error has a
name, its symptom: hints.py lists them. The hints for each are in a file next to the grader: those of graders/n02.py in
graders/n02.txt.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from helpers import engine
from helpers.attention import kernel
from helpers.attention.check import TOLERANCE, compare, make_inputs
from helpers.engine import nvrtc
from helpers.engine.cuda_source import source
from helpers.lesson.exercises import hints, holes
from helpers.lesson.exercises.hints import Hints
from helpers.lesson.exercises.holes import number_of
from helpers.xray import Figures, Report, xray

Size = TypeVar("Size")

COMPILES = "compiles"
FIRST = "right at the first size"
AWKWARD = "right at awkward sizes"
XRAY = "clean under the X-ray"
LIMIT = "meets its limit"
ROWS = (COMPILES, FIRST, AWKWARD, XRAY, LIMIT)

Grader = Callable[["Trial"], None]

_MOST_PRINTED = 40  # printed lines of a kernel that are shown


@dataclass(frozen=True)
class Exercise:
    """One exercise. grade: its grader. minutes: how long it takes a learner. hints: by symptom, in their order.

    notebook: the number of its notebook, such as "04b"; if empty, the number in the exercise's name.
    only_cc: the one compute capability whose GPUs have its instructions, 90 for 9.0; 0 for no such limit.
    """

    name: str
    grade: Grader
    minutes: int
    hints: Hints
    only_cc: int = 0
    notebook: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "notebook", self.notebook or number_of(self.name))

    def calls(self, method: str) -> bool:
        """Check whether the grader calls this method of its trial."""
        return method in self.grade.__code__.co_names


EXERCISES: dict[str, Exercise] = {}


_read = functools.cache(hints.read)


def exercise(name: str, *, minutes: int, only_cc: int = 0, notebook: str = "") -> Callable[[Grader], Grader]:
    """Register a function as the grader of the exercise `name` (a decorator); its hints are in the module's .txt file.

    Args:
        minutes: how long it takes a learner.
        only_cc, notebook: see `Exercise`. On GPUs other than only_cc's, the CPU engine alone grades.
    """

    def register(function: Grader) -> Grader:
        own = _read(Path(function.__code__.co_filename).with_suffix(".txt"))[name]
        EXERCISES[name] = Exercise(name, function, minutes, own, only_cc, notebook)
        return function

    return register


@dataclass
class Row:
    """One row of the table. passed: None if not tried. lines: the reason, or what passed. symptoms: nearest first."""

    passed: bool | None = None
    lines: list[str] = field(default_factory=list)
    symptoms: tuple[str, ...] = ()

    def fail(self, lines: Sequence[str], *symptoms: str) -> None:
        """Mark the row as failed. Only the first failure is reported."""
        if self.passed is not False:
            self.passed, self.lines, self.symptoms = False, list(lines), symptoms


class Stopped(Exception):
    """The trial has ended; a row that failed says why."""


class Trial:
    """One grading on one device: compiles the learner's text, launches it, and fills the rows of the table.

    code: the learner's text. plain: the same without comments. xp: CuPy or the CPU engine. reports: the X-rays of the
    launches at the first size, none on a GPU; report: the last of these, or None. awkward_report: the X-ray of the last
    launch at the first awkward size, or None. rng: for inputs that no method here makes. seed: that of all inputs; None
    for new ones in every trial. size: the one being tried, in words; first_size: the first one, in words. timeout:
    seconds that a block may take on the CPU.
    """

    def __init__(
        self, name: str, code: str, device: Any, on_gpu: bool, timeout: float = 10.0, seed: int | None = None
    ) -> None:
        self.name, self.code, self.xp, self.on_gpu = name, code, device, on_gpu
        self.plain = source.blank_comments(code)
        self.rng = np.random.default_rng(seed)
        self.reports: list[Report] = []
        self.awkward_report: Report | None = None
        self.rows = {title: Row() for title in ROWS}
        self.has_awkward_sizes: bool | None = None  # unknown before `sizes`
        self._timeout = timeout
        self._title = FIRST  # the row of the current size
        self._number = 0  # index of that size
        self._awkward = "tail"  # the symptom if only the awkward size is wrong
        self._zero_row = -1  # the row of `inputs`' last q whose scores are all 0
        self.size = self.first_size = ""
        self._kernels: dict[Any, Callable[..., None]] = {}
        self._modules: list[engine.RawModule] = []  # of these kernels, on the CPU
        self._printed: dict[str, str] = {}  # by size: what the kernel printed
        self._wrong_at = ""  # the first wrong size
        self._errors: dict[str, list[float]] = {FIRST: [], AWKWARD: []}

    @property
    def report(self) -> Report | None:
        """The X-ray of the last launch at the first size."""
        return self.reports[-1] if self.reports else None

    def printed(self) -> str:
        """Return what the kernel printed at the first wrong size, else at the first size; "" if nothing."""
        sizes = [size for size, text in self._printed.items() if text]
        if not sizes:
            return ""
        size = self._wrong_at if self._wrong_at in sizes else sizes[0]
        others = f" (it prints at {len(sizes) - 1} more)" if len(sizes) > 1 else ""
        lines = self._printed[size].splitlines()
        more = [f"... and {len(lines) - _MOST_PRINTED:,} more lines"] if len(lines) > _MOST_PRINTED else []
        return "\n".join([f"printf at {size}{others}:", *lines[:_MOST_PRINTED], *more])

    # ------------------------------------------------------------------------------------- the graders' interface

    def sizes(self, names: str, first: Size, *others: Size) -> Iterator[Size]:
        """Yield the first size, then the awkward ones; stop after a size at which a result is wrong.

        Args:
            names: the names of a size's numbers in messages, "N, N_kv". If an awkward size differs from the first only
                in "d" (HEAD_DIM), a failure there is attributed to the width; if only in the block's size, to that.
        """
        self.has_awkward_sizes = bool(others)
        labels = names.split(", ")
        for number, size in enumerate((first, *others)):
            self._title, self._number = AWKWARD if number else FIRST, number
            values, firsts = (one if isinstance(one, tuple) else (one,) for one in (size, first))
            changed = [name for name, value, before in zip(labels, values, firsts, strict=True) if value != before]
            of_block = len(changed) == 1 and changed[0] in ("BLOCK", "BLOCK_M", "BLOCK_N", "GROUPS")
            self._awkward = "width" if changed == ["d"] else "block" if of_block else "tail"
            self.size = ", ".join(f"{name} = {value}" for name, value in zip(labels, values, strict=True))
            self.first_size = self.first_size or self.size
            yield size
            if self.rows[self._title].passed is False:
                return

    def inputs(self, n: int, n_kv: int, d: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make fresh NumPy arrays q (n, d), k and v (n_kv, d) of non-zero mean.

        With three rows or more, one row of q is all zeros: its scores are 0, and must count like any others.
        """
        q, k, v = make_inputs(n, n_kv, d, seed=int(self.rng.integers(2**31)))
        self._zero_row = 2 * n // 3 if n > 2 else -1
        if n > 2:
            q[self._zero_row] = 0
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def empty(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Make an output filled with a pattern that shows unwritten elements. The X-ray counts it as unwritten."""
        if self.on_gpu:
            filled = np.empty(shape, dtype)
            hints.poison(filled)
            return self.xp.asarray(filled)
        array = self.xp.empty(shape, dtype)
        hints.poison(np.asarray(array).view(np.ndarray))  # plain NumPy: the engine's own = would count as a write
        return array

    def far(self, *counts: int) -> list[Any] | None:
        """Make a float32 array of zeros for each count: for indices beyond 32 bits.

        Only the touched pages take memory. Space is reserved before each array, for an index that wraps below 0.
        Returns None on a GPU, where all of an array would take memory, if the system does not provide such arrays, or
        if a row has failed already. A launch with them takes no other arrays, counts as one at an awkward size, and is
        not X-rayed, because an X-ray would read whole arrays and fill the memory.
        """
        before = 2**31
        self._title, self._number = AWKWARD, -1
        failed = any(row.passed is False for row in self.rows.values())
        if failed or self.on_gpu or not sys.platform.startswith(("linux", "darwin")):
            return None
        without_reserve = 0x4000 if sys.platform == "linux" else 0x40  # MAP_NORESERVE, which Python has since 3.13
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_reserve
        try:
            memory = [mmap.mmap(-1, 4 * (before + count), flags=flags) for count in counts]
        except OSError:
            return None
        return [np.frombuffer(one, np.float32)[before:].view(engine.ndarray) for one in memory]

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *args: Any,
        extra: str = "",
        before: str = "",
        **defines: int,
    ) -> Any:
        """Launch the learner's kernel, compiled with -DNAME=value. Returns the kernel.

        On the CPU, the X-ray of a checked launch is taken: at the first size before the launch, as `report`; at the
        second after it, as `awkward_report`.

        Args:
            args: arrays of the device; NumPy arrays, which are copied there; ints and floats, passed with 32 bits.
            extra: CUDA C++ that is appended to the learner's text, such as a kernel that calls one of its functions.
            before: CUDA C++ that is put before it.
        """
        run = self._compiled(kernel, extra, before, defines)
        grid, block = ((size,) if isinstance(size, int) else tuple(size) for size in (grid, block))
        args = tuple(map(self._argument, args))
        seen, printed = io.StringIO(), io.StringIO()  # what the kernel prints with the X-ray and without
        try:
            if self._title == FIRST and not self.on_gpu:
                with contextlib.redirect_stdout(seen):
                    self.reports.append(self._xray(run, grid, block, args))
            if self.on_gpu:
                run(grid, block, args)
                self.xp.cuda.Device().synchronize()  # raises errors of the launch
            else:
                with contextlib.redirect_stdout(printed):
                    run(grid, block, args, timeout=self._timeout)
                if self._number == 1:
                    with contextlib.redirect_stdout(seen):
                        self.awkward_report = self._xray(run, grid, block, args)
        except Stopped:
            raise
        except (TypeError, ValueError) as error:
            self._stop(COMPILES, str(error).strip().splitlines(), "signature", "compile")
        except Exception as error:
            failure = hints.of_error(error, self._timeout, self.code)
            reasons = failure.symptoms
            if self._title == AWKWARD and "bounds" in reasons:  # all threads were correct at whole sizes
                where = ("bounds", "crash", "tail") if self._awkward == "tail" else (self._awkward, "bounds", "crash")
                reasons = (*(reason for reason in reasons if reason not in where), *where)
            self._stop(self._title, failure.lines, *reasons)
        finally:
            text = printed.getvalue() or seen.getvalue()
            self._printed[self.size] = self._printed.get(self.size, "") + text
        return run

    def shared(self) -> Figures:
        """Sum up what all of shared memory cost in `report`."""
        total = Figures()
        for figures in self.report.shared.values() if self.report else ():
            for one in fields(Figures):
                setattr(total, one.name, getattr(total, one.name) + getattr(figures, one.name))
        return total

    def figures(self, array: str, *, awkward: bool = False) -> Figures:
        """Return what an array of global or shared memory cost in `report`, or in `awkward_report`.

        Zeros if the kernel has no array of that name.
        """
        report = self.awkward_report if awkward else self.report
        if report is None:
            return Figures()
        return report.shared.get(array) or report.traffic.get(array) or Figures()

    def expect(
        self,
        output: str,
        got: Any,
        expected: Any,
        *,
        at: str | None = None,
        tolerance: float = TOLERANCE,
        symptom: str = "",
        large: bool = False,
    ) -> None:
        """Compare one output of one launch with its expected value.

        Args:
            output: its name in the table. at: the size, if it is not that of `sizes`.
            symptom: of a wrong output; it comes before those that are detected, unless an element was not written. It
                is ignored if only the row whose scores are 0 is wrong.
            large: the inputs have large scores.
        """
        row, expected, got = self.rows[self._title], np.asarray(expected), self.xp.asnumpy(got)
        at = (self.size if at is None else at) + ", large scores" * large
        with np.errstate(invalid="ignore"):  # the poison is a signalling NaN
            result = compare(output, got, expected, tolerance=tolerance)
        if not result.passed:
            self._wrong_at = self._wrong_at or self.size
            lines, detected = hints.of_result(output, at, result, got, expected)
            if large:
                detected = ("large", *detected)
            elif (
                tolerance and result.rows_wrong == 1 and result.worst_row == self._zero_row and "empty" not in detected
            ):
                detected, symptom = ("zero score", *detected), ""
            elif self._title == AWKWARD:
                *before, last = detected
                detected = (*before, self._awkward, "wrong") if last == "wrong" else (*detected, self._awkward)
            own = (symptom,) if symptom else ()
            row.fail(lines, *((*detected, *own) if "empty" in detected else (*own, *detected)))
        elif row.passed is not False:
            errors = self._errors[self._title]
            errors.append(result.max_error)
            row.passed = True
            row.lines = [f"{at}, " * (self._title == FIRST) + f"max error {max(errors):.1e}"]

    def slip(self, got: Any, slips: Mapping[str, np.ndarray], tolerance: float = 1e-4) -> str:
        """Return the symptom of the first slip whose result `got` equals within the tolerance; "" without one.

        slips: by symptom, what a kernel with that mistake computes.
        """
        got = self.xp.asnumpy(got)
        return next((name for name, a in slips.items() if np.allclose(got, a, rtol=0, atol=tolerance)), "")

    def limit(
        self,
        what: str,
        got: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        exactly: float | None = None,
        symptom: str = "",
    ) -> None:
        """Compare a count with a limit that the kernel has to meet; the result goes into the row "meets its limit"."""
        bounds = (
            ("at most", at_most, operator.le),
            ("at least", at_least, operator.ge),
            ("exactly", exactly, operator.eq),
        )
        bounds = [(words, value, meets) for words, value, meets in bounds if value is not None]
        wanted = " and ".join(f"{words} {value:,}" for words, value, _ in bounds)
        row = self.rows[LIMIT]
        if not all(meets(got, value) for _, value, meets in bounds):
            row.fail([f"{what}: {got:,} (the limit: {wanted})"], *([symptom] if symptom else []), "limit")
        elif row.passed is not False:
            row.passed = True
            row.lines.append(f"{what}: {got:,} ({wanted})")

    def blame(self, symptom: str, *, everywhere: bool = False) -> None:
        """Set the cause of the X-ray's findings, if the grader knows it: its hint comes before all others.

        everywhere: it is the cause of every failure, not only of the findings.
        """
        for row in self.rows.values() if everywhere else [self.rows[XRAY]]:
            if symptom and row.passed is False:
                row.symptoms = (symptom, *row.symptoms)

    # --------------------------------------------------------------------------------------------- implementation

    def _compiled(self, name: str, extra: str, before: str, defines: dict[str, int]) -> Callable[..., None]:
        """Compile the learner's kernel, once for each set of sizes."""
        key = name, extra, before, tuple(sorted(defines.items()))
        if key not in self._kernels:
            try:
                self._kernels[key] = self._compile(name, extra, before, defines)
            except (Stopped, engine.NoCompilerError, nvrtc.CuteMissing):
                raise
            except Exception as error:  # CuPy's and the engine's errors have no common base class
                get_message = getattr(error, "get_message", None)  # CuPy's compile error
                message = str(get_message() if get_message else error)
                message = re.sub(r"; did you mean \W*std::.*", "", message)  # advice for the host: GPUs have no std::
                self._stop(COMPILES, message.strip().splitlines(), *hints.of_refusal(message))
            self.rows[COMPILES].passed = True
        return self._kernels[key]

    def _compile(self, name: str, extra: str, before: str, defines: dict[str, int]) -> Callable[..., None]:
        text = (
            f"{before}\n" * bool(before)
            + holes.complete(self.code)
            + (f'\n#line 1 "the grader"\n{extra}' if extra else "")
        )
        headers = (*kernel.headers(text), *kernel.architecture(text)) if self.on_gpu else nvrtc.cute_options(text)
        module = self.xp.RawModule(code=text, options=(*kernel.options(defines), *headers))
        # The CPU engine checks arguments itself; on a GPU the typed launch does.
        if self.on_gpu:
            return kernel.typed(module, name, text)
        self._modules.append(module)
        warned = io.StringIO()
        # The host compiler compiles the text again for its warnings; kernels, which return nothing, cannot cause this
        # one.
        a_function = r"->|\b(?!else\b|void\b)\w+[\s&*]+\w+\s*\([^;{}()]*\)\s*\{"  # __device__ is optional
        has_functions = re.search(a_function, self.plain) is not None
        module.compile(warned if has_functions and not self._kernels else None)
        if not self._kernels:
            self._ask_nvrtc(module.options)
        place = re.search(r"^(.*?): warning.*(?:no return statement|reaches end of non-void)", warned.getvalue(), re.M)
        if place:
            self._stop(COMPILES, [f"{place[1]}: a function that returns a value ends without a return"], "return")
        return module.get_function(name)

    def warn(self) -> None:
        """Add to the first row what the compiler warns of, or what looks like a slip, for a text with wrong results."""
        warned = io.StringIO()
        for kernel_module in self._modules[:1]:
            with contextlib.suppress(engine.CompileError):
                self.xp.RawModule(code=kernel_module.code, options=kernel_module.options).compile(warned)
        if failure := hints.of_warnings(warned.getvalue(), self.code, self.plain):
            self.rows[COMPILES].lines, self.rows[COMPILES].symptoms = failure

    def _ask_nvrtc(self, options: tuple[str, ...]) -> None:
        """Stop if NVRTC is installed and rejects the text that the CPU engine accepts."""
        if os.environ.get("COURSE_NVRTC") == "0":
            return
        refused = nvrtc.refusal(holes.complete(self.code), options)
        if refused:
            lines = ["NVRTC, a GPU's compiler, refuses what the CPU engine takes:", *refused.splitlines()]
            self._stop(COMPILES, lines, *hints.of_refusal(refused), "no header")

    def _argument(self, value: Any) -> Any:
        """Convert an argument for a launch. Tensor maps, which are records, and 32-bit numbers stay as they are."""
        if type(value) is np.ndarray and value.dtype.kind != "V":
            return self.xp.asarray(value)
        return np.int32(value) if type(value) is int else np.float32(value) if type(value) is float else value

    def _xray(self, run: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> Report:
        """X-ray a launch, and restore the old contents of its arrays."""
        before = [(a, np.array(a, subok=False)) for a in args if isinstance(a, engine.ndarray)]
        report = xray(run, grid, block, args, timeout=self._timeout)
        for array, values in before:
            np.asarray(array).view(np.ndarray)[...] = values
        row = self.rows[XRAY]
        # `expect` reports outputs that are never written.
        findings = [finding for finding in report.findings if finding.kind != "never written"]
        endless = next((finding for finding in findings if finding.kind == "endless loop"), None)
        if endless is not None:
            failure = hints.of_endless_loop(endless.file, endless.line, self._timeout, self.code)
            self._stop(self._title, failure.lines, *failure.symptoms)
        if findings:
            failure = hints.of_findings(findings, self.code)
            row.fail(failure.lines, *failure.symptoms)
        elif row.passed is None:
            row.passed = True
        return report

    def _stop(self, title: str, lines: Sequence[str], *symptoms: str) -> NoReturn:
        row = self.rows[title]
        self._wrong_at = self._wrong_at or self.size
        if row.passed is True:
            row.passed = None
        row.fail([line.rstrip() for line in lines], *symptoms)
        raise Stopped
