"""What a grader works with: one trial of a learner's text on one device.

    from helpers.lesson.exercises.trial import Trial, exercise

    @exercise("02_load_tile", minutes=6, hints={"tail": ("first hint", "second hint"), "": "for all other symptoms"})
    def load_tile(trial: Trial) -> None:
        for n, n_kv, d in trial.sizes((40, 16, 8), (33, 65, 8)):       # the first size, then awkward ones
            run = trial.kernel("tiled", HEAD_DIM=d)
            q, k, v = trial.inputs(n, n_kv, d)
            o = trial.empty(n, d)
            trial.launch(run, grid, block, (*map(trial.xp.asarray, (q, k, v)), o, ...))
            trial.expect("O", o, expected, at=f"N = {n}, N_kv = {n_kv}, d = {d}")
        if trial.report:
            trial.limit("bank conflicts", trial.figures("K_smem").conflicts, at_most=0)

`sizes` ends after a wrong first size. A launch at the first size is X-rayed on the CPU before it is made; the graders'
outputs are full of bits that are recognised where nobody has written. What can be wrong has a name, its symptom: see
hints.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from helpers import engine
from helpers.attention import kernel
from helpers.attention.check import TOLERANCE, check, make_inputs
from helpers.attention.compile_report import CompileReport, NvrtcMissing, compile_report
from helpers.engine.cuda_source import source
from helpers.engine.nvrtc import CuteMissing, cute_options
from helpers.lesson.exercises import hints, messages, table, texts
from helpers.lesson.exercises.registry import EXERCISES, exercise
from helpers.lesson.exercises.table import Row
from helpers.xray import Figures, Report, xray

__all__ = ["EXERCISES", "Stopped", "Trial", "exercise"]

Size = TypeVar("Size")


class Stopped(Exception):
    """The trial ends here: a row that failed has said why."""


class Trial:
    """One grading on one device: compiles the learner's text, launches it, and fills the rows of the table.

    code: the learner's text. plain: without comments. xp: CuPy or the CPU engine. reports: the X-rays of the launches
    at the first size, none on a GPU; report: the last of them, or None. rng: for inputs that no method here makes.
    """

    def __init__(self, name: str, code: str, device: Any, on_gpu: bool, timeout: float = 10.0) -> None:
        self.name, self.code, self.xp, self.on_gpu = name, code, device, on_gpu
        self.plain = source.blank_comments(code)
        self.rng = np.random.default_rng()
        self.reports: list[Report] = []
        self.rows = {title: Row() for title in table.ROWS}
        self.has_awkward_sizes: bool | None = None  # not known before `sizes`
        self._timeout = timeout
        self._at_first = True
        self._kernels: dict[Any, Callable[..., None]] = {}
        self._passed: dict[str, list[float]] = {table.FIRST: [], table.AWKWARD: []}  # largest errors

    @property
    def report(self) -> Report | None:
        """The X-ray of the last launch at the first size."""
        return self.reports[-1] if self.reports else None

    # ------------------------------------------------------------------------------------------ what graders call

    def sizes(self, first: Size, *others: Size) -> Iterator[Size]:
        """The first size, then the awkward ones; ends after the first size if something is wrong there."""
        self.has_awkward_sizes = bool(others)
        self._at_first = True
        yield first
        if self.rows[table.FIRST].passed is False:
            return
        self._at_first = False
        yield from others

    def inputs(self, n: int, n_kv: int, d: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fresh q (n, d), k and v (n_kv, d), of non-zero mean; NumPy arrays."""
        q, k, v = make_inputs(n, n_kv, d, seed=int(self.rng.integers(2**31)))
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def kernel(self, name: str, *, extra: str = "", **defines: int) -> Any:
        """The learner's kernel `name`, compiled with -DNAME=value, once for each set of them: CuPy's, or the engine's.

        Args:
            extra: CUDA C++ that is appended to the learner's text, such as a kernel that calls one of its functions.
        """
        key = name, extra, tuple(sorted(defines.items()))
        if key not in self._kernels:
            try:
                self._kernels[key] = self._compiled(name, extra, defines)
            except (engine.NoCompilerError, CuteMissing):
                raise
            except Exception as error:  # CuPy's and the engine's errors have no base in common
                get_message = getattr(error, "get_message", None)  # CuPy's compile error
                self._stop(table.COMPILES, str(get_message() if get_message else error), "compile")
            self.rows[table.COMPILES].passed = True
        return self._kernels[key]

    def empty(self, *shape: int, dtype: Any = np.float32) -> Any:
        """An output, filled with bits that are recognised where nobody writes. The X-ray takes it for unwritten."""
        if self.on_gpu:
            filled = np.empty(shape, dtype)
            hints.poison(filled)
            return self.xp.asarray(filled)
        array = self.xp.empty(shape, dtype)
        hints.poison(np.asarray(array).view(np.ndarray))  # not by the engine's own =, which would count as written
        return array

    def launch(
        self, run: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_bytes: int = 0
    ) -> None:
        """Launch a kernel. At the first size on the CPU, a checked launch goes first: `report` is its X-ray."""
        size = table.FIRST if self._at_first else table.AWKWARD
        try:
            if self._at_first and not self.on_gpu:
                self._look(run, grid, block, args, shared_bytes)
            if shared_bytes and not self.on_gpu:  # as a typed launch does on a GPU
                run.allow_dynamic_shared(shared_bytes)
            run(tuple(grid), tuple(block), tuple(args), shared_mem=shared_bytes)
            if self.on_gpu:
                self.xp.cuda.Device().synchronize()  # what goes wrong there is told here
        except (TypeError, ValueError) as error:
            self._stop(table.COMPILES, str(error), "compile")
        except Exception as error:
            message = str(error).partition("\nA block may take")[0]
            if "its time was up" in message:
                message = messages.endless_launch(message, self.code, self._timeout)
            self._stop(size, message, *hints.of_message(str(error)))

    def figures(self, array: str) -> Figures:
        """What an array of global or shared memory cost in `report`; zeros where the kernel has none of that name."""
        if self.report is None:
            return Figures()
        return self.report.shared.get(array) or self.report.traffic.get(array) or Figures()

    def expect(
        self,
        output: str,
        got: Any,
        expected: Any,
        *,
        at: str = "",
        tolerance: float = TOLERANCE,
        symptom: str = "",
        large: bool = False,
    ) -> None:
        """Compare one output of one launch with what it should be.

        Args:
            output: what the table calls it. at: the size. symptom: what it is if wrong, instead of what is detected;
                an element that nobody has written stays one.
            large: the inputs have large scores.
        """
        title = table.FIRST if self._at_first else table.AWKWARD
        here, expected = self.xp.asnumpy(got), np.asarray(expected)
        with (
            contextlib.redirect_stdout(io.StringIO()),
            np.errstate(invalid="ignore"),
        ):  # the poison is a NaN that signals
            result = check(output, here, expected, tolerance=tolerance, must_pass=False)
        row = self.rows[title]
        if result.passed:
            if row.passed is None:
                row.passed = True
            self._passed[title].append(result.max_error)
            row.lines = row.lines if row.passed is False else [self._right(title, at)]
            return
        lines, detected = messages.result(output, at, result, here, expected)
        if large:
            detected = ("large", *detected)
        elif title == table.AWKWARD:
            detected = (*detected[:-1], "tail", "wrong") if detected[-1] == "wrong" else (*detected, "tail")
        at_front = [symptom] if symptom and "empty" not in detected else []
        row.fail(lines, *at_front, *detected, *([symptom] if symptom else []))

    def compiled(self, name: str, arch: str = "sm_80", **defines: int) -> CompileReport | None:
        """Registers, spills and shared memory of the learner's kernel, by NVRTC; None where that is not installed."""
        try:
            return compile_report(texts.complete(self.code), defines, arch, name=name)
        except NvrtcMissing:
            return None

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
        """A limit that the kernel has to meet, and what was counted: the row "meets its limit"."""
        meets = (
            (at_most is None or got <= at_most)
            and (at_least is None or got >= at_least)
            and (exactly is None or got == exactly)
        )
        bounds = (("at most", at_most), ("at least", at_least), ("exactly", exactly))
        wanted = " and ".join(f"{words} {value:,}" for words, value in bounds if value is not None)
        row, line = self.rows[table.LIMIT], f"{what}: {got:,} ({wanted})"
        if not meets:
            row.fail([line.replace("(", "(the limit: ")], *([symptom] if symptom else []), "limit")
        elif row.passed is not False:
            row.passed = True
            row.lines.append(line)

    # ------------------------------------------------------------------------------------------------- how

    def _compiled(self, name: str, extra: str, defines: dict[str, int]) -> Any:
        text = texts.complete(self.code) + (f'\n#line 1 "the grader"\n{extra}' if extra else "")
        headers = (*kernel.headers(text), *kernel.architecture(text)) if self.on_gpu else cute_options(text)
        module = self.xp.RawModule(code=text, options=(*kernel.options(defines), *headers))
        # The CPU engine checks arguments by itself; on a GPU the typed launch does.
        if self.on_gpu:
            return kernel.typed(module, name, text)
        warned = io.StringIO()
        # A host's compiler reads the text again for its warnings; of a kernel, which returns nothing, there is none.
        has_functions = re.search(r"\b__device__\b|->", self.plain) is not None
        module.compile(warned if has_functions and not self._kernels else None)
        line = next((line for line in warned.getvalue().splitlines() if "no return statement" in line), None)
        line = line or next(
            (line for line in warned.getvalue().splitlines() if "reaches end of non-void" in line), None
        )
        if line:
            place = line.partition(": warning")[0]
            self._stop(table.COMPILES, f"{place}: a function that returns a value ends without a return", "return")
        return module.get_function(name)

    def _look(self, run: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int) -> None:
        """The X-ray of a launch; the arrays have their old values again afterwards."""
        before = [(a, np.array(a, subok=False)) for a in args if isinstance(a, engine.ndarray)]
        report = xray(run, grid, block, args, shared, timeout=self._timeout)
        self.reports.append(report)
        for array, values in before:
            np.asarray(array).view(np.ndarray)[...] = values
        row = self.rows[table.XRAY]
        # (An output that is never written is told by `expect`.)
        found = [finding for finding in report.findings if finding.kind != "never written"]
        endless = next((finding for finding in found if finding.kind == "endless loop"), None)
        if endless is not None:
            self._stop(table.FIRST, messages.endless(endless, self.code, self._timeout), "never ends")
        if found:
            row.fail(
                messages.findings(found, self.code),
                *dict.fromkeys(hints.OF_FINDING.get(f.kind, "finding") for f in found),
            )
        elif row.passed is None:
            row.passed = True

    def _right(self, title: str, at: str) -> str:
        errors = self._passed[title]
        return f"{at}, max error {max(errors):.1e}" if title == table.FIRST else f"max error {max(errors):.1e}"

    def _stop(self, title: str, message: str, *symptoms: str) -> None:
        row = self.rows[title]
        if row.passed is True:
            row.passed = None
        row.fail([line.rstrip() for line in message.strip().splitlines()], *symptoms)
        raise Stopped
