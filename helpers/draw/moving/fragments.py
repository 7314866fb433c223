"""The elements of the matrices of mma.sync.m16n8k16 that each lane of a warp holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from helpers.draw.moving.figure import Moving, element, picture, rect
from helpers.draw.picture import CPU, GPU, WRITE

CELL = 10
# The product on top; below, two accumulators side by side and the next product's left operand: (title, x, y, columns,
# colour, whose places, how many of them).
MATRICES = (
    ("A, 16 × 16", 2, 26, 16, GPU, "a", 8),
    ("× B, 16 × 8", 184, 26, 8, CPU, "b", 4),
    ("= D, 16 × 8", 286, 26, 8, WRITE, "d", 4),
    ("S: two D, side by side", 2, 216, 16, WRITE, "d", 8),
    ("P: the next product's A", 206, 216, 16, GPU, "a", 8),
)


def moving_fragments(a: Any, b: Any, d: Any, *, lane: int = 5) -> Moving:
    """Show the elements of a selected lane, and that P's places are those of S.

    Args:
        a, b, d: as a kernel recorded them: [lane, i] is 16 * row + column of element i. a: (32, 8), the left operand;
            b: (32, 4), the right one; d: (32, 8), two accumulators that are side by side.
        lane: the one selected at first.
    """
    places = {name: np.asarray(of_lanes).astype(int).tolist() for name, of_lanes in (("a", a), ("b", b), ("d", d))}
    for (name, of_lanes), count in zip(places.items(), (8, 4, 8), strict=True):
        if [len(places_of) for places_of in of_lanes] != [count] * 32:
            raise ValueError(f"{name} is {np.shape(of_lanes)}: expected {count} places for each of 32 lanes")
    moved = int((np.asarray(places["a"]) != np.asarray(places["d"])).sum())
    data = {**places, "matrices": [matrix[1:] for matrix in MATRICES], "cell": CELL, "first": lane}
    alt = f"the elements that lane {lane} holds of A, B and D, numbered in the order of its registers"
    frame = f'<p class="part">{_sentence(places, lane)}</p>\n' + picture(370, 380, _parts(places, lane), alt)
    text = (
        f"the elements of A, B and D of mma.m16n8k16 in each lane: {_sentence(places, lane)} "
        f"Between S and P, {moved} of 256 elements change their lane or their place in it"
    )
    return Moving("fragments", frame, data, text)


def _sentence(places: dict[str, list[list[int]]], lane: int) -> str:
    """Describe a lane's elements in words, as the script does."""
    rows = sorted({place // 16 for place in places["d"][lane]})
    stay = sum(one == other for one, other in zip(places["a"][lane], places["d"][lane], strict=True))
    so = ": nothing is shuffled" if stay == 8 else ""
    return (
        f"lane {lane} has rows {' and '.join(map(str, rows))} of S. "
        f"Of the 8 elements of P that it needs, it holds {stay} in the right register{so}."
    )


def _parts(places: dict[str, list[list[int]]], lane: int) -> Iterator[str]:
    for title, x, y, columns, _, _, _ in MATRICES:
        yield element("text", title, x=x, y=y - 8)
        yield rect(x, y, CELL * columns, CELL * 16, fill="currentColor", opacity=0.07)
        lines = [f"M{x + CELL * i} {y}V{y + CELL * 16}" for i in range(0, columns + 1, 8)]
        lines += [f"M{x} {y + CELL * i}H{x + CELL * columns}" for i in (0, 8, 16)]
        yield element("path", d="".join(lines), stroke="currentColor", fill="none", opacity=0.5)
    yield element("text", "→", x=174, y=300, font_size=20)
    yield "<g class='cells'>"
    for _, x, y, _, colour, name, count in MATRICES:
        yield from _cells(places[name][lane][:count], x, y, colour)
    yield "</g>"


def _cells(places: Sequence[int], x: int, y: int, colour: str) -> Iterator[str]:
    for i, place in enumerate(places):
        left, top = x + CELL * (place % 16), y + CELL * (place // 16)
        yield rect(left, top, CELL, CELL, fill=colour)
        ink = "black" if colour == CPU else "white"
        yield element("text", str(i), x=left + CELL / 2, y=top + 8, text_anchor="middle", font_size=8, fill=ink)
