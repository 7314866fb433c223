"""The X-ray of one launch, from its arguments to the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import checked, observed
from ..module import RawKernel, RawModule
from ..tracing import TraceOptions
from . import figures, findings
from .findings import Finding
from .render import Table
from .report import Report
from .trace import Trace


def xray(
    kernel: Any,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_mem: int = 0,
    *,
    timeout: float = 60.0,
    write_back: bool = True,
    trace: bool | TraceOptions = False,
) -> Report:
    """Run a launch on the checked build, and report what it recorded.

    Args:
        kernel: the CPU engine's or CuPy's, or an object with `code`, `options` and `name`.
        grid, block, args, shared_mem: as for a launch. The arrays hold the kernel's results afterwards.
        timeout: seconds that one block may take; after that its loop counts as endless.
        write_back: False leaves the arrays, and the variables of the module, as they were: for a launch that follows.
        trace: True records the order of waits, arrivals, copies and products as the report's `trace`; `TraceOptions`
            picks blocks and warps, and limits the events.

    Raises:
        ValueError: `trace` picks blocks or warps that the launch does not have.
        TypeError, LaunchError, CompileError: for a launch that is refused before it starts. Errors while it runs are
            findings.
    """
    how = {"timeout": timeout, "write_back": write_back, "trace": TraceOptions.of(trace)}
    function, seen = _observe(kernel, grid, block, args, shared_mem, profile=True, **how)
    return Report(
        name=function.name,
        code=function.code,
        findings=findings.of_run(seen),
        notes=findings.notes(seen),
        **vars(figures.tables(seen)),
        fetches=figures.fetches(seen),
        barriers=seen.barriers,
        collectives=seen.collectives,
        warp_barriers=seen.warp_barriers,
        grid=seen.grid,
        block=seen.block,
        events=seen.events,
        flop=seen.flop,
        tensor_flop=seen.tensor_flop,
        trace=Trace.of_run(function.name, function.code, seen) if seen.trace else None,
        passed=figures.Passed(seen),
    )


def find(
    kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
) -> list[Finding]:
    """Return `xray`'s findings except those about local variables: one build, not three, and no counting."""
    return findings.of_run(_observe(kernel, grid, block, args, shared_mem, profile=False)[1])


def _observe(
    kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int, **how: Any
) -> tuple[RawKernel, observed.Observed]:
    """Return the engine's kernel, and what its checked run recorded. A GPU's arrays are copied there and back."""
    function = engine_kernel(kernel)
    if kernel is not function:  # as such objects do at a launch
        function.allow_dynamic_shared(shared_mem)
    mirrors = None
    if not isinstance(getattr(kernel, "function", kernel), RawKernel):  # CuPy's
        from .mirrors import Mirrors

        mirrors = Mirrors(args)
    given = mirrors.args if mirrors else args
    seen = checked.observe(function, grid, block, given, shared_mem, **how)
    if mirrors and how.get("write_back", True):
        mirrors.copy_back()
    return function, seen


def engine_kernel(kernel: Any) -> Any:
    """Return the CPU engine's kernel with the same text and options."""
    function = getattr(kernel, "function", kernel)
    if isinstance(function, RawKernel):
        return function
    code, options = getattr(kernel, "code", None), getattr(kernel, "options", None)
    if code is None or options is None:
        raise TypeError(
            f"xray takes a kernel with code, options and name, or the CPU engine's; got {type(kernel).__name__}"
        )
    names = (kernel.name,) if "<" in kernel.name else None
    cooperative = getattr(kernel, "enable_cooperative_groups", False)
    module = RawModule(code=code, options=options, name_expressions=names, enable_cooperative_groups=cooperative)
    return module.kernel_to_build(kernel.name)


def compare(*reports: Report) -> Table:
    """Tabulate the bytes that threads requested of each array of global memory, a column for each report."""
    arrays = dict.fromkeys(name for report in reports for name in report.traffic)
    rows = [("bytes requested", *(report.name for report in reports))]
    for name in arrays:
        figures = [report.traffic.get(name) for report in reports]
        rows.append((name, *(f"{f.read + f.written:,}" if f else "" for f in figures)))
    totals = [sum(f.read + f.written for f in report.traffic.values()) for report in reports]
    rows.append(("together", *(f"{total:,}" for total in totals)))
    requests = [sum(f.requests for f in report.traffic.values()) for report in reports]
    return Table([*rows, ("requests of warps", *(f"{number:,}" for number in requests))])
