"""Check launches as they happen: each runs once, on the checked build, and an error raises an exception.

    with sanitize.every_launch():
        program()

The launch's results are those of the checked run. So nothing runs twice, and the variables of a module keep what its
launches have left there.
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

# A launch that writes part of an array may be one of several that fill it; a read of the rest is reported.
ALLOWED = frozenset({"never written"})


class FoundError(AssertionError):
    """A launch has findings. The message lists each of them with its lines of the source.

    findings: the X-ray's.
    """

    def __init__(self, message: str, found: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = list(found)


class StoppedError(FoundError, LaunchError):
    """The same for a launch that was stopped early: also an error of the launch."""

    def __init__(self, message: str, found: Sequence[Finding]) -> None:
        last = found[-1]
        LaunchError.__init__(self, message, file=last.file, line=last.line, block=last.block, thread=last.thread)
        self.findings = list(found)


@dataclass
class Looked:
    """Counts of the launches that `every_launch` has checked, and their findings by kernel."""

    launches: int = 0
    kernels: set[str] = field(default_factory=set)
    findings: int = 0


def with_lines(finding: Finding, code: str) -> str:
    """Format a finding, and below it the lines of the source that it names."""
    table = source.line_table(code, SOURCE_NAME)
    places = dict.fromkeys([(finding.file, finding.line), (finding.other_file, finding.other_line)])
    lines = [f"{place[1]:>6} | {table[place].rstrip()}" for place in places if place in table]
    return "\n".join(filter(None, [str(finding), *lines, finding.explanation]))


@contextlib.contextmanager
def every_launch(
    *, allow: Collection[str] = ALLOWED, local_variables: bool = False, looked: Looked | None = None
) -> Iterator[Looked]:
    """Check every launch of a kernel of the engine in this context.

    Args:
        allow: kinds of findings to ignore; `Finding` lists them.
        local_variables: also find indices past the end of a thread's own arrays, and results that depend on a local
            uninitialised variable. This takes two more builds of each kernel and two more runs of each launch, on
            copies of its arrays.
        looked: counts the launches.

    Raises:
        ValueError: `allow` names a kind that does not exist.
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
    """Check no launch in this context."""
    before, RawKernel.launch_instead = RawKernel.launch_instead, None
    try:
        yield
    finally:
        RawKernel.launch_instead = before
