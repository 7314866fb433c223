"""The picture of which lines a block's threads executed between its barriers: the X-ray's `Report.timeline`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from helpers.draw.picture import IDLE, LINES, READ, WRITE, Picture, figure, styled
from helpers.engine.steps import Step

WARP = 32
COLOURS = {
    "read global": READ,
    "write global": WRITE,
    "read shared": LINES[2],
    "write shared": LINES[3],
    "atomic": LINES[4],
    "wait": IDLE,
}


def _runs(threads: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighbouring threads into (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for thread in threads:
        if runs and runs[-1][1] == thread:
            runs[-1] = runs[-1][0], thread + 1
        else:
            runs.append((thread, thread + 1))
    return runs


def _warp_rows(steps: Sequence[Step], warp: int, length: float) -> tuple[list[tuple[Step, float]], float]:
    """Place the steps of one warp in an interval from 0 to 1: where each begins, and where the last ends."""
    at, placed = 0.0, []
    for step in steps:
        if step.warp == warp:
            placed.append((step, at / length))
            at += step.width
    return placed, at / length


@styled
def picture(name: str, block: tuple[int, int, int], n_threads: int, steps: Sequence[Step], skipped: int) -> Picture:
    """Draw the steps: threads from top to bottom, intervals between barriers from left to right.

    Args:
        name: of the kernel. skipped: later intervals of the block that are not drawn.
    """
    intervals = sorted({step.interval for step in steps})
    n_warps = -(-n_threads // WARP)
    fig, ax = figure(min(max(4.5, 1.6 + 1.5 * len(intervals)), 10.5), min(1.6 + 0.75 * n_warps, 6.5))
    boxes: dict[str, list[list[tuple[float, float]]]] = {what: [] for what in COLOURS}
    barriers: list[int | None] = []
    for x, interval in enumerate(intervals):
        mine = [step for step in steps if step.interval == interval]
        length = max(sum(s.width for s in mine if s.warp == warp) for warp in range(n_warps))
        barriers.append(mine[0].barrier)
        labels: list[tuple[int, float]] = []
        for warp in range(n_warps):
            first, last = warp * WARP, min((warp + 1) * WARP, n_threads)
            placed, end = _warp_rows(mine, warp, length)
            for step, at in placed:
                left, right = x + at, x + at + step.width / length
                for top, bottom in _runs(step.threads):
                    boxes[step.what].append([(left, top), (right, top), (right, bottom), (left, bottom)])
                here = (step.line, round(at, 6))  # a warp with the same steps as the one above it needs no labels
                if right - left > 0.11 and (here not in labels or len(step.threads) < last - first):
                    middle = (step.threads[0] + step.threads[-1] + 1) / 2
                    dark = step.what in ("read global", "write global", "read shared")
                    ax.text((left + right) / 2, middle, str(step.line), ha="center", va="center", fontsize=7,
                            color="white" if dark else "black", clip_on=True)  # fmt: skip
                labels.append(here)
            if mine[0].barrier is not None and end < 1 - 1e-9:
                boxes["wait"].append([(x + end, first), (x + 1, first), (x + 1, last), (x + end, last)])
    for what, corners in boxes.items():
        ax.add_collection(PolyCollection(corners, facecolors=COLOURS[what], edgecolors="white", linewidths=0.4))
    for x, line in enumerate(barriers, start=1):
        if line is not None:
            ax.axvline(x, color="#222222", linewidth=1.6)
    for warp in range(1, n_warps):
        ax.axhline(warp * WARP, color="white", linewidth=1.5)
    ends = [(x, f"barrier\n{line}") for x, line in enumerate(barriers, start=1) if line is not None]
    ax.set_xticks([x for x, _ in ends], [text for _, text in ends], fontsize=8)
    ticks = list(range(0, n_threads, WARP * max(1, n_warps // 8))) if n_warps > 1 else list(range(0, n_threads, 8))
    ax.set_yticks(ticks, [str(t) for t in ticks])
    ax.set(xlim=(0, len(intervals)), ylim=(n_threads, 0), ylabel="thread", xlabel="order, not time; numbers are lines")
    more = f"; {skipped:,} more phases not drawn" if skipped else ""
    ax.set_title(f"{name}, block ({', '.join(map(str, block))}){more}")
    handles = [Patch(color=COLOURS[what], label=what) for what, corners in boxes.items() if corners]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return Picture(fig, _sentence(name, block, n_threads, steps, intervals, more))


def _sentence(
    name: str,
    block: tuple[int, int, int],
    n_threads: int,
    steps: Sequence[Step],
    intervals: Sequence[int],
    more: str,
) -> str:
    parts = []
    for interval in intervals:
        mine = [step for step in steps if step.interval == interval]
        lines = sorted({step.line for step in mine})
        text = f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
        if mine[0].barrier is not None:
            text += f" before the barrier of line {mine[0].barrier}"
        warps = {step.warp for step in mine}
        totals = {w: sum(s.count for s in mine if s.warp == w) for w in warps | set(range(-(-n_threads // WARP)))}
        if len(set(totals.values())) > 1:
            late = max(totals, key=lambda w: (totals[w], -w))
            text += f" (warp {late} is the last)"
        parts.append(text)
    return f"timeline of {name}, block {block}, {n_threads} threads: {'; '.join(parts)}{more}"
