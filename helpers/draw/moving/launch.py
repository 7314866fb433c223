"""A launch step by step: its mbarriers, its warps and the source lines that they execute, from an X-ray's trace."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from helpers.draw.moving.figure import Moving
from helpers.engine.tracing import CUT, NO_TIME, Mbarrier, State, TraceEvent, Warp

PLAIN, FLYING, FULL, WAITS, STUCK, NOW = range(6)  # what a cell's colour says
COLOURS = ("", "rgba(86,180,233,0.35)", "rgba(0,158,115,0.35)", "rgba(128,128,128,0.25)", "rgba(213,94,0,0.45)",
           "rgba(230,159,0,0.35)")  # fmt: skip
LEFT = "text-align:left;padding:0 0.7em 0 0.2em"
NEAR = 3  # shorter gaps between the lines shown are filled


class Traced(Protocol):
    """The trace to show, such as the X-ray's `Trace`."""

    @property
    def kernel(self) -> str: ...
    @property
    def events(self) -> Sequence[TraceEvent]: ...
    @property
    def is_cut(self) -> bool: ...
    def states(self, block: int) -> Iterator[State]: ...
    def lines(self) -> dict[Line, str]: ...


Cell = tuple[str, int]  # text and colour
Line = tuple[str, int]  # file and number


def moving_launch(trace: Traced, block: int = 0, *, at: int | None = None, first: int = 0, steps: int = 400) -> Moving:
    """Show a block of a traced launch step by step; the arguments are those of `Trace.stepper`.

    Raises:
        KeyError: the block has no events. IndexError: none of its events is among the steps.
    """
    events = [e for e in trace.events if e.block == block]
    shown = range(first, min(first + steps, len(events)))
    if events and not shown:
        raise IndexError(f"block {block} has {len(events)} events; got first={first}")
    if at is None:
        hangs = bool(events) and events[-1].kind == "block ends" and events[-1].value > 0
        at = -1 if hangs else len(events) // 2
    chosen = at + len(events) if at < 0 else at
    chosen = min(max(chosen, shown.start), shown.stop - 1) - shown.start if shown else 0
    names = list(dict.fromkeys(e.barrier for e in events if e.kind == "init"))
    warps = sorted({e.warp for e in events if e.warp is not None and e.kind != "exit"})
    places = list(dict.fromkeys(e.place for e in events if e.place))
    table = trace.lines()
    lines = _with_gaps(sorted(place for place in places if place in table), table)
    texts: dict[Cell, int] = {("", PLAIN): 0}
    before = [0] * (len(names) * 5 + len(warps) * 2 + sum(line is not None for line in lines))
    changes, sentences, frame = [], [], before
    for number, state in enumerate(trace.states(block)):
        if number not in shown:
            continue
        cells = _cells(state, names, warps, lines)
        now = [texts.setdefault(cell, len(texts)) for cell in cells]
        changes.append([x for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b for x in (i, b)])
        sentences.append(texts.setdefault((str(state.event), PLAIN), len(texts)))
        before = now
        if number - shown.start == chosen:
            frame = now
    walks = [("the block", list(range(len(shown))))]
    for warp in warps:
        walks.append((f"warp {warp}", [i for i, number in enumerate(shown) if events[number].warp == warp]))
    by_number = list(texts)
    data = {
        "texts": by_number,
        "steps": changes,
        "sentences": sentences,
        "walks": [walk for walk in walks if walk[1]],
        "colours": COLOURS,
        "first": chosen,
        "from": shown.start,
    }
    words = iter([by_number[i] for i in frame])
    body = "\n".join(_frame(words, names, warps, lines, table))
    sentence = by_number[sentences[chosen]][0]
    note = NO_TIME + (f" Steps {shown.start} to {shown.stop - 1} of {len(events)}." if len(shown) < len(events) else "")
    note += f" {CUT}" if trace.is_cut else ""
    text = f"{len(shown)} steps of {trace.kernel}, block {block}; step {chosen + shown.start}: {sentence}"
    return Moving("launch", f'<p class="part">{_escape(sentence)}</p>\n{body}\n<p>{note}</p>', data, text)


def _with_gaps(lines: list[Line], table: dict[Line, str]) -> list[Line | None]:
    """Fill short gaps between the shown lines of a file; None marks a longer gap."""
    filled: list[Line | None] = []
    for line in lines:
        last = filled[-1] if filled else None
        if last is not None:
            near = last[0] == line[0] and line[1] - last[1] <= NEAR
            gap = [(line[0], n) for n in range(last[1] + 1, line[1])]
            filled += [one for one in gap if one in table] if near else [None]
        filled.append(line)
    return filled


def _cells(state: State, names: list[str], warps: list[int], lines: list[Line | None]) -> list[Cell]:
    """Return the text and the colour of each cell, in the order of the frame."""
    cells: list[Cell] = []
    for name in names:
        cells += _of_mbarrier(state, state.mbarriers.get(name))
    for warp in warps:
        cells += _of_warp(state, state.warps[warp], is_now=state.event.warp == warp)
    for line in lines:
        if line is not None:
            here = [warp for warp in warps if state.warps[warp].place == line and state.warps[warp].alive]
            is_now = state.event.place == line and state.event.kind != "landed"
            cells.append((", ".join(map(str, here)), NOW if is_now else PLAIN))
    return cells


def _of_mbarrier(state: State, one: Mbarrier | None) -> list[Cell]:
    """Return an mbarrier's cells: its tile, its phase, arrivals, bytes, and waiting warps."""
    if one is None:
        return [("", PLAIN)] * 5
    tile: Cell = ("", PLAIN)
    empty = state.mbarriers.get(one.name.replace("full", "empty"))
    if empty is not None and empty is not one:  # a stage of a ring, named after its two mbarriers
        is_full = one.phase > empty.phase
        tile = ("full", FULL) if is_full else ("copy in flight", FLYING) if one.flying else ("no tile", PLAIN)
    come = f"{one.expected - one.arrivals} of {one.expected}"
    size = f"{one.announced:,} missing" if one.announced else ""
    size += f"{', ' * bool(size)}{one.flying:,} in flight" if one.flying else ""
    waiting = ", ".join(f"warp {warp}" for warp in sorted(one.waiting))
    is_now = state.event.barrier == one.name
    return [
        tile,
        (f"{one.phase}, parity {one.phase % 2}", NOW if is_now else PLAIN),
        (come, PLAIN),
        (size, FLYING if one.flying else PLAIN),
        (waiting, STUCK if waiting and state.is_stuck else WAITS if waiting else PLAIN),
    ]


def _of_warp(state: State, warp: Warp, *, is_now: bool) -> list[Cell]:
    line = str(warp.place[1]) if warp.place and warp.alive else ""
    if not warp.waits:
        return [(line, NOW if is_now else PLAIN), (warp.doing, PLAIN)]
    words = f"waits for {warp.waits}{' forever' if state.is_stuck else ''}"
    return [(line, NOW if is_now else PLAIN), (words, STUCK if state.is_stuck else WAITS)]


def _frame(
    words: Iterator[Cell], names: list[str], warps: list[int], lines: list[Line | None], table: dict[Line, str]
) -> Iterator[str]:
    """Write the tables; their cells take their texts from `words`."""

    def cells(count: int) -> str:
        return "".join(_td(*next(words)) for _ in range(count))

    if names:
        heads = ("mbarrier", "tile", "phase", "arrivals", "bytes", "waiting")
        yield _table(heads, "".join(f"<tr>{_th(name)}{cells(5)}</tr>" for name in names))
    yield _table(("", "line", "what it does"), "".join(f"<tr>{_th(f'warp {warp}')}{cells(2)}</tr>" for warp in warps))
    listing = ""
    for line in lines:
        if line is None:
            listing += f"<tr>{_td('')}{_td('')}{_td('⋯')}</tr>"
            continue
        code = f'<code style="white-space:pre;background:none">{_escape(table[line])}</code>'
        listing += f'<tr>{cells(1)}{_td(str(line[1]))}<td style="{LEFT}">{code}</td></tr>'
    if listing:
        yield _table(("warps", "line", ""), listing)


def _table(heads: Iterable[str], rows: str) -> str:
    style = "display:block;margin:0 0 0.6em;overflow-x:auto;white-space:nowrap;border-collapse:collapse"
    style += ";font-size:0.85em;color:inherit"
    return f'<table class="part" style="{style}"><tr>{"".join(map(_th, heads))}</tr>{rows}</table>'


def _th(text: str) -> str:
    return f'<th style="{LEFT}">{_escape(text)}</th>'


def _td(text: str, colour: int | None = None) -> str:
    """Write a cell; the script updates coloured ones."""
    if colour is None:
        return f'<td style="{LEFT}">{_escape(text)}</td>'
    style = LEFT + (f";background:{COLOURS[colour]}" if COLOURS[colour] else "")
    return f'<td class="cell" style="{style}">{_escape(text)}</td>'


def _escape(text: str) -> str:
    """Escape for HTML, and also the $ that begins a formula in JupyterLab."""
    return html.escape(text).replace("$", "&#36;")
