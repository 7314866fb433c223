"""What the bug zoos share: a bug as a kernel with its twin, how it is looked at, and what has to be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import engine
from helpers.xray import Report, xray


def out(n: int, dtype: Any = np.float32) -> Any:
    """An array that nobody has written yet."""
    return engine.full(n, np.nan, dtype=dtype)


def some(n: int, dtype: Any = np.float32) -> Any:
    """0, 1, 2, ..."""
    return engine.asarray(np.arange(n).astype(dtype))


def zeros(n: int, dtype: Any = np.int32) -> Any:
    return engine.zeros(n, dtype=dtype)


@dataclass(frozen=True)
class Bug:
    """A kernel NAME with one bug. The finding is at the line with `// here`, its other side at `// there`.

    SELF is its name, for what stands outside of it.

    fix: (old, new) texts that make the twin. array, index, block, thread: of the finding, where one value is right.
    """

    name: str
    kind: str
    code: str
    fix: tuple[tuple[str, str], ...]
    args: Callable[[], Sequence[Any]]
    grid: int = 1
    block: int = 64
    shared_mem: int = 0
    array: str | None = None
    index: int | None = None
    at_block: int | None = None
    at_thread: int | None = None

    def line(self, mark: str) -> int | None:
        lines = [n for n, text in enumerate(self.code.splitlines(), start=1) if f"// {mark}" in text]
        return lines[0] if lines else None

    def text(self, *, fixed: bool) -> str:
        code = self.code
        for old, new in self.fix if fixed else ():
            assert old in code, f"{self.name}: nothing to fix"
            code = code.replace(old, new)
        name = f"{self.name}_fixed" if fixed else self.name
        code = code.replace("SELF", name)
        return f'#line 1 "{name}.cu"\n' + code.replace("NAME", f'extern "C" __global__ void {name}')


SYNC = ("/* no barrier */", "__syncthreads();")


def module(bugs: Sequence[Bug], head: str = "") -> engine.RawModule:
    """Every kernel of a group and its twin, compiled together. head: what stands before them."""
    texts = [bug.text(fixed=fixed) for bug in bugs for fixed in (False, True)]
    return engine.RawModule(code=head + "".join(texts), options=("-std=c++17",))


def look(module: engine.RawModule, bug: Bug, *, fixed: bool) -> Report:
    """The X-ray of the bug, or of its twin."""
    kernel = module.get_function(f"{bug.name}_fixed" if fixed else bug.name)
    timeout = 0.3 if bug.kind == "endless loop" and not fixed else 60.0
    return xray(kernel, (bug.grid,), (bug.block,), bug.args(), bug.shared_mem, timeout=timeout)


def linear(index: tuple[int, int, int] | None) -> int | None:
    """An index of one dimension as a number."""
    return index[0] if index is not None and index[1:] == (0, 0) else None


def assert_found(report: Report, bug: Bug) -> None:
    """The report has the bug's finding, where it is, and no other."""
    assert [f.kind for f in report.findings] == [bug.kind], report.findings
    found = report.findings[0]
    assert not report.clean and found.message
    here, there = bug.line("here"), bug.line("there")
    if here is not None:
        assert found.file == f"{bug.name}.cu"
        assert {found.line, found.other_line} == {here, there}, found
        assert f"{bug.name}.cu:{here}" in found.message
        assert there is None or found.message.count(f"{bug.name}.cu:{there}") >= 1 + (here == there)
    for got, wanted in (
        (found.array, bug.array),
        (found.index, bug.index),
        (linear(found.block), bug.at_block),
        (linear(found.thread), bug.at_thread),
    ):
        assert wanted is None or got == wanted, found
