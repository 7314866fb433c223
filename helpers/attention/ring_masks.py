"""Masks of a ring as plain data: each rank's part of a sequence that is packed, has a window, or is cut unevenly.

Rows and keys of a rank are chunks of the sequence. A chunk of rows and one of keys have at most one sequence in common,
unless they are the same chunk, so most pairs of them are one rectangle under a shifted mask. Sequences that are
adjacent in rows and keys become one packed launch.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

Span = tuple[int, int]  # the first, and one past the last


class Piece(NamedTuple):
    """Some rows of a rank's Q times keys of the K and V at hand: one launch.

    window: (left, right) around the diagonal that ends at the last row and the last key, -1 for unlimited; of packed
    sequences, each has its own diagonal. cu_seqlens: of packed sequences, those of the rows and of the keys.
    """

    rows: Span
    keys: Span
    window: Span = (-1, -1)
    cu_seqlens: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class MaskedStep(NamedTuple):
    """A step of all ranks, as `ring.Step`."""

    sources: tuple[int | None, ...]
    products: tuple[tuple[Piece, ...], ...]


def chunk_numbers(schedule: str, size: int, rank: int) -> tuple[tuple[int, ...], int]:
    """Return which chunks of the sequence a rank has, and how many there are."""
    return ((rank,), size) if schedule == "ring" else ((rank, 2 * size - 1 - rank), 2 * size)


def spans(schedule: str, size: int, rank: int, tokens: int) -> list[Span]:
    """Return the chunks of a rank in a sequence of this many tokens. Lengths of chunks differ by at most 1."""
    numbers, count = chunk_numbers(schedule, size, rank)
    return [(number * tokens // count, (number + 1) * tokens // count) for number in numbers]


def rows_of(schedule: str, size: int, tokens: int) -> tuple[int, ...]:
    """Return the number of rows of each rank."""
    return tuple(sum(b - a for a, b in spans(schedule, size, rank, tokens)) for rank in range(size))


@functools.lru_cache(maxsize=256)
def masked_steps(
    schedule: str, size: int, tokens: int, left: int, right: int, cu_seqlens: tuple[int, ...], batch: int = 1
) -> tuple[MaskedStep, ...]:
    """Return what each rank computes in each step; no step after the last in which a rank computes.

    Args:
        left, right: how many keys before and after a row it sees, -1 for unlimited. cu_seqlens: 0, then the end of each
            sequence. batch: only of 1 can rectangles be packed into one launch.
    """
    of = [spans(schedule, size, rank, tokens) for rank in range(size)]
    if schedule == "all_gather":
        whole = tuple(_pieces(rows, [(0, tokens)], left, right, cu_seqlens, batch) for rows in of)
        return (MaskedStep((None,) * size, whole),)
    made = []
    for step in range(size):
        sources = tuple((rank - step) % size for rank in range(size))
        pieces = tuple(
            _pieces(of[rank], of[source], left, right, cu_seqlens, batch) for rank, source in enumerate(sources)
        )
        made.append(MaskedStep(sources, pieces))
    while len(made) > 1 and not any(made[-1].products):
        made.pop()
    return tuple(made)


class _Rectangle(NamedTuple):
    """Rows and keys of one sequence, as a piece; is_cut: whether left, and right, hides any of these keys."""

    rows: Span
    keys: Span
    window: Span
    is_cut: tuple[bool, bool]


def _pieces(
    row_spans: Sequence[Span], key_spans: Sequence[Span], left: int, right: int, cu_seqlens: tuple[int, ...], batch: int
) -> tuple[Piece, ...]:
    if left == right == -1 and len(cu_seqlens) == 2:
        rows, keys = (sum(b - a for a, b in each) for each in (row_spans, key_spans))
        return (Piece((0, rows), (0, keys)),) if rows and keys else ()
    groups: list[list[_Rectangle]] = []
    rectangles = [*_rectangles(row_spans, key_spans, left, right, cu_seqlens)]
    if row_spans == key_spans:
        rectangles.sort(key=lambda each: each.keys != each.rows)  # those on the diagonal are adjacent
    for each in rectangles:
        last = groups[-1][-1] if groups and batch == 1 else None
        if last and each.window == last.window and each.rows[0] == last.rows[1] and each.keys[0] == last.keys[1]:
            groups[-1].append(each)
        else:
            groups.append([each])
    return tuple(map(_joined, groups))


def _rectangles(
    row_spans: Sequence[Span], key_spans: Sequence[Span], left: int, right: int, cu_seqlens: tuple[int, ...]
) -> Iterator[_Rectangle]:
    """Yield each sequence's rows and keys in these spans, without rows that see no key and keys that no row sees."""
    row_base = 0
    for row_span in row_spans:
        key_base = 0
        for key_span in key_spans:
            begin = max(bisect_right(cu_seqlens, span[0]) for span in (row_span, key_span)) - 1
            stop = min(bisect_left(cu_seqlens, span[1]) for span in (row_span, key_span))
            for first, end in pairwise(cu_seqlens[begin : stop + 1]):
                a, b, c, d = (
                    max(first, row_span[0]),
                    min(end, row_span[1]),
                    max(first, key_span[0]),
                    min(end, key_span[1]),
                )
                if a >= b or c >= d:
                    continue
                if right >= 0:
                    a = max(a, c - right)
                if left >= 0:
                    b = min(b, d + left)
                if a >= b:
                    continue
                if right >= 0:
                    d = min(d, b + right)
                if left >= 0:
                    c = max(c, a - left)
                window = left + d - b if left >= 0 else -1, right + b - d if right >= 0 else -1
                yield _Rectangle(
                    (a - row_span[0] + row_base, b - row_span[0] + row_base),
                    (c - key_span[0] + key_base, d - key_span[0] + key_base),
                    window,
                    (left >= 0 and b - 1 - left > c, right >= 0 and a + right < d - 1),
                )
            key_base += key_span[1] - key_span[0]
        row_base += row_span[1] - row_span[0]


def _joined(group: Sequence[_Rectangle]) -> Piece:
    """Make one launch of rectangles that are consecutive in rows and in keys, and have the same window."""
    cut = [any(each.is_cut[side] for each in group) for side in (0, 1)]
    window = tuple(size if is_cut else -1 for size, is_cut in zip(group[0].window, cut, strict=True))
    rows, keys = ((getattr(group[0], of)[0], getattr(group[-1], of)[1]) for of in ("rows", "keys"))
    if len(group) == 1:
        return Piece(rows, keys, window)
    cu = tuple(
        tuple([0, *(getattr(each, of)[1] - span[0] for each in group)]) for of, span in (("rows", rows), ("keys", keys))
    )
    return Piece(rows, keys, window, cu)
