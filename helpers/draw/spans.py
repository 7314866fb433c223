"""Draw when each role of a block does what: rows of spans from recorded cycle counts.

    spans(clocks_as_spans(timeline, 8, 12), xlabel="cycles")

A span is (begin, end, what); what is a key of `COLOURS`. A row is a buffer, or a part of a warpgroup's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from helpers.draw.picture import CPU, GPU, IDLE, LINES, MOVED, WRITE, Picture, figure, styled

Span = tuple[float, float, str]
COLOURS = {
    "copy in flight": MOVED,
    "full": GPU,
    "waits": IDLE,
    "starts products": LINES[5],
    "S in flight": CPU,
    "O in flight": WRITE,
    "weights": LINES[2],
}


@styled
def spans(rows: Mapping[str, Sequence[Span]], *, xlabel: str) -> Picture:
    """Draw rows of spans, the first row at the top."""
    fig, ax = figure(9.5, 0.9 + 0.3 * len(rows))
    used: list[str] = []
    for y, row in enumerate(rows.values()):
        for begin, end, what in row:
            ax.barh(y, end - begin, left=begin, height=0.72, color=COLOURS[what], edgecolor="white", linewidth=0.6)
            used += [what] if what not in used else []
    ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
    ends = [end for row in rows.values() for _, end, _ in row]
    begins = [begin for row in rows.values() for begin, _, _ in row]
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(min(begins), max(ends)), xlabel=xlabel)
    names = [name for name in COLOURS if name in used]
    handles = [Patch(color=COLOURS[name], label=name) for name in names]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    counts = "; ".join(f"{name}: {len(row)} spans" for name, row in rows.items())
    return Picture(fig, counts)


Place = tuple[int, float, float, int, str]


@styled
def schedules(orders: Mapping[str, Sequence[Place]], *, ylabel: str, xlabel: str, ends: bool = True) -> Picture:
    """Draw which blocks each multiprocessor runs and when, for one order of blocks above the other.

    Args:
        orders: {title: blocks}; a block is (multiprocessor, begin, end, its colour's number, what is written in it).
        ends: mark the end of the last block, with its time.
    """
    rows = 1 + max(place[0] for places in orders.values() for place in places)
    last = max(place[2] for places in orders.values() for place in places)
    fig, panels = figure(8.0, len(orders) * (0.55 + 0.26 * rows) + 0.4, rows=len(orders))
    for ax, (title, places) in zip(np.atleast_1d(panels), orders.items(), strict=True):
        for row, begin, end, colour, text in places:
            kind = {"color": LINES[colour], "alpha": 0.5, "edgecolor": "white", "linewidth": 1.5}
            ax.barh(row, end - begin, left=begin, height=0.9, **kind)
            ax.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=7)
        done = max(place[2] for place in places)
        if ends:
            ax.axvline(done, color=LINES[5], linestyle="--", linewidth=1)
        ax.set(
            title=f"{title}: done after {done:g}" if ends else title,
            ylabel=ylabel,
            ylim=(rows - 0.4, -0.6),
            xlim=(0, last * 1.01),
        )
        ax.set_yticks(range(rows))
        ax.spines[["top", "right", "left"]].set_visible(False)
    np.atleast_1d(panels)[-1].set_xlabel(xlabel)
    done = (f"{title}: done after {max(place[2] for place in places):g}" for title, places in orders.items())
    return Picture(fig, f"{len(next(iter(orders.values())))} blocks, {'; '.join(done)}")


def clocks_as_spans(timeline: Mapping[str, Any], first: int, last: int) -> dict[str, list[Span]]:
    """Turn recorded cycle counts of a block of hopper, key tiles `first` to `last`, into rows of spans in cycles.

    Args:
        timeline: as `helpers.bench.studies.hopper` records it. "consumers": for each consumer and key tile, the cycles
            at which its step began, its turn came, all products had been issued, S was ready, half of the weights were,
            O was ready, the step ended. "waits_for_v", which older records lack: when its wait for V began and ended,
            before the product PV was issued. "asked", "full": when the copies of K and V were started and had arrived.
    """
    consumers, stages = timeline["consumers"], timeline["stages"]
    rows: dict[str, list[Span]] = {f"{which}, stage {stage}": [] for which in "KV" for stage in range(stages)}
    zero, stop = min(consumer[first][0] for consumer in consumers), max(consumer[last][-1] for consumer in consumers)

    def add(row: str, begin: float, end: float, what: str) -> None:
        begin, end = max(begin, zero), min(end, stop)
        if end > begin:
            rows.setdefault(row, []).append((begin - zero, end - zero, what))

    for i, which in enumerate("KV"):
        for tile in range(max(first - stages, 0), min(last + stages, len(consumers[0]) - 1) + 1):
            row, asked, full = f"{which}, stage {tile % stages}", timeline["asked"][i][tile], timeline["full"][i][tile]
            add(row, asked, full, "copy in flight")
            read = tile + i  # a step reads the V that belongs to the previous step's K
            if read < len(consumers[0]):
                add(row, full, max(consumer[read][3 if which == "K" else 5] for consumer in consumers), "full")
    for number, consumer in enumerate(consumers, start=1):
        for tile, step in enumerate(consumer[first : last + 1], start=first):
            v = timeline["waits_for_v"][number - 1][tile] if "waits_for_v" in timeline else (step[1], step[1])
            add(f"consumer {number}: S", step[1], step[3], "S in flight")
            add(f"consumer {number}: O", v[1], step[5], "O in flight")
            marks = ("waits", "starts products", "waits", "starts products", "waits", "weights", "waits", "weights")
            clocks = (*step[:2], *v, *step[2:])
            for (begin, end), what in zip(pairwise(clocks), marks, strict=True):
                add(f"consumer {number}: warps", begin, end, what)
    work = [f"consumer {i + 1}: {part}" for i in range(len(consumers)) for part in ("S", "O", "warps")]
    return {name: rows[name] for name in [*sorted(name for name in rows if name not in work), *work]}
