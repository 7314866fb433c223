"""The picture of a block on Hopper: its roles over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from helpers.draw.picture import GPU, LINES, WRITE, Picture, figure, styled
from helpers.draw.spans import COLOURS


@styled
def roles(timeline: Mapping[str, Any], first: int, last: int) -> Picture:
    """Draw a block's producer and consumers over key tiles `first` to `last`, and the barriers between them.

    Args:
        timeline: as `helpers.bench.studies.hopper` records it; see `clocks_as_spans`.
    """
    consumers, stages, asked, full = (timeline[name] for name in ("consumers", "stages", "asked", "full"))
    zero, stop = min(steps[first][0] for steps in consumers), max(steps[last][-1] for steps in consumers)
    names = ["producer: copies", *(f"consumer {i + 1}: {part}" for i in range(len(consumers)) for part in PARTS)]
    fig, ax = figure(9.0, 1.2 + 0.42 * len(names))

    def bar(y: float, begin: float, end: float, what: str, height: float = 0.62, label: str = "") -> None:
        begin, end = max(begin, zero) - zero, min(end, stop) - zero
        if end > begin:
            ax.barh(y, end - begin, left=begin, height=height, color=COLOURS[what], edgecolor="white", linewidth=0.6)
            ax.text((begin + end) / 2, y, label, ha="center", va="center", fontsize=8)

    def arrow(begin: tuple[float, float], end: tuple[float, float], label: str, colour: str) -> None:
        (x0, y0), (x1, y1) = begin, end
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (x1 - zero, y1), (x0 - zero, y0), arrowprops=style)
        if label:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            x, y = (x0 + x1) / 2 - zero, (y0 + y1) / 2
            ax.text(x, y, label, color=colour, fontsize=9, ha="center", va="center", bbox=box)

    for i, which in enumerate("KV"):
        for tile in range(max(first - stages, 0), min(last + stages, len(asked[0]) - 1) + 1):
            bar(0, asked[i][tile], full[i][tile], "copy in flight", label=which)
    for number, steps in enumerate(consumers):
        y = 1 + 2 * number
        for step in steps[first - 1 : last + 2]:
            bar(y - 0.16, step[1], step[3], "S in flight", height=0.3)
            bar(y + 0.16, step[1], step[5], "O in flight", height=0.3)
            bar(y + 1, step[3], step[4], "weights")
            bar(y + 1, step[5], step[6], "weights")
    # `full` releases all consumers. All of them arrive at `empty`; the arrow starts at the last one.
    arrow((full[0][first + 1], 0.31), (consumers[0][first + 1][1], 0.67), "full", GPU)
    slowest = max(range(len(consumers)), key=lambda number: consumers[number][last][3])
    arrow((consumers[slowest][last][3], 0.68 + 2 * slowest), (asked[0][last + stages], 0.31), "empty", WRITE)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, stop - zero), xlabel="cycles")
    handles = [Patch(color=COLOURS[name], label=name) for name in ("copy in flight", "S in flight", "O in flight")]
    fig.legend(handles=[*handles, Patch(color=LINES[2], label="weights")], loc="outside lower center", ncols=4)
    steps_shown = f"key tiles {first} to {last}"
    return Picture(fig, f"who does what in a block over {steps_shown}, in cycles: {', '.join(names)}")


PARTS = ("products", "weights")
