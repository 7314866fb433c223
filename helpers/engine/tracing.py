"""The order of barriers, copies and products in a checked run: which events to record, and the events themselves.

The engine runs warp after warp and completes copies and products as late as possible. A GPU may use this order or many
others; nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

WARP = 32
NO_TIME = (
    "The CPU engine's order, not time: it completes copies and products as late as it may, and a GPU may interleave "
    "its warps in another way."
)
CUT = "Later events are missing, as the limit was reached: pick blocks or warps, or raise it, with TraceOptions."

# Kinds of events, by the engine's number: `EngineTraceKind` of cpp/trace.cpp.
KINDS = (
    "block begins",
    "block ends",
    "exit",
    "init",
    "arrive",
    "expect_tx",
    "wait",
    "waited",
    "phase ends",
    "load",
    "landed",
    "store",
    "stored",
    "cp.async",
    "cp.async.commit",
    "cp.async.wait",
    "wgmma",
    "wgmma.commit",
    "wgmma.wait",
    "wgmma.waited",
    "wgmma done",
    "bar.arrive",
    "bar.sync",
    "bar.synced",
    "syncthreads",
    "synced",
    "cluster.arrive",
    "cluster.wait",
    "cluster.waited",
)


@dataclass(frozen=True)
class TraceOptions:
    """The choice of events to record.

    blocks: their numbers, x first; None: all. warps: their numbers in the block; None: all. Changes of mbarriers are
    always recorded: arrivals, bytes, copies, phases. limit: the number of events to keep, from the first.
    """

    blocks: Sequence[int] | None = None
    warps: Sequence[int] | None = None
    limit: int = 50_000

    @classmethod
    def of(cls, trace: bool | TraceOptions) -> TraceOptions | None:
        """Return the options passed to `xray`: all blocks and warps for True, None for False."""
        return (cls() if trace else None) if isinstance(trace, bool) else trace


@dataclass(frozen=True)
class TraceEvent:
    """An action of a warp's lanes, or an event of the block.

    order: its place in the launch, from 0. kind: one of `KINDS`, or "setmaxnreg" and "setmaxnreg done". warp: its
    number in the block, or None for events without a warp: the beginning and the end of a block, and the end of a
    phase. lanes: a mask. place: (file, line) in the source.

    barrier: an mbarrier's name in the source, such as "full[1]", or "bar.sync 3", "__syncthreads", "barrier.cluster".
    phase: an mbarrier's, counted from 0; -1 is the one before the first, which counts as ended.

    value: bytes ("expect_tx", "load", "landed", "store", "cp.async", and "cp.async.wait": those that have landed), of
    each lane; arrivals ("arrive": of each lane, "init": of a phase); the parity ("wait", "waited"); N of a "wgmma";
    groups that may be left ("wgmma.wait"), or registers ("setmaxnreg"); "wgmma done", "stored": how many; threads that
    a barrier waits for; "block ends": threads that did not come to their end.
    """

    order: int
    kind: str
    block: int
    warp: int | None
    lanes: int
    barrier: str
    phase: int | None
    value: int
    number: int
    place: tuple[str, int] | None

    @property
    def n_lanes(self) -> int:
        """The number of lanes of the warp that did it."""
        return self.lanes.bit_count()

    @property
    def who(self) -> str:
        """The warp or some of its threads: "warp 2", "thread 64", "31 threads of warp 0"; "" without a warp."""
        if self.warp is None:
            return ""
        if self.n_lanes == 1:
            return f"thread {self.warp * WARP + self.lanes.bit_length() - 1}"
        return f"warp {self.warp}" if self.n_lanes == WARP else f"{self.n_lanes} threads of warp {self.warp}"

    def __str__(self) -> str:
        """Format it as one line: which threads, at which line, did what."""
        at = f" at line {self.place[1]}" if self.place else ""
        return f"{self.who}{at}: {self.what}" if self.who else f"block {self.block}{at}: {self.what}"

    @property
    def what(self) -> str:
        """A description of what happened."""
        phase = f", phase {self.phase} (parity {self.phase % 2})" if self.phase is not None else ""
        ended = f"{self.barrier}{phase} has ended"
        if self.phase == -1:
            phase, ended = ", parity 1", f"{self.barrier} is in phase 0, so parity 1 counts as ended"
        of_all = self.value * max(self.n_lanes, 1)
        words = {
            "block begins": "begins",
            "block ends": f"stops, and {_count(self.value, 'thread')} did not end" if self.value else "ends",
            "exit": "leaves the kernel",
            "init": f"initialises {self.barrier}: {_count(self.value, 'arrival')} a phase",
            "arrive": f"{_count(of_all, 'arrival')} at {self.barrier}{phase}",
            "expect_tx": f"{self.value:,} bytes expected at {self.barrier}{phase}",
            "wait": f"waits for {self.barrier}{phase}",
            "waited": f"goes on: {ended}",
            "phase ends": f"{self.barrier}{phase} ends",
            "load": f"issues a copy of {self.value:,} bytes to {self.barrier}{phase}",
            "landed": f"its copy of {self.value:,} bytes lands, {self.barrier}{phase}",
            "store": f"issues a store of {self.value:,} bytes",
            "stored": f"waits for its stores: {self.value} completed",
            "cp.async": f"issues cp.async, {of_all:,} bytes",
            "cp.async.commit": f"closes group {self.number} of cp.async",
            "cp.async.wait": f"waits for cp.async: {of_all:,} bytes land",
            "wgmma": f"issues wgmma {self.number}, N = {self.value}",
            "wgmma.commit": f"closes wgmma group {self.number}",
            "wgmma.wait": f"waits until at most {self.value} of its wgmma groups are in flight",
            "wgmma.waited": f"goes on: at most {self.value} of its wgmma groups are in flight",
            "setmaxnreg": f"waits for {self.value} registers a thread",
            "setmaxnreg done": f"has {self.value} registers a thread",
            "wgmma done": f"{self.value} wgmma done, {self.number} so far",
            "bar.arrive": f"arrives at {self.barrier}",
            "bar.sync": f"waits at {self.barrier} for {self.value} threads",
            "bar.synced": f"goes on: {self.barrier} is complete",
            "syncthreads": "waits in __syncthreads",
            "synced": "goes on: __syncthreads is complete",
            "cluster.arrive": f"arrives at barrier.cluster, of {_count(self.value, 'thread')}",
            "cluster.wait": "waits for barrier.cluster",
            "cluster.waited": "goes on: barrier.cluster is complete",
        }
        return words[self.kind]


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Recorded:
    """The events of a launch, in order. is_cut: there were more than the limit; the first ones are kept."""

    events: tuple[TraceEvent, ...]
    is_cut: bool


# What ends each wait; a warp waits for one thing at a time.
ENDS = {
    "wait": "waited",
    "wgmma.wait": "wgmma.waited",
    "setmaxnreg": "setmaxnreg done",
    "bar.sync": "bar.synced",
    "syncthreads": "synced",
    "cluster.wait": "cluster.waited",
}


@dataclass
class Mbarrier:
    """An mbarrier at a point of a trace.

    phase: the current one. arrivals: those still missing, out of `expected`; bytes: announced by expect_tx and not
    arrived yet; negative if more were sent. flying: bytes of copies in flight. waiting: warps.
    """

    name: str
    expected: int
    phase: int = 0
    arrivals: int = 0
    announced: int = 0
    flying: int = 0
    waiting: dict[int, int] = field(default_factory=dict)  # warp -> phase


@dataclass
class Warp:
    """A warp at a point of a trace: its last place and action, and what it waits for; "" for nothing."""

    place: tuple[str, int] | None = None
    doing: str = ""
    waits: str = ""
    alive: int = 0  # a mask of its lanes


@dataclass
class State:
    """A block after one of its events: its mbarriers by name, and its warps by number.

    event: the last one. is_stuck: the block has stopped, and its waits never end.
    """

    event: TraceEvent
    mbarriers: dict[str, Mbarrier]
    warps: dict[int, Warp]
    is_stuck: bool = False

    def rows(self) -> list[tuple[str, ...]]:
        """Tabulate the mbarriers: a head, then a row each."""
        rows: list[tuple[str, ...]] = [("mbarrier", "phase", "parity", "arrivals", "bytes", "waiting")]
        for one in self.mbarriers.values():
            come = f"{one.expected - one.arrivals} of {one.expected}"
            waiting = ", ".join(f"warp {warp} (phase {phase})" for warp, phase in sorted(one.waiting.items()))
            size = f"{one.announced:,} missing" if one.announced else ""
            size += f"{', ' if size else ''}{one.flying:,} in flight" if one.flying else ""
            rows.append((one.name, str(one.phase), str(one.phase % 2), come, size, waiting))
        return rows

    def __str__(self) -> str:
        lines = [f"{self.event.order}: {self.event}", *(_aligned(self.rows()) if self.mbarriers else [])]
        for number, warp in sorted(self.warps.items()):
            at = f" at line {warp.place[1]}" if warp.place else ""
            doing = f"waits for {warp.waits}" + (" forever" if self.is_stuck else "") if warp.waits else warp.doing
            lines.append(f"warp {number}{at}: {doing}")
        return "\n".join(lines)

    __repr__ = __str__


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def states(events: Iterable[TraceEvent], n_threads: int) -> Iterator[State]:
    """Replay a block's events, and yield its state after each. The state is the same object each time.

    n_threads: the block's.
    """
    events = list(events)
    warps = sorted({e.warp for e in events if e.warp is not None})
    state = State(events[0], {}, {warp: Warp(alive=_lanes(warp, n_threads)) for warp in warps})
    for event in events:
        state.event = event
        _apply(state, event)
        yield state


def _lanes(warp: int, n_threads: int) -> int:
    """Return a mask of the lanes that a warp has."""
    return (1 << max(min(n_threads - WARP * warp, WARP), 0)) - 1


def _apply(state: State, e: TraceEvent) -> None:
    """Apply an event to a state."""
    known = state.mbarriers.get(e.barrier)
    if e.kind == "init":
        state.mbarriers[e.barrier] = Mbarrier(e.barrier, e.value, arrivals=e.value)
    elif known is not None:
        value = e.value * max(e.n_lanes, 1)  # threads of another block are not known
        if e.kind == "arrive":
            known.arrivals -= value
        elif e.kind == "expect_tx":
            known.announced += value
        elif e.kind == "load":
            known.flying += value
        elif e.kind == "landed":
            known.flying -= e.value
            known.announced -= e.value
        elif e.kind == "phase ends" and e.phase is not None:
            known.phase, known.arrivals = e.phase + 1, known.arrivals + known.expected
        elif e.kind == "wait" and e.warp is not None and e.phase is not None:
            known.waiting[e.warp] = e.phase
        elif e.kind == "waited" and e.warp is not None:
            known.waiting.pop(e.warp, None)
    if e.kind == "block ends":
        state.is_stuck = e.value > 0
    if e.warp is None or e.kind == "landed":
        return
    warp = state.warps[e.warp]
    if e.kind == "exit":
        warp.alive &= ~e.lanes
        if not warp.alive:
            warp.doing, warp.waits = "has left the kernel", ""
        return
    warp.place, warp.doing = e.place or warp.place, e.what
    if e.kind in ENDS:
        phase = f", phase {e.phase} (parity {e.value})" if e.kind == "wait" else ""
        phase = f", parity {e.value}" if e.phase == -1 else phase
        warp.waits = f"{e.barrier or f'{e.kind} {e.value}'}{phase}"
    elif e.kind in ENDS.values():
        warp.waits = ""
