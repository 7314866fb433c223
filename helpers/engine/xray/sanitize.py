"""Look at launches as they happen: each runs once, on the checked build, and what is wrong raises an exception.

    with sanitize.every_launch():
        program()

The launch's results are those of the checked run. So nothing runs twice: neither on the same arrays nor on copies, and
the variables of a module keep what its launches have left there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import checked, failures, runtime
from ..cuda_source import source
from ..failures import LaunchError
from ..messages import SOURCE_NAME
from ..module import RawKernel
from . import findings
from .findings import Finding

# A launch that writes a part of an array may be one of several that fill it; whoever reads the rest is found.
ALLOWED = frozenset({"never written"})


class FoundError(AssertionError):
    """A launch has findings. The message has each of them with its lines of the source.

    findings: of the X-ray.
    """

    def __init__(self, message: str, found: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = list(found)


class StoppedError(FoundError, LaunchError):
    """The same of a launch that did not come to its end, and so is an error of the launch too."""

    def __init__(self, message: str, found: Sequence[Finding]) -> None:
        last = found[-1]
        LaunchError.__init__(self, message, file=last.file, line=last.line, block=last.block, thread=last.thread)
        self.findings = list(found)


@dataclass
class Looked:
    """A count of the launches that `every_launch` has looked at, and their findings by kernel."""

    launches: int = 0
    kernels: set[str] = field(default_factory=set)
    findings: int = 0


def with_lines(finding: Finding, code: str) -> str:
    """Format a finding, and under it the lines of the source that it names."""
    table = source.line_table(code, SOURCE_NAME)
    places = dict.fromkeys([(finding.file, finding.line), (finding.other_file, finding.other_line)])
    lines = [f"{place[1]:>6} | {table[place].rstrip()}" for place in places if place in table]
    return "\n".join(filter(None, [str(finding), *lines, finding.explanation]))


@contextlib.contextmanager
def every_launch(
    *, allow: Collection[str] = ALLOWED, local_variables: bool = False, looked: Looked | None = None
) -> Iterator[Looked]:
    """Look at every launch of a kernel of the engine meanwhile.

    Args:
        allow: kinds of findings that are none here; `Finding` lists them.
        local_variables: also find indices past the end of a thread's own arrays, and results that depend on a local
            variable without a value. This takes two more builds of each kernel, and of each launch two more runs,
            whose arrays are copies.
        looked: where launches are counted.

    Raises:
        ValueError: no finding is of a kind in `allow`.
        FoundError, StoppedError: at the launch, which has ended; its arrays hold what it wrote.
    """
    unknown = set(allow) - findings.EVERY_KIND
    if unknown:
        raise ValueError(f"no finding is called {', '.join(sorted(unknown))}: {', '.join(sorted(findings.EVERY_KIND))}")
    count = looked or Looked()

    def launch(kernel: RawKernel, grid: Any, block: Any, args: Any, shared_mem: int, **how: Any) -> None:
        __tracebackhide__ = True
        timeout = runtime.time_limit(60.0) if how["timeout"] is None else how["timeout"]
        seen = checked.observe(
            *(kernel, grid, block, args, shared_mem),
            profile=local_variables,
            timeout=timeout,
            cooperative=how["cooperative"],
            keep=True,
        )
        found = [finding for finding in findings.of_run(seen) if finding.kind not in allow]
        count.launches += 1
        count.kernels.add(kernel.name)
        if not found and seen.abort is None:
            return
        found = found or [findings.end_of(seen)]
        count.findings += len(found)
        sizes = ", ".join(failures.format_dim3(of) for of in (seen.grid, seen.block))
        number = "1 finding" if len(found) == 1 else f"{len(found)} findings"
        text = "\n".join(with_lines(finding, kernel.code) for finding in found)
        kind = FoundError if seen.abort is None else StoppedError
        raise kind(f"{kernel.name}<<<{sizes}>>>: {number}\n{text}", found)

    before = RawKernel.launch_instead
    RawKernel.launch_instead = staticmethod(launch)
    try:
        yield count
    finally:
        RawKernel.launch_instead = before


@contextlib.contextmanager
def no_launch() -> Iterator[None]:
    """Look at no launch meanwhile."""
    before, RawKernel.launch_instead = RawKernel.launch_instead, None
    try:
        yield
    finally:
        RawKernel.launch_instead = before
