"""A checked run of one launch: what the engine records of every memory access of the kernel.

The arrays are copied (see copies.py), so that an access past an end is noted and harms nothing; what the kernel wrote
is copied back. Blocks run one after the other on one OS thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import assembly, failures, returns, runtime, shared_layout, symbols, unset
from .array import ndarray
from .copies import PAD, Copies, Given
from .cuda_source import source
from .failures import index
from .launch import CompiledKernel, PreparedLaunch
from .locals import OwnArrays
from .messages import SOURCE_NAME
from .module import RawKernel
from .regions import DYNAMIC_SHARED, STATIC_SHARED, Region, regions_of
from .structures import (
    CheckedBarrier,
    CheckedEvent,
    CheckedFinding,
    CheckedLeft,
    CheckedRegion,
    CheckedSite,
    CheckedStep,
    Failure,
    Reason,
)

RACE, OUT_OF_BOUNDS, UNINITIALISED, MISALIGNED, IN_FLIGHT, NEVER_WAITED, NOTED = range(1, 8)
SHIFT, CONVERSION, DIVISION, WMMA = range(1, 5)  # what is noted
SAME_VALUE, CONST_WRITTEN, INACTIVE_LANE, LOCAL_BOUNDS = range(11, 15)
UNSET_LOCAL = 16  # found here, not by the engine
NO_PROXY_FENCE, SUMS_TOUCHED, NO_PRODUCT_FENCE, BYTES = range(17, 21)
# Kinds that may be of none of the launch's memory.
WITHOUT_REGION = (
    OUT_OF_BOUNDS,
    NOTED,
    INACTIVE_LANE,
    LOCAL_BOUNDS,
    NEVER_WAITED,
    SUMS_TOUCHED,
    NO_PRODUCT_FENCE,
    BYTES,
)


@dataclass(frozen=True)
class Site:
    """One instruction and one region it touches.

    count: accesses, one for each thread. requests: by warps, of lanes that execute it together. sectors: 32-byte pieces
    of global memory that the requests touch. wavefronts: of shared memory, that they take. worst: the offset in
    bytes at which each lane of the costliest request went; lanes that took no part are not in it.
    """

    place: tuple[str, int] | None
    region: int
    size: int
    is_write: bool
    is_atomic: bool
    count: int
    requests: int
    sectors: int
    wavefronts: int
    worst: dict[int, int]


@dataclass
class Passed:
    """What the warps of one block did, in their order. sites: indices into `Observed.sites`.

    steps: (interval between barriers, warp, site, mask of the lanes, how often). barriers: their places, in order.
    """

    steps: list[tuple[int, int, int, int, int]]
    barriers: list[tuple[str, int]]


@dataclass(frozen=True)
class Access:
    """One side of a finding."""

    place: tuple[str, int] | None
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    is_write: bool


@dataclass(frozen=True)
class Issue:
    """What the checker found, once for each pair of places.

    count: how often. is_volatile: both accesses are.

    shuffle: of a read from a lane that takes no part: the operation, that lane and the mask. local: of an index that is
    outside: the array, which is the thread's own, and how many elements it has; offset is the index. Of an access by a
    pointer both are "".
    """

    kind: int
    region: int
    offset: int
    size: int
    count: int
    access: Access
    other: Access | None
    is_volatile: bool = False
    shuffle: tuple[str, int, int] | None = None
    local: tuple[str, str] | None = None


@dataclass(frozen=True)
class Stopped:
    """Why a launch stopped before its end, where, and who. place: None where it is not known.

    reason, message: the engine's, and in words. other_place: of the other side, such as another barrier.
    region, offset: for an access outside of all arrays, the nearest one and the byte in it; else None.
    """

    reason: Reason
    message: str
    place: tuple[str, int] | None
    other_place: tuple[str, int] | None
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    region: int | None = None
    offset: int | None = None


@dataclass(frozen=True)
class Left:
    """A barrier that some threads of a block had left the kernel before: how many, and the first of them.

    Or one to which a warp came at another line: count is 0, and thread one that stood at other_line.

    was_skipped: nothing before it returns, so those threads went around it, by an `if` or as their loop was shorter.
    """

    place: tuple[str, int]
    block: tuple[int, int, int]
    count: int
    thread: tuple[int, int, int]
    other_line: int = 0
    was_skipped: bool = False


# By the engine's number: what an event is, see `EngineEventKind` of engine/checker.h.
EVENTS = (
    "",
    "load",
    "landed",
    "wait",
    "waited",
    "arrive",
    "product",
    "products done",
    "store",
    "stored",
    "bar.sync",
    "bar.synced",
    "bar.arrive",
)


@dataclass(frozen=True)
class Event:
    """What a warp asked of TMA, of tensor cores or of barriers, or what became of it.

    kind: one of `EVENTS`. thread: by its number in the block. place: of the instruction that asked for it.
    number: of the mbarrier in the block, in the order of their first use; of the barrier of bar.sync; of a product, how
    many the warpgroup has asked for before ("products done": how many are done by now).
    value: bytes ("load", "landed", "store"; of "arrive": that it expects), the parity ("wait", "waited"), the columns N
    of a product, how many products or stores are done at this wait, or the threads of a barrier.
    """

    kind: str
    block: int
    thread: int
    number: int
    value: int
    place: tuple[str, int] | None


@dataclass
class Observed:
    """Everything a checked run saw. stopped: None where it came to its end. events: with a profile, in their order."""

    regions: list[Region]
    sites: list[Site]
    issues: list[Issue]
    barriers: int  # by blocks
    collectives: int  # shuffles, votes and other warp-wide operations, by warps
    stopped: Stopped | None
    passed: dict[int, Passed]  # by block, with a profile; the last blocks are missing where there are too many
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    left: tuple[Left, ...] = ()
    events: tuple[Event, ...] = ()
    flop: int | None = None  # of the threads, with a profile; None where nobody counts: see assembly.py
    tensor_flop: int = 0  # of tensor cores
    warp_barriers: int = 0  # those of `collectives` that are __syncwarp


class _Places:
    """Lines of the source for addresses of the kernel's library; each is looked up once."""

    def __init__(self, kernel: CompiledKernel, lib: ctypes.CDLL) -> None:
        self._library = kernel.library
        self._lib = lib
        self._table = source.line_table(kernel.code, SOURCE_NAME)
        self._known: dict[int, tuple[str, int] | None] = {}

    def of(self, pc: int) -> tuple[str, int] | None:
        """The place in the source of the access whose hook returns to `pc`: of a library's function, its caller's."""
        if pc not in self._known:
            returns = [pc, *self._callers(pc)]
            inner, *outer = (symbols.places_of(self._library.path, at - 1 - self._library.base) for at in returns)
            places = sum(outer, inner)
            ours = [place for place in places if place in self._table]
            # Of an instruction's wrapper in a header that is pasted in, the line that calls it says more.
            ours.sort(key=lambda place: place[0].endswith(failures.HEADERS))
            self._known[pc] = next(iter(ours or places), None)
        return self._known[pc]

    def _callers(self, pc: int) -> list[int]:
        """Where the functions around an access return to, from inside out."""
        out = ctypes.POINTER(ctypes.c_size_t)()
        count = self._lib.engine_check_callers(ctypes.c_uint64(pc), ctypes.byref(out))
        return out[:count]

    def near(self, offset: int) -> tuple[str, int] | None:
        """The place of the instruction at an offset in the library, or of the next one with a line of the source."""
        places = [self.of(self._library.base + offset + 1 + step) for step in range(128)]
        return next((place for place in places if place in self._table), places[0])


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
) -> Observed:
    """Run the launch on the checked build and say what it saw.

    Args:
        kernel: of the engine; its source is compiled a second time, with the hooks.
        grid, block, args, shared_mem: as for a launch.
        profile: count requests, sectors and wavefronts as well.
        timeout: seconds that one block may take before the launch is stopped.
        write_back: what the kernel wrote is in the arrays and the module's variables afterwards.

    Raises:
        TypeError, LaunchError, CompileError: as a launch does, for what is refused before it starts.
    """
    twin = kernel.instrumented(profile=profile)
    checked, cooperative = twin.compiled(), twin.enable_cooperative_groups
    args = checked.arguments(args)
    grid, block = twin.check(grid, block, args, shared_mem, cooperative=cooperative)
    given = [
        Given(number, parameter.name, value, not parameter.is_const, False)
        for number, (parameter, value) in enumerate(zip(checked.parameters, args, strict=True))
        if parameter.kind == "p" and value is not None and value.nbytes
    ]
    for number, (_, value) in checked.tensors(args).items():
        name = "*" * (number >= len(args)) + checked.parameters[number % len(args)].name  # of a map in device memory
        given.append(Given(number, name, value, True, True))
    copies = Copies(given)
    regions, table_rows = regions_of(checked, copies, shared_mem)
    ours = len(table_rows)
    # What is seen of the compiler's own flags, behind all others, is left out of the result.
    table_rows += [
        CheckedRegion(s.offset, s.size, STATIC_SHARED, 4, 1, None, None) for s in checked.shared_arrays if s.is_guard
    ]

    lib = runtime.library()
    table = (CheckedRegion * max(len(table_rows), 1))(*table_rows)
    prepared = checked.prepare(
        grid,
        block,
        args,
        shared_mem,
        lambda number, value: copies.addresses.get(number, value.ctypes.data),
        cooperative=cooperative,
    )
    if checked.shared_arrays:
        prepared.request.static_end += shared_layout.REDZONE  # just past the last array is a finding, not a fault
    with runtime.exclusive():  # the checker has one set of books
        sum_of_flop = checked.library.counter(assembly.FLOP)
        if sum_of_flop is not None:
            sum_of_flop.value = 0
        lib.engine_check_start(table, len(table_rows), checked.library.base if profile else 0)
        try:
            ended = runtime.launch(prepared.request, workers=1, timeout=timeout)
        finally:
            lib.engine_check_stop()
        flop = sum_of_flop.value if sum_of_flop is not None else None
        places = _Places(checked, lib)
        counts = tuple(ctypes.c_uint64() for _ in range(4))
        lib.engine_check_counts(*map(ctypes.byref, counts))
        barriers, collectives, warp_barriers, tensor_flop = (count.value for count in counts)
        issues = [f for f in _issues(lib, places, grid, block) if f.region < ours or f.kind in WITHOUT_REGION]
        every_site = _sites(lib, places)
        passed = _passed(lib, [site.region < ours for site in every_site])
        sites = [site for site in every_site if site.region < ours]
        if profile and ended.failure is None and not issues and unset.has_candidates(checked.code):
            others = [region.name for region in regions]
            issues += _of_locals(lib, kernel, given, copies, (grid, block, args, shared_mem), places, others, timeout)
        left = _left(lib, checked, grid, block)
        events = _events(lib, places)
    runtime.echo(ended.printed)
    if write_back:
        kernel.module.copy_variables(twin.module)
        copies.copy_back()
    stopped = None
    if ended.failure is not None:
        stopped = _stopped(prepared, ended.failure, places, table_rows, timeout)
    counted = events, flop, tensor_flop, warp_barriers
    return Observed(regions, sites, issues, barriers, collectives, stopped, passed, grid, block, left, *counted)


def _of_locals(
    lib: ctypes.CDLL,
    kernel: RawKernel,
    given: list[Given],
    copies: Copies,
    launch: tuple[Any, ...],
    places: _Places,
    others: list[str],
    timeout: float,
) -> list[Issue]:
    """Indices past the end of a thread's own arrays; else what depends on local variables that nobody gave a value, as
    one finding at the write that shows it.

    others: the names of what is in no thread's registers.
    """
    # Once for each kernel and form of its launch: this is about the code, and the values in the arrays seldom matter.
    grid, block, args, shared_mem = launch
    scalars = tuple(np.asarray(value).tobytes() for value in args if not isinstance(value, ndarray))
    form = (grid, block, shared_mem, scalars, tuple((g.number, g.value.shape, g.value.strides) for g in given))
    if form in kernel.known_set:
        return []
    overruns: list[Issue] = []

    def look_for_overruns(text: str) -> bool:
        every = _issues(lib, places, grid, block, OwnArrays(text, others))
        named = {issue.access.place for issue in every if issue.local is not None and issue.local[0]}
        # What is found by its address as well as by its index has a name by that.
        overruns[:] = [i for i in every if i.local is not None and (i.local[0] or i.access.place not in named)]
        return bool(overruns)

    different = unset.find(kernel, lambda: Copies(given, pad=0), copies, launch, min(timeout, 10.0), look_for_overruns)
    if overruns:
        return overruns
    if different is None:
        kernel.known_set.add(form)
        return []
    if different.failure is not None:
        place = failures.place_of(different.failure)
        who = Access(place, index(different.failure.block, grid), index(different.failure.thread, block), False)
        return [Issue(UNSET_LOCAL, -1, 0, 0, 1, who, None)]
    number, thread = ctypes.c_uint64(), ctypes.c_uint()
    lib.engine_check_writer.restype = ctypes.c_uint64
    lib.engine_check_writer.argtypes = [ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    at = different.memory, different.offset
    pc = lib.engine_check_writer(*at, ctypes.byref(number), ctypes.byref(thread))
    writer = Access(places.of(pc) if pc else None, index(number.value, grid), index(thread.value, block), True)
    return [Issue(UNSET_LOCAL, *at, 1, 1, writer, None)]


def _stopped(
    prepared: PreparedLaunch,
    failure: Failure,
    places: _Places,
    table_rows: list[CheckedRegion],
    timeout: float,
) -> Stopped:
    reason = Reason(failure.reason)
    message = prepared.words(failure)
    if reason == Reason.EXPIRED:
        message = f"its block was still running after {timeout:g} s"
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
    return Stopped(reason, message, place, failures.other_place_of(failure), *who, region, offset)


def _sites(lib: ctypes.CDLL, places: _Places) -> list[Site]:
    count = lib.engine_check_sites(None, 0)
    out = (CheckedSite * max(count, 1))()
    lib.engine_check_sites(out, count)
    return [
        Site(
            places.of(s.pc),
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


def _passed(lib: ctypes.CDLL, is_shown: list[bool]) -> dict[int, Passed]:
    """By block; sites are numbered without those that are not kept."""
    number = [sum(is_shown[:i]) for i in range(len(is_shown))]
    steps, whole = ctypes.POINTER(CheckedStep)(), ctypes.c_uint64()
    barriers = ctypes.POINTER(CheckedBarrier)()
    n_steps = lib.engine_check_steps(ctypes.byref(steps), ctypes.byref(whole))
    n_barriers = lib.engine_check_barriers(ctypes.byref(barriers))
    passed: dict[int, Passed] = {}
    for s in (steps[i] for i in range(n_steps)):
        if is_shown[s.site] and s.block < whole.value:
            mine = passed.setdefault(s.block, Passed([], []))
            mine.steps.append((s.interval, s.warp, number[s.site], s.lanes, s.count))
    for b in (barriers[i] for i in range(n_barriers)):
        if b.block < whole.value:
            passed.setdefault(b.block, Passed([], [])).barriers.append((b.file.decode(errors="replace"), b.line))
    return passed


def _events(lib: ctypes.CDLL, places: _Places) -> tuple[Event, ...]:
    out = ctypes.POINTER(CheckedEvent)()
    count = lib.engine_check_events(ctypes.byref(out))
    return tuple(Event(EVENTS[e.kind], e.block, e.thread, e.number, e.value, places.of(e.pc)) for e in out[:count])


def _left(lib: ctypes.CDLL, kernel: CompiledKernel, grid: Sequence[int], block: Sequence[int]) -> tuple[Left, ...]:
    out = ctypes.POINTER(CheckedLeft)()
    count = lib.engine_check_left(ctypes.byref(out))
    every = []
    for one in out[:count]:
        place = (one.file.decode(errors="replace"), one.line)
        was_skipped = bool(one.count) and not returns.may_come_before(kernel.code, kernel.name, place)
        who = index(one.block, grid), one.count, index(one.thread, block)
        every.append(Left(place, *who, one.other_line, was_skipped))
    return tuple(every)


def _issues(
    lib: ctypes.CDLL, places: _Places, grid: Sequence[int], block: Sequence[int], own: OwnArrays | None = None
) -> list[Issue]:
    """What the checker has found. own: to tell a thread's own arrays from others, of an index that is outside."""
    out = ctypes.POINTER(CheckedFinding)()
    count = lib.engine_check_findings(ctypes.byref(out))
    issues = []
    for f in (out[i] for i in range(count)):
        place = (f.file.decode(errors="replace"), f.line) if f.file else places.of(f.pc)
        mine = Access(place, index(f.block, grid), index(f.thread, block), bool(f.is_write))
        shuffle = (f.name.decode(), f.source, f.mask) if f.kind == INACTIVE_LANE else None
        local = None
        if f.kind == LOCAL_BOUNDS:
            declared = f.name.decode().strip("'")  # float [4], or float[4]; "" where it is found by a pointer
            elements = declared.partition("[")[2].partition("]")[0]
            if own is None or place is None or not (declared or own.has(*place)):
                continue
            name = own.name_at(place[0], place[1], f.source, elements) if declared else ""
            if name is None:
                continue
            local = name, elements
        other = None
        if f.other_pc:
            other = Access(
                places.of(f.other_pc),
                index(f.other_block, grid),
                index(f.other_thread, block),
                bool(f.other_is_write),
            )
        issues.append(
            Issue(f.kind, f.region, f.offset, f.size, f.count, mine, other, bool(f.is_volatile), shuffle, local)
        )
    return issues
