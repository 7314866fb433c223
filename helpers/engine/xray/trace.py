"""The order of events in a launch on the engine: a table, a walk through its steps, and a file for Perfetto.

    trace = xray(kernel, grid, block, args, trace=True).trace
    trace.of(warp=0, barrier="full[0]")      # the events of one warp at one mbarrier
    trace.at(12)                             # a block's state after its first 13 events
    trace.save("launch.json")                # for chrome://tracing and ui.perfetto.dev

**The order is the engine's, and nothing here is a time.** The engine runs warp after warp, and completes a copy or a
product only when no thread can continue without it. A GPU may use another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from .. import observed
from ..cuda_source import source
from ..messages import SOURCE_NAME
from ..tracing import CUT, ENDS, NO_TIME, State, TraceEvent, states
from . import hooks
from .render import first_line, html_table

SHOWN = 60  # events in a table


@dataclass(frozen=True)
class Trace:
    """The events of a launch, in the engine's order.

    kernel: its name. events: all of them, or those selected by `of`. is_cut: there were more than the limit; the first
    ones are kept.
    """

    kernel: str
    code: str = field(repr=False)
    grid: tuple[int, int, int]
    n_threads: int  # per block
    events: tuple[TraceEvent, ...]
    is_cut: bool = False

    @classmethod
    def of_run(cls, name: str, code: str, seen: observed.Observed) -> Trace:
        """Return the trace of a checked run that recorded one."""
        assert seen.trace is not None
        return cls(name, code, seen.grid, prod(seen.block), seen.trace.events, seen.trace.is_cut)

    # ------------------------------------------------------------------------------------ as a table

    def of(
        self, *, block: int | None = None, warp: int | None = None, barrier: str | None = None, kind: str | None = None
    ) -> Trace:
        """Return the trace with only the events of a block, of a warp, at a barrier, or of a kind.

        barrier: its name in the source, such as "full[1]", or its array's, "full". kind: one of `tracing.KINDS`.

        Raises:
            KeyError: no event has such a barrier; the message lists the barriers.
        """
        names = list(dict.fromkeys(e.barrier for e in self.events if e.barrier))
        wanted = [name for name in names if barrier in (name, name.partition("[")[0])]
        if barrier is not None and not wanted:
            raise KeyError(f"no barrier {barrier!r}; there are: {', '.join(names) or 'none'}")
        kept = (
            e
            for e in self.events
            if block in (None, e.block)
            and warp in (None, e.warp)
            and kind in (None, e.kind)
            and (barrier is None or e.barrier in wanted)
        )
        return replace(self, events=tuple(kept))

    def renamed(self, names: Mapping[str, str]) -> Trace:
        """Return the trace with other names for barriers, such as {"barriers[3]": "empty[0]"}.

        Those in dynamic shared memory are called "mbarrier at byte 180224", because the source declares no array for
        them.
        """
        return replace(self, events=tuple(replace(e, barrier=names.get(e.barrier, e.barrier)) for e in self.events))

    @property
    def note(self) -> str:
        """A note about the order, and about missing events."""
        return f"{NO_TIME} {CUT}" if self.is_cut else NO_TIME

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("order", "block", "who", "line", "what")]
        for e in self.events[:SHOWN]:
            line = str(e.place[1]) if e.place else ""
            rows.append((str(e.order), str(e.block), e.who, line, e.what))
        return rows

    def _more(self) -> str:
        more = len(self.events) - SHOWN
        return f"{more:,} more are in `events`. {self.note}" if more > 0 else self.note

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(row[2]) for row in rows)
        lines = [f"{row[0]:>5} {row[1]:>5} {row[2]:{width}} {row[3]:>5} {row[4]}" for row in rows]
        return "\n".join([f"{self.kernel}: {len(self.events):,} events", *lines, self._more()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = f"{self.kernel}: {len(self.events):,} events"
        return f"{first_line(title)}<p><b>{title}</b></p>{html_table(self._rows())}<p>{self._more()}</p>"

    # ------------------------------------------------------------------------------------ step by step

    def blocks(self) -> list[int]:
        """Return the numbers of the blocks with events."""
        return sorted({e.block for e in self.events})

    def states(self, block: int = 0) -> Iterator[State]:
        """Replay a block's events, and yield its state after each. The state is the same object each time.

        Raises:
            KeyError: the block has no events.
        """
        events = [e for e in self.events if e.block == block]
        if not events:
            raise KeyError(f"block {block} has no events; blocks with events: {self.blocks()}")
        yield from states(events, self.n_threads)

    def at(self, step: int, block: int = 0) -> State:
        """Return a block's state after `step + 1` of its events; a negative step counts from the end.

        Raises:
            IndexError: the block has fewer events. KeyError: it has none.
        """
        count = sum(e.block == block for e in self.events)
        wanted = step + count if step < 0 else step
        for number, state in enumerate(self.states(block)):
            if number == wanted:
                return state
        raise IndexError(f"block {block} has {count} events; got step {step}")

    def lines(self) -> dict[tuple[str, int], str]:
        """Return the source's lines by (file, line)."""
        return source.line_table(self.code, SOURCE_NAME)

    def stepper(self, block: int = 0, *, at: int | None = None, first: int = 0, steps: int = 400) -> Any:
        """Show a block step by step, forwards and backwards: mbarriers, warps, and the lines that they execute.

        Args:
            block: its number. at: the step shown first, and the only one if scripts do not run; negative ones count
                from the end; None is the last one of a block that hangs, else the middle. first, steps: the range of
                the block's events to show.
        """
        return hooks.drawings("moving.launch").moving_launch(self, block, at=at, first=first, steps=steps)

    # ------------------------------------------------------------------------------------ for Perfetto

    def save(self, path: str | Path) -> None:
        """Write the trace in Chrome's trace event format, which chrome://tracing and ui.perfetto.dev read.

        A process is a block, a thread a warp. Waits are slices; copies are asynchronous slices from issue to arrival,
        with an arrow to the wait that they end. A microsecond is one event.
        """
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Return what `save` writes."""
        written: list[dict[str, Any]] = []
        for block in self.blocks():
            written += _block_for_perfetto(self.kernel, [e for e in self.events if e.block == block])
        return {
            "traceEvents": written,
            "displayTimeUnit": "ns",
            "otherData": {"kernel": self.kernel, "note": self.note},
        }


def _block_for_perfetto(kernel: str, events: list[TraceEvent]) -> list[dict[str, Any]]:
    """Return one block's events in Chrome's format."""
    block = events[0].block
    warps = sorted({e.warp for e in events if e.warp is not None})
    written: list[dict[str, Any]] = [_named("process", block, 0, f"{kernel}, block {block} (order, not time)")]
    written += [_named("thread", block, warp + 1, f"warp {warp}") for warp in warps]
    written.append(_named("thread", block, 0, "phases"))
    waits: dict[int, TraceEvent] = {}
    flying: dict[tuple[str, int | None, tuple[str, int] | None], list[TraceEvent]] = {}
    landed: dict[tuple[str, int | None], list[TraceEvent]] = {}  # by mbarrier and phase: the beginnings of its copies
    last = events[-1].order
    for e in events:
        where = {"pid": block, "tid": 0 if e.warp is None else e.warp + 1}
        about = {"line": e.place[1] if e.place else None, "lanes": f"0x{e.lanes:08x}", "phase": e.phase}
        key = (e.barrier, e.warp, e.place)
        if e.kind in ENDS:
            if e.warp is not None and e.warp not in waits:  # try_wait may return, and be called again
                waits[e.warp] = e
        elif e.kind in ENDS.values() and e.warp is not None and (begin := waits.pop(e.warp, None)):
            written.append(_slice(begin, e.order, {**where, "args": about}))
            for number in landed.get((e.barrier, e.phase), []):
                arrow = {"name": "copy", "cat": "copy", "id": f"{number.order}-{e.warp}"}
                track = 0 if number.warp is None else number.warp + 1
                start = {"pid": block, "tid": track, "ts": number.order}
                written += [
                    {**arrow, "ph": "s", **start},
                    {**arrow, "ph": "f", "bp": "e", **where, "ts": e.order - 0.5},
                ]
        elif e.kind == "landed":
            begin = flying[key].pop(0) if flying.get(key) else e
            landed.setdefault((e.barrier, e.phase), []).append(begin)
            name = {"name": f"copy of {e.value:,} bytes to {e.barrier}", "cat": "copy", "id": begin.order, **where}
            written += [{**name, "ph": "b", "ts": begin.order}, {**name, "ph": "e", "ts": e.order, "args": about}]
        else:
            if e.kind == "load":
                flying.setdefault(key, []).append(e)
            # A slice of half an event, for an arrow to begin at.
            written.append(
                {"name": e.what, "cat": e.kind, "ph": "X", "ts": e.order, "dur": 0.5, **where, "args": about}
            )
    for begin in waits.values():
        where = {"pid": block, "tid": (begin.warp or 0) + 1, "args": {"never ends": True}}
        written.append(_slice(begin, last + 1, where))
    return written


def _slice(begin: TraceEvent, end: float, where: dict[str, Any]) -> dict[str, Any]:
    name = begin.what.removeprefix("waits ")
    return {"name": f"waits {name}", "cat": "wait", "ph": "X", "ts": begin.order, "dur": end - begin.order, **where}


def _named(what: str, block: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": block, "tid": thread, "args": {"name": name}}
