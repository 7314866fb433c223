"""Pictures of ring attention: whose K and V each rank holds in each step, and which scores it computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from helpers.attention import reference
from helpers.attention.ring_schedules import Step, positions, steps
from helpers.draw.picture import IDLE, LINES, Picture, figure, styled
from helpers.draw.spans import Place


def bars(plan: Sequence[Step], whole: float) -> list[Place]:
    """Make a row for each rank, for show.schedules: a step begins when all ranks have finished the previous one.

    Args:
        plan: from ring_schedules.steps. whole: (query, key) pairs computed in one unit of time.
    """
    places: list[Place] = []
    now = 0.0
    for step in plan:
        work = [sum(product.pairs for product in products) / whole for products in step.products]
        for rank, (source, length) in enumerate(zip(step.sources, work, strict=True)):
            whose, colour = ("all", 5) if source is None else (str(source), source % 6)
            if length:
                places.append((rank, now, now + length, colour, f"K, V of {whose}"))
        now += max(work)
    return places


def maps(schedule: str, size: int, rows: int, *, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Map each (query, key), in the sequence's order, to the rank that computes it and to its step; -1 if masked."""
    n = size * rows
    ranks, numbers = np.full((n, n), -1), np.full((n, n), -1)
    where = [positions(schedule, size, rank, rows) for rank in range(size)]
    for number, step in enumerate(steps(schedule, size, causal=causal, rows=rows)):
        for rank, (source, products) in enumerate(zip(step.sources, step.products, strict=True)):
            at_hand = np.arange(n) if source is None else where[source]
            for product in products:
                queries, keys = where[rank][slice(*product.rows)], at_hand[slice(*product.keys)]
                seen = reference.visible(len(queries), len(keys), causal=product.causal)
                at = np.ix_(queries, keys)
                ranks[at] = np.where(seen, rank, ranks[at])
                numbers[at] = np.where(seen, number, numbers[at])
    return ranks, numbers


@styled
def work(schedules: Sequence[str], size: int) -> Picture:
    """Draw the causal score matrix under each schedule: a colour for each rank, the step's number in each block."""
    rows = 24
    fig, axes = figure(3.5 * len(schedules), 3.6, columns=len(schedules))
    colours = ListedColormap([IDLE, *LINES[:size]])
    for ax, schedule in zip(np.atleast_1d(axes), schedules, strict=True):
        ranks, numbers = maps(schedule, size, rows)
        ax.imshow(ranks, cmap=colours, vmin=-1, vmax=size - 1, alpha=0.6, interpolation="nearest")
        each = rows if schedule == "ring" else rows // 2
        for edge in range(each, size * rows, each):
            ax.axhline(edge - 0.5, color="white", linewidth=1)
            ax.axvline(edge - 0.5, color="white", linewidth=1)
        for query in range(0, size * rows, each):
            for key in range(0, query + 1, each):
                shift = each / 6 if query == key else 0  # only half of a diagonal block is visible
                at = key + each / 2 - shift, query + each / 2 + shift
                ax.text(*at, str(numbers[query + each - 1, key]), ha="center", va="center", fontsize=8)
        ax.set(title=schedule, xlabel="key", xticks=[], yticks=[])
    np.atleast_1d(axes)[0].set_ylabel("query")
    handles = [Patch(color=LINES[rank], alpha=0.6, label=f"rank {rank}") for rank in range(size)]
    fig.legend(handles=handles, loc="outside lower center", ncols=size, fontsize=8)
    return Picture(fig, f"the causal score matrix, by rank and step of {size} ranks: {', '.join(schedules)}")
