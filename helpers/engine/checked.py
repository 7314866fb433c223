"""A checked run of one launch: the engine records every memory access of the kernel.

The arrays are copied (see copies.py), so that an access past an end is recorded without harm; the kernel's results are
copied back. Blocks run one after the other on one OS thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import assembly, failures, returns, runtime, shared_layout, symbols, unset
from .array import ndarray, owner_of
from .compiler import CompileError
from .copies import PAD, Copies, Given
from .cuda_source import source
from .failures import LaunchError, index
from .launch import CompiledKernel, PreparedLaunch
from .limits import Sizes
from .locals import OwnArrays
from .messages import SOURCE_NAME
from .module import RawKernel
from .observed import (
    DYNAMIC_SHARED,
    EVENTS,
    INACTIVE_LANE,
    LOCAL_BOUNDS,
    OUT_OF_BOUNDS,
    STATIC_SHARED,
    UNSET_LOCAL,
    WITHOUT_REGION,
    Abort,
    Access,
    Event,
    Issue,
    Observed,
    PartialBarrier,
    Place,
    Site,
    Traces,
)
from .recorder import Recorder
from .regions import regions_of
from .structures import (
    CheckedBarrier,
    CheckedEvent,
    CheckedFinding,
    CheckedPartialBarrier,
    CheckedRegion,
    CheckedSite,
    CheckedStep,
    Failure,
    Reason,
)
from .tracing import TraceOptions


class _Places:
    """Lines of the source for addresses in the kernel's library; each is looked up once."""

    def __init__(self, kernel: CompiledKernel, lib: ctypes.CDLL) -> None:
        self._library = kernel.library
        self._lib = lib
        self._table = source.line_table(kernel.code, SOURCE_NAME)
        self._known: dict[int, Place | None] = {}

    def of(self, pc: int) -> Place | None:
        """Return the place in the source of the access whose hook returns to `pc`.

        For an access in a library's function this is the place of the call.
        """
        if pc not in self._known:
            returns = [pc, *self._callers(pc)]
            inner, *outer = (symbols.places_of(self._library.path, at - 1 - self._library.base) for at in returns)
            places = sum(outer, inner)
            ours = [place for place in places if place in self._table]
            # If a pasted header wraps the instruction, the line that calls the wrapper is more useful.
            ours.sort(key=lambda place: place[0].endswith(failures.HEADERS))
            self._known[pc] = next(iter(ours or places), None)
        return self._known[pc]

    def _callers(self, pc: int) -> list[int]:
        """Return the return addresses of the functions around an access, innermost first."""
        out = ctypes.POINTER(ctypes.c_size_t)()
        count = self._lib.engine_check_callers(ctypes.c_uint64(pc), ctypes.byref(out))
        return out[:count]

    def near(self, offset: int) -> Place | None:
        """Return the place of the instruction at an offset in the library, or of the next one in the source."""
        places = [self.of(self._library.base + offset + 1 + step) for step in range(128)]
        return next((place for place in places if place in self._table), places[0])


@dataclass(frozen=True)
class _Records:
    """The checker's record of one launch, read from its tables in C++."""

    lib: ctypes.CDLL
    kernel: CompiledKernel
    places: _Places
    grid: Sizes
    block: Sizes

    def counts(self) -> tuple[int, ...]:
        """Return the numbers of barriers, warp-wide operations, __syncwarp, and tensor cores' FLOP."""
        counts = tuple(ctypes.c_uint64() for _ in range(4))
        self.lib.engine_check_counts(*map(ctypes.byref, counts))
        return tuple(count.value for count in counts)

    def sites(self) -> list[Site]:
        """Return every site, including those of the compiler's own flags."""
        count = self.lib.engine_check_sites(None, 0)
        out = (CheckedSite * max(count, 1))()
        self.lib.engine_check_sites(out, count)
        return [
            Site(
                self.places.of(s.pc),
                s.region,
                s.size,
                bool(s.is_write),
                bool(s.is_atomic),
                s.count,
                s.requests,
                s.sectors,
                s.wavefronts,
                {lane: s.worst_offsets[lane] for lane in range(32) if s.worst_lanes >> lane & 1},
            )
            for s in out[:count]
        ]

    def traces(self, is_shown: list[bool]) -> Traces:
        """Return the traces by block. is_shown: for each site, whether it is kept; kept ones are renumbered."""
        steps, whole = ctypes.POINTER(CheckedStep)(), ctypes.c_uint64()
        barriers = ctypes.POINTER(CheckedBarrier)()
        n_steps = self.lib.engine_check_steps(ctypes.byref(steps), ctypes.byref(whole))
        n_barriers = self.lib.engine_check_barriers(ctypes.byref(barriers))
        table = np.ctypeslib.as_array(steps, (n_steps,)) if n_steps else np.empty(0, np.dtype(CheckedStep))
        shown = np.array(is_shown, bool)
        table = table[shown[table["site"]] & (table["block"] < whole.value)]  # a copy: the engine's table will change
        table["site"] = (np.cumsum(shown) - 1)[table["site"]]
        table = table[np.argsort(table["block"], kind="stable")]
        reached: dict[int, list[Place]] = {}
        for b in barriers[:n_barriers]:
            if b.block < whole.value:
                reached.setdefault(b.block, []).append((b.file.decode(errors="replace"), b.line))
        return Traces(table, reached)

    def events(self) -> tuple[Event, ...]:
        """Return the events in order."""
        out = ctypes.POINTER(CheckedEvent)()
        count = self.lib.engine_check_events(ctypes.byref(out))
        return tuple(
            Event(EVENTS[e.kind], e.block, e.thread, e.number, e.value, self.places.of(e.pc)) for e in out[:count]
        )

    def partial_barriers(self) -> tuple[PartialBarrier, ...]:
        """Return the barriers that some threads of a block did not reach, or reached at another line."""
        out = ctypes.POINTER(CheckedPartialBarrier)()
        count = self.lib.engine_check_left(ctypes.byref(out))
        barriers = []
        for one in out[:count]:
            place = (one.file.decode(errors="replace"), one.line)
            was_skipped = bool(one.count) and not returns.may_come_before(self.kernel.code, self.kernel.name, place)
            block, thread = index(one.block, self.grid), index(one.thread, self.block)
            if was_skipped or not one.mask:  # lanes that returned early are allowed to be absent
                of_warp = one.mask, one.name.decode()
                barriers.append(PartialBarrier(place, block, one.count, thread, one.other_line, was_skipped, *of_warp))
        return tuple(barriers)

    def access(self, place: Place | None, block: int, thread: int, is_write: bool) -> Access:
        """Return an access by the numbers of its block and its thread."""
        return Access(place, index(block, self.grid), index(thread, self.block), bool(is_write))

    def issues(self, own: OwnArrays | None = None) -> list[Issue]:
        """Return the checker's findings. own: tells threads' own arrays from others, for indices past an end."""
        out = ctypes.POINTER(CheckedFinding)()
        count = self.lib.engine_check_findings(ctypes.byref(out))
        issues = []
        for f in (out[i] for i in range(count)):
            place = (f.file.decode(errors="replace"), f.line) if f.file else self.places.of(f.pc)
            local = None
            if f.kind == LOCAL_BOUNDS:
                local = _local_array(f, place, own)
                if local is None:
                    continue
            issues.append(
                Issue(
                    f.kind,
                    f.region,
                    f.offset,
                    f.size,
                    f.count,
                    self.access(place, f.block, f.thread, f.is_write),
                    self.access(self.places.of(f.other_pc), f.other_block, f.other_thread, f.other_is_write)
                    if f.other_pc
                    else None,
                    bool(f.is_volatile),
                    (f.name.decode(), f.source, f.mask) if f.kind == INACTIVE_LANE else None,
                    local,
                    index(f.owner, self.grid) if f.of_peer else None,
                )
            )
        return issues

    def last_writer(self, memory: int, offset: int) -> Access:
        """Return the last write to a byte of a region."""
        number, thread = ctypes.c_uint64(), ctypes.c_uint()
        writer = self.lib.engine_check_writer
        writer.restype = ctypes.c_uint64
        writer.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
        pc = writer(memory, offset, ctypes.byref(number), ctypes.byref(thread))
        return self.access(self.places.of(pc) if pc else None, number.value, thread.value, True)


def _local_array(f: CheckedFinding, place: Place | None, own: OwnArrays | None) -> tuple[str, str] | None:
    """Return the array whose end an index is past, and its number of elements; None unless a thread owns it.

    Both are "" for an access through a pointer.
    """
    declared = f.name.decode().strip("'")  # float [4], or float[4]; "" for an access through a pointer
    elements = declared.partition("[")[2].partition("]")[0]
    if own is None or place is None or not (declared or own.has(*place)):
        return None
    name = own.name_at(*place, f.source, elements) if declared else ""
    return None if name is None else (name, elements)


def observe(
    kernel: RawKernel,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_mem: int = 0,
    *,
    profile: bool = False,
    timeout: float = 60.0,
    write_back: bool = True,
    cooperative: bool = False,
    keep: bool = False,
    trace: TraceOptions | None = None,
) -> Observed:
    """Run a launch on the checked build and return what it recorded.

    Args:
        kernel: one of the engine's; its source is compiled again, with the hooks.
        grid, block, args, shared_mem: as for a launch.
        profile: also count requests, sectors and wavefronts, and look for local variables without a value.
        timeout: seconds that one block may take before the launch is stopped.
        write_back: leave the kernel's results in the arrays and in the module's variables.
        cooperative: all blocks are on the device at once; also if the kernel was made with it.
        trace: what to record about the order of barriers, copies and products; None: nothing.
        keep: launches of a module see what earlier ones left in its variables: see `RawModule.instrumented`.

    Raises:
        TypeError, LaunchError, CompileError: as for a launch that is refused before it starts.
    """
    twin = kernel.instrumented(profile=profile, keep=keep)
    checked, cooperative = twin.compiled(), cooperative or twin.enable_cooperative_groups
    args = checked.arguments(args)
    grid, block = twin.check(grid, block, args, shared_mem, cooperative=cooperative)
    given = _given(checked, args)
    copies = Copies(given)
    regions, table_rows = regions_of(checked, copies, shared_mem)
    ours = len(table_rows)
    # The compiler's own flags come last; accesses to them are left out of the result.
    table_rows += [
        CheckedRegion(s.offset, s.size, STATIC_SHARED, 4, 1, None, None) for s in checked.shared_arrays if s.is_guard
    ]

    lib = runtime.library()
    table = (CheckedRegion * max(len(table_rows), 1))(*table_rows)
    prepared = checked.prepare(grid, block, args, shared_mem, copies.address, cooperative=cooperative)
    if checked.shared_arrays:
        prepared.request.static_end += shared_layout.REDZONE  # past the last array: a finding, not a fault
    with runtime.exclusive():  # the checker has one set of tables
        sum_of_flop = checked.library.counter(assembly.FLOP)
        if sum_of_flop is not None:
            sum_of_flop.value = 0
        lib.engine_check_start(table, len(table_rows), checked.library.base if profile else 0)
        recorder = Recorder(lib, trace, grid) if trace is not None else None
        try:
            ended = runtime.launch(prepared.request, workers=1, timeout=timeout)
        finally:
            lib.engine_check_stop()
            if recorder:
                recorder.stop()
        records = _Records(lib, checked, _Places(checked, lib), grid, block)
        barriers, collectives, warp_barriers, tensor_flop = records.counts()
        issues = [f for f in records.issues() if f.region < ours or f.kind in WITHOUT_REGION]
        every_site = records.sites()
        is_shown = [site.region < ours for site in every_site]
        if profile and ended.failure is None and not issues and unset.has_candidates(checked.code):
            others = [region.name for region in regions]
            issues = _issues_of_locals(kernel, given, copies, (grid, block, args, shared_mem), records, others, timeout)
        seen = Observed(
            regions,
            sites=[site for site in every_site if site.region < ours],
            issues=issues,
            barriers=barriers,
            collectives=collectives,
            abort=_abort(prepared, ended.failure, records.places, table_rows, timeout) if ended.failure else None,
            traces=records.traces(is_shown),
            grid=grid,
            block=block,
            partial_barriers=records.partial_barriers(),
            events=records.events(),
            flop=sum_of_flop.value if sum_of_flop is not None else None,
            tensor_flop=tensor_flop,
            warp_barriers=warp_barriers,
            trace=recorder.read(records.places.of, prepared.name_of_mbarrier) if recorder else None,
        )
    runtime.echo(ended.printed)
    if write_back:
        kernel.module.copy_variables(twin.module)
        copies.copy_back()
    return seen


def _given(kernel: CompiledKernel, args: Sequence[Any]) -> list[Given]:
    """Return the arrays of a launch that have elements: arguments, and the arrays described by tensor maps."""
    given = [
        Given(number, parameter.name, value, not parameter.is_const, False)
        for number, (parameter, value) in enumerate(zip(kernel.parameters, args, strict=True))
        if parameter.kind == "p" and value is not None and value.nbytes
    ]
    for number, (_, value) in kernel.tensors(args).items():
        name = "*" * (number >= len(args)) + kernel.parameters[number % len(args)].name  # a map in device memory
        given.append(Given(number, name, value, True, True))
    return given


def first_write_past_an_end(
    kernel: RawKernel, grid: Sizes, block: Sizes, args: Sequence[Any], shared_mem: int
) -> Access | None:
    """Repeat a launch as a checked run, and return its first write past the end of an array; None if there is none.

    The arrays are unchanged afterwards.
    """
    owners = {id(owner): owner for owner in (owner_of(a) for a in args if isinstance(a, ndarray))}
    before = [(owner, owner.copy()) for owner in owners.values()]
    try:
        issues = observe(kernel, grid, block, args, shared_mem).issues
    except (TypeError, LaunchError, CompileError):  # the plain launch accepted this
        return None
    finally:
        for owner, contents in before:
            owner[...] = contents
    return next((i.access for i in issues if i.kind == OUT_OF_BOUNDS and i.access.is_write), None)


def _issues_of_locals(
    kernel: RawKernel,
    given: list[Given],
    copies: Copies,
    launch: tuple[Any, ...],
    records: _Records,
    others: list[str],
    timeout: float,
) -> list[Issue]:
    """Find indices past the end of threads' own arrays, or else results that depend on uninitialised local variables.

    The latter is a single issue, at the write that shows it. others: the names of all arrays that no thread owns.
    """
    # Searched once per kernel and form of launch: the code decides, and the arrays' values seldom matter.
    grid, block, args, shared_mem = launch
    scalars = tuple(np.asarray(value).tobytes() for value in args if not isinstance(value, ndarray))
    form = (grid, block, shared_mem, scalars, tuple((g.number, g.value.shape, g.value.strides) for g in given))
    if form in kernel.known_set:
        return []
    overruns: list[Issue] = []

    def look_for_overruns(text: str) -> bool:
        every = records.issues(OwnArrays(text, others))
        named = {issue.access.place for issue in every if issue.local is not None and issue.local[0]}
        # An access found both by its address and by its index is reported with the index's name.
        overruns[:] = [i for i in every if i.local is not None and (i.local[0] or i.access.place not in named)]
        return bool(overruns)

    different = unset.find(
        lambda value: kernel.filled(value).compiled(),
        lambda: Copies(given, pad=0),
        copies,
        launch,
        min(timeout, 10.0),
        look_for_overruns,
    )
    if overruns:
        return overruns
    if different is None:
        kernel.known_set.add(form)
        return []
    if different.failure is not None:
        failure = different.failure
        who = records.access(failures.place_of(failure), failure.block, failure.thread, False)
        return [Issue(UNSET_LOCAL, -1, 0, 0, 1, who, None)]
    writer = records.last_writer(different.memory, different.offset)
    return [Issue(UNSET_LOCAL, different.memory, different.offset, 1, 1, writer, None)]


def _abort(
    prepared: PreparedLaunch, failure: Failure, places: _Places, table_rows: list[CheckedRegion], timeout: float
) -> Abort:
    reason = Reason(failure.reason)
    message = prepared.describe(failure)
    if reason == Reason.EXPIRED:
        message = f"its block was still running after {timeout:g} s{prepared.blocks_without_room(failure)}"
    place = failures.place_of(failure, prepared.kernel.line_at)
    if place is None and failure.place:
        place = places.near(failure.place)
    region = offset = None
    if reason == Reason.ILLEGAL_ACCESS:
        bases = {STATIC_SHARED: failure.static_base, DYNAMIC_SHARED: failure.dynamic_base}
        for i, r in enumerate(table_rows):
            inside = failure.address - bases.get(r.kind, 0) - r.address
            if -2 * PAD < inside < r.bytes + 2 * PAD:  # the guards of the engine's memory are as wide again
                region, offset = i, inside
    who = failures.index(failure.block, prepared.grid), failures.index(failure.thread, prepared.block)
    explanation = prepared.explain(failure)
    return Abort(reason, message, place, failures.other_place_of(failure), *who, region, offset, explanation)
