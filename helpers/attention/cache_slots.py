"""The rules for the lengths and the block table of a cache, checked on the host: a kernel breaks them silently."""

from __future__ import annotations

import numpy as np


def check_slots(
    lengths: np.ndarray,
    table: np.ndarray | None,
    *,
    rows: int,
    pages: int,
    tokens: int,
    appends: bool,
    window: tuple[int, int] = (-1, 0),
) -> None:
    """Refuse keys that do not fit, pages that do not exist, and page rows that two sequences write.

    Args:
        lengths: (batch,): keys of each sequence in the cache before the call.
        table: (batch, pages of a sequence): which page has keys i * rows to (i + 1) * rows - 1. None: no pages.
        rows: keys per page, or without a table those that a sequence has space for. pages: those of the cache.
        tokens: new ones of each sequence. appends: their keys are written, after the others.
        window: (left, right): how many keys before and after its own a token sees; -1 for no limit.

    Raises:
        ValueError: one of these, with its place in cache_seqlens or block_table.
    """
    before, new = lengths.astype(np.int64), tokens if appends else 0
    room = rows if table is None else rows * table.shape[1]
    for i in np.flatnonzero(before < 0)[:1]:
        raise ValueError(f"cache_seqlens[{i}] = {before[i]}; a sequence has 0 keys or more")
    for i in np.flatnonzero(before + new > room)[:1]:
        more = f" and {new} new" if new else ""
        raise ValueError(
            f"cache_seqlens[{i}] = {before[i]}{more}: more keys than the {room} that the cache has room for"
            + (", so that the last ones would be overwritten" if new else "")
        )
    if table is None or not tokens:
        return
    end = before + new
    begin = np.maximum(end - tokens - window[0], 0) if window[0] >= 0 else np.zeros_like(end)
    first = np.arange(table.shape[1]) * rows  # key of each page
    needed = (first < end[:, None]) & (first + rows > begin[:, None])
    for i, j in np.argwhere(needed & ((table < 0) | (table >= pages)))[:1]:
        raise ValueError(
            f"block_table[{i}, {j}] = {table[i, j]}, where keys of sequence {i} from {first[j]} on are; the cache has "
            f"{pages} pages"
        )
    if not new:
        return
    keys = before[:, None] + np.arange(new)
    page_of = np.take_along_axis(table, keys // rows, axis=1)
    uses = np.bincount(table[needed], minlength=pages)
    for i, t in np.argwhere(uses[page_of] > 1):
        page, row = page_of[i, t], keys[i, t] % rows
        for other, j in np.argwhere(needed & (table == page)):
            key = first[j] + row
            if begin[other] <= key < end[other] and (other, key) != (i, keys[i, t]):
                verb = "writes" if key >= before[other] else "reads"
                raise ValueError(
                    f"block_table: sequence {i} writes its key {keys[i, t]} into row {row} of page {page}, which "
                    f"sequence {other} {verb} as its key {key}: a page that is written belongs to one sequence"
                )
