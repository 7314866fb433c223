"""The data of a checked run: regions of memory, accesses, findings, barriers and events. Nothing here runs a kernel.

checked.py fills these classes, and the X-ray reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .structures import Reason
from .tracing import Recorded

Place = tuple[str, int]  # file and line
Index = tuple[int, int, int]  # (x, y, z) of a block or a thread

# Kinds of issues, with the engine's numbers: `EngineFindingKind` of engine/checker.h.
RACE, OUT_OF_BOUNDS, UNINITIALISED, MISALIGNED, IN_FLIGHT, NEVER_WAITED, NOTED = range(1, 8)
SAME_VALUE, CONST_WRITTEN, INACTIVE_LANE, LOCAL_BOUNDS = range(11, 15)
UNSET_LOCAL = 16  # checked.py finds these, not the engine
NO_PROXY_FENCE, SUMS_TOUCHED, NO_PRODUCT_FENCE, BYTES = range(17, 21)
PEER_NOT_STARTED, PEER_EXITED, OVERTAKEN = range(22, 25)
# Kinds that may concern no memory of the launch.
WITHOUT_REGION = (
    OUT_OF_BOUNDS,
    NOTED,
    INACTIVE_LANE,
    LOCAL_BOUNDS,
    NEVER_WAITED,
    SUMS_TOUCHED,
    NO_PRODUCT_FENCE,
    BYTES,
    OVERTAKEN,
)
SHIFT, CONVERSION, DIVISION, WMMA = range(1, 5)  # `Issue.size` for issues of the kind NOTED

ARRAY, STATIC_SHARED, DYNAMIC_SHARED, VARIABLE = range(4)  # kinds of regions
UNWRITTEN, INITIAL, WRITTEN = range(3)  # states of elements

# Kinds of events, by the engine's number: `EngineEventKind` of engine/checker.h.
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
class Part:
    """One array of a region: begin and end are bytes in it; itemsize is its elements' size.

    fetches, state: one value per element, in the array's shape; None if arrays with other element sizes share the
    memory.
    """

    name: str
    begin: int
    end: int
    itemsize: int
    writable: bool
    fetches: np.ndarray | None
    state: np.ndarray | None


@dataclass(frozen=True)
class Region:
    """The memory of an array of the launch, or of several that overlap; a `__shared__` array; or a variable.

    fetches, state: one value per element of the arrays' smallest size; empty for shared memory and variables. parts:
    the arrays. writable: neither `__constant__` nor const for the kernel.
    """

    name: str
    kind: int
    size: int
    dtype: np.dtype | None
    writable: bool
    fetches: np.ndarray
    state: np.ndarray
    parts: tuple[Part, ...] = ()

    @property
    def is_shared(self) -> bool:
        """True if each block has its own."""
        return self.kind in (STATIC_SHARED, DYNAMIC_SHARED)

    @property
    def label(self) -> str:
        """The name with the memory space that its declaration begins with."""
        if self.kind == VARIABLE:
            return f"{'__device__' if self.writable else '__constant__'} {self.name}"
        return f"__shared__ {self.name}" if self.kind == STATIC_SHARED else self.name

    def part_at(self, offset: int) -> Part | None:
        """Return the first array that contains the byte at an offset in the region, else the nearest array.

        Returns None for shared memory and variables, which have no parts.
        """
        return min(self.parts, key=lambda part: max(part.begin - offset, offset - (part.end - 1), 0), default=None)


@dataclass(frozen=True)
class Site:
    """One instruction and one region that it touches.

    count: accesses, one for each thread. requests: by warps, of lanes that execute it together. sectors: 32-byte pieces
    of global memory that the requests touch. wavefronts: passes over shared memory that the requests take. worst: the
    offset in bytes of each lane in the costliest request; lanes that took no part are missing.
    """

    place: Place | None
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
class BlockTrace:
    """The steps of one block's warps, in their order. sites: indices into `Observed.sites`.

    steps: (interval between barriers, warp, site, mask of the lanes, count). barriers: their places, in order.
    """

    steps: list[tuple[int, int, int, int, int]]
    barriers: list[Place]


class Traces(Mapping[int, BlockTrace]):
    """The traces of a launch, by block. There may be a million steps, so they become Python objects on request."""

    def __init__(self, steps: np.ndarray, barriers: dict[int, list[Place]]) -> None:
        """Take the steps, sorted by block, with EngineStep's fields, and the places of barriers, by block."""
        blocks, first = np.unique(steps["block"], return_index=True)
        ends = [*first[1:], len(steps)][: len(first)]
        self._parts = {int(b): steps[i:j] for b, i, j in zip(blocks, first, ends, strict=True)}
        self._parts |= {b: steps[:0] for b in barriers if b not in self._parts}
        self._barriers = barriers

    def __getitem__(self, block: int) -> BlockTrace:
        part = self._parts[block]
        fields = ("interval", "warp", "site", "lanes", "count")
        steps = list(zip(*(part[field].tolist() for field in fields), strict=True))
        return BlockTrace(steps, self._barriers.get(block, []))

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class Access:
    """One side of an issue."""

    place: Place | None
    block: Index
    thread: Index
    is_write: bool


@dataclass(frozen=True)
class Issue:
    """Something that the checker found, once for each pair of places.

    count: how many times. is_volatile: both accesses are volatile.

    shuffle: for a read from a lane that takes no part: the operation, that lane and the mask.
    local: for an index past the end of a thread's own array: the array and its number of elements; offset is the index.
    Both texts are empty for an access through a pointer.
    owner: for shared memory of another block of the cluster, that block.
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
    owner: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Abort:
    """Why and where a launch stopped early, and which thread stopped it. place: None if unknown.

    reason, message: the engine's reason, and its text. other_place: the other side's, such as another barrier. region,
    offset: for an access outside all arrays, the nearest one and the byte in it; else None. explanation: for a
    deadlock, which threads wait for which.
    """

    reason: Reason
    message: str
    place: Place | None
    other_place: Place | None
    block: Index
    thread: Index
    region: int | None = None
    offset: int | None = None
    explanation: str = ""


@dataclass(frozen=True)
class PartialBarrier:
    """A barrier reached after some threads of the block had exited: their number, and the first of them.

    Or a warp operation, called name, reached after lanes in its mask had exited; otherwise mask is 0. Or a barrier that
    a warp reached at another line: count is 0, and thread is one that was at other_line.

    was_skipped: there is no return before the barrier, so an `if` or a shorter loop led those threads around it.
    """

    place: Place
    block: Index
    count: int
    thread: Index
    other_line: int = 0
    was_skipped: bool = False
    mask: int = 0
    name: str = ""


@dataclass(frozen=True)
class Event:
    """A warp's request to TMA, tensor cores or a barrier, or its completion.

    kind: one of `EVENTS`. thread: its number in the block. place: that of the requesting instruction.
    number: for an mbarrier, its number in the block, in the order of first use; for bar.sync, the barrier's number; for
    a product, how many the warpgroup has issued before ("products done": how many have completed).
    value: bytes ("load", "landed", "store"; for "arrive", the bytes that it expects), the parity ("wait", "waited"),
    the columns N of a product, the products or stores that completed at this wait, or the threads of a barrier.
    """

    kind: str
    block: int
    thread: int
    number: int
    value: int
    place: Place | None


@dataclass
class Observed:
    """Everything that a checked run recorded.

    abort: None if the launch ran to its end. barriers: counted once per block. collectives: shuffles, votes and other
    warp-wide operations, counted once per warp, of which warp_barriers are __syncwarp. tensor_flop: by tensor cores.
    trace: the recorded order, on request.

    Recorded with a profile only: traces, by block, without the last blocks if there are too many; events; flop, by
    threads, or None if they are not counted (see assembly.py).
    """

    regions: list[Region]
    sites: list[Site]
    issues: list[Issue]
    barriers: int
    collectives: int
    abort: Abort | None
    traces: Traces
    grid: Index
    block: Index
    partial_barriers: tuple[PartialBarrier, ...] = ()
    events: tuple[Event, ...] = ()
    flop: int | None = None
    tensor_flop: int = 0
    warp_barriers: int = 0
    trace: Recorded | None = None
