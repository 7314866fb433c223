"""The X-ray of one launch, from its arguments to the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers import engine
from helpers.attention.ladder import tensor_maps
from helpers.device import ON_GPU, cp
from helpers.engine import checked, copies
from helpers.xray import figures, findings
from helpers.xray.findings import Finding
from helpers.xray.render import Table
from helpers.xray.report import Report


def xray(
    kernel: Any,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_mem: int = 0,
    *,
    timeout: float = 60.0,
) -> Report:
    """Run a launch on the checked build, and report what it saw.

    Args:
        kernel: a `helpers.attention.kernel.Kernel`, or a kernel of the CPU engine.
        grid, block, args, shared_mem: as for a launch. The arrays hold the kernel's results afterwards.
        timeout: seconds that one block may take; after that its loop is taken for an endless one.

    Raises:
        TypeError, LaunchError, CompileError: for a launch that is refused before it starts. What goes wrong while it
        runs is a finding.
    """
    function, seen = _observe(kernel, grid, block, args, shared_mem, profile=True, timeout=timeout)
    tables = figures.tables(seen)
    return Report(
        name=function.name,
        code=function.code,
        findings=findings.of_run(seen),
        notes=findings.notes(seen),
        traffic=tables.traffic,
        shared=tables.shared,
        by_line=tables.by_line,
        fetches=figures.fetches(seen),
        barriers=seen.barriers,
        collectives=seen.collectives,
        worst=tables.worst,
        by_access=tables.by_access,
        grid=seen.grid,
        block=seen.block,
        events=seen.events,
        passed={number: figures.steps(seen, passed) for number, passed in seen.passed.items()},
    )


def find(
    kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
) -> list[Finding]:
    """The findings of `xray` but for those about local variables, by one build, not three; nothing is counted."""
    return findings.of_run(_observe(kernel, grid, block, args, shared_mem, profile=False)[1])


def _observe(
    kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int, **how: Any
) -> tuple[engine.RawKernel, checked.Observed]:
    """The engine's kernel, and what a checked run of it saw. The arrays of a GPU are copied there and back."""
    function = engine_kernel(kernel)
    if kernel is not function:  # as a launch of helpers.attention.kernel does
        function.allow_dynamic_shared(shared_mem)
    mirrors = _Mirrors(args) if ON_GPU else None
    given = mirrors.args if mirrors else args
    seen = checked.observe(function, grid, block, given, shared_mem, **how)
    if mirrors:
        mirrors.copy_back()
    return function, seen


def _array_of(tensor: tensor_maps.Made) -> Any:
    """The array on the GPU that a tensor map describes. The caller of the launch keeps it alive."""
    kind = np.dtype(np.uint16)  # both half types have two bytes
    strides = (*reversed(tensor.strides), kind.itemsize)
    shape = tuple(reversed(tensor.sizes))
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
    memory = cp.cuda.UnownedMemory(tensor.address, size, None)
    return cp.ndarray(shape, kind, cp.cuda.MemoryPointer(memory, 0), strides)


class _Mirrors:
    """The arguments of a launch on a GPU as arrays of the engine; those that share memory there share it here."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.args = list(args)
        self._pieces: list[tuple[Any, engine.ndarray]] = []
        maps = {number: tensor for number, a in enumerate(args) if (tensor := tensor_maps.made_of(a)) is not None}
        for number, tensor in maps.items():
            self.args[number] = _array_of(tensor)
        args = self.args
        spans = [
            (*copies.extent(a.data.ptr, a.shape, a.strides, a.itemsize), number)
            for number, a in enumerate(args)
            if isinstance(a, cp.ndarray)
        ]
        groups: list[tuple[int, int, list[int]]] = []
        for begin, end, number in sorted(spans):
            first, last, members = groups[-1] if groups else (0, 0, [])
            kin = bool(members) and args[members[-1]].data.mem is args[number].data.mem
            if members and (begin < last or (kin and begin - last <= copies.PAD)):
                groups[-1] = first, max(last, end), [*members, number]
            else:
                groups.append((begin, end, [number]))
        for begin, end, members in groups:
            self._mirror(begin, end, members)
        for number, tensor in maps.items():
            here = self.args[number].ctypes.data
            self.args[number] = engine.tensor_map.encode_tiled(
                tensor.dtype, here, tensor.sizes, tensor.strides, tensor.box
            )

    def _mirror(self, begin: int, end: int, members: Sequence[int]) -> None:
        """Bring a piece of a GPU's memory here, at the same distance from a multiple of 256 bytes."""
        lead, size, memory = begin % copies.ALIGNMENT, end - begin, self.args[members[0]].data.mem
        here = engine.empty(lead + size, np.uint8)
        if size:
            remote = cp.ndarray((size,), cp.uint8, cp.cuda.MemoryPointer(memory, begin - memory.ptr))
            here[lead:] = cp.asnumpy(remote)
            self._pieces.append((remote, here[lead:]))
        for number in members:
            a = self.args[number]
            place = lead + a.data.ptr - begin
            self.args[number] = np.ndarray.__new__(engine.ndarray, a.shape, a.dtype, here, place, a.strides)

    def copy_back(self) -> None:
        """What the kernel wrote goes to the GPU."""
        for remote, here in self._pieces:
            remote[...] = cp.asarray(engine.asnumpy(here))


def engine_kernel(kernel: Any) -> Any:
    """The CPU engine's kernel of the same text and options."""
    function = getattr(kernel, "function", kernel)
    if isinstance(function, engine.RawKernel):
        return function
    code, options = getattr(kernel, "code", None), getattr(kernel, "options", None)
    if code is None or options is None:
        raise TypeError(
            f"xray takes a kernel of helpers.attention.kernel or of the CPU engine; got {type(kernel).__name__}"
        )
    names = (kernel.name,) if "<" in kernel.name else None
    cooperative = getattr(kernel, "enable_cooperative_groups", False)
    module = engine.RawModule(code=code, options=options, name_expressions=names, enable_cooperative_groups=cooperative)
    return module.kernel_to_build(kernel.name)


def compare(*reports: Report) -> Table:
    """Bytes that the threads requested of each array of global memory, a column for each report."""
    arrays = dict.fromkeys(name for report in reports for name in report.traffic)
    rows = [("bytes requested", *(report.name for report in reports))]
    for name in arrays:
        figures = [report.traffic.get(name) for report in reports]
        rows.append((name, *(f"{f.read + f.written:,}" if f else "" for f in figures)))
    totals = [sum(f.read + f.written for f in report.traffic.values()) for report in reports]
    rows.append(("together", *(f"{total:,}" for total in totals)))
    requests = [sum(f.requests for f in report.traffic.values()) for report in reports]
    return Table([*rows, ("requests of warps", *(f"{number:,}" for number in requests))])
