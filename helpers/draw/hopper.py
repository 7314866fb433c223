"""Pictures of Hopper's pieces: the roles of a block over time, the two strides of a descriptor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch, Rectangle

from helpers.draw.picture import GPU, LINES, MOVED, ROOF, WRITE, Picture, figure, styled
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
    # `full` releases all consumers; all of them arrive at `empty`, and the last one is drawn.
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


@styled
def descriptor_panels(begin: int, leading: int, stride: int, rows: int, columns: int) -> Picture:
    """Draw V as an operand of wgmma: 16 rows of each panel of 64 columns, and its descriptor's two strides as arrows.

    Args:
        begin, leading, stride: of the descriptor, in bytes: the address, the leading and the stride byte offset.
        rows, columns: of the tile in shared memory.
    """
    panels = columns // 64
    fig, ax = figure(9.0, 3.9)
    width, gap = 7.0, 4.4
    for panel in range(panels):
        x, at = panel * (width + gap), begin + panel * leading
        ax.add_patch(Rectangle((x, 16), width, 3.4, facecolor="#F4F4F4", edgecolor="#BBBBBB"))
        ax.text(x + width / 2, 17.7, f"keys 16 to {rows - 1}", ha="center", va="center", fontsize=8, color="#666666")
        for row in range(16):
            colour = MOVED if row < 8 else "#D6EBF8"
            ax.add_patch(Rectangle((x, row), width, 1, facecolor=colour, edgecolor="white"))
            address = at + row // 8 * stride + row % 8 * 128
            if row in (0, 1, 7, 8, 15):
                ax.text(x + 0.15, row + 0.5, f"{address:,}", va="center", fontsize=7)
        ax.text(x + width / 2, -0.5, f"columns {64 * panel} to {64 * panel + 63}", ha="center", fontsize=9)
    style = {"arrowstyle": "-|>", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (width + gap, 0.5), (2.2, 0.5), arrowprops={**style, "color": WRITE})
    words = f"leading byte offset\n{leading:,}:\nthe next 64 columns"
    ax.text(width + gap / 2, 1.2, words, ha="center", va="top", fontsize=8, color=WRITE)
    ax.annotate("", (-0.5, 8.5), (-0.5, 0.5), arrowprops={**style, "color": GPU})
    ax.text(
        -0.8, 4.5, f"stride byte offset\n{stride:,}:\nthe next 8 keys", ha="right", va="center", fontsize=8, color=GPU
    )
    right = panels * (width + gap) - gap
    ax.annotate("", (right + 0.4, 16.5), (right + 0.4, 0.5), arrowprops={**style, "color": ROOF, "ls": "--"})
    further = 2 * stride
    words = f"the next instruction:\n16 keys, {further:,} bytes:\n+ {further // 16} in the descriptor"
    ax.text(right + 0.7, 8.5, words, va="center", fontsize=8, color=ROOF)
    ax.set(xlim=(-4.6, right + 5.6), ylim=(19.6, -1.3), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    distances = f"the next 8 keys are {stride:,} bytes further, the next 64 columns {leading:,}"
    return Picture(fig, f"16 keys of V in {panels} panels from byte {begin:,} on: {distances}")
