"""Graders of notebook 05."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "05_sliding_window",
    minutes=8,
    hints={
        "visited": (
            "Row i is at key i + N_kv - N. Which keys may it see, from there back to window_left keys before?",
            "The first of them is not before key 0, and the last is not after key N_kv - 1.",
            "begin = max(row_pos - window_left, 0) and end = min(row_pos + 1, N_kv), with row_pos = row + N_kv - N.",
        ),
        "nan": (
            "A row that sees no key has l_i = 0: 1 / 0 is infinite, and 0 times infinity is NaN.",
            "If l_i is 0, the factor is 0 and lse is NEG_INF.",
        ),
        "lse": "A row that sees no key has lse = minus infinity; any other one m_i + logf(l_i).",
        "crash": "Where a row is before the first key, or the window reaches beyond it, begin must still be 0 or more.",
        "": "visited, O and lse all follow from begin and end: for one row, write the keys down that it may see.",
    },
)
def sliding_window(trial: Trial) -> None:
    """More keys than rows, more rows than keys, a window of one key, one of all keys."""
    sizes = (33, 65, 8, 5), (130, 31, 8, 7), (64, 1, 8, 0), (63, 257, 8, 300), (1, 1, 8, 0)
    for n, n_kv, d, left in trial.sizes("N, N_kv, d, window_left", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        o, lse, visited = trial.empty(n, d), trial.empty(n), trial.empty(n, dtype=np.int32)
        numbers = n, n_kv, left, d**-0.5
        trial.launch("sliding_window", blocks(n, 64), 64, q, k, v, o, lse, visited, *numbers, HEAD_DIM=d, BLOCK_M=64)
        expected, expected_lse = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        seen = reference.visible(n, n_kv, window=(left, 0)).sum(axis=1)
        trial.expect("keys visited by each row", visited, seen, symptom="visited")
        trial.expect("O", o, expected)
        trial.expect("lse", lse, expected_lse, symptom="" if np.isnan(trial.xp.asnumpy(lse)).any() else "lse")


ROWS = 80  # and keys, at the first size of 05_causal_tiles


@exercise(
    "05_causal_tiles",
    minutes=8,
    hints={
        "future": (
            "A row's lse is too large: it includes keys that come after the row. Which key is the row's own?",
            "Row i is at key i + N_kv - N and sees keys up to and including that one.",
            "s = NEG_INF where first + j > row + N_kv - N.",
        ),
        "missing": (
            "Some row misses keys that it sees: they are hidden, or their tile is not read.",
            "A row sees its own key too, and end is one more than the last key that the block reads.",
            "The last row, first_row + BLOCK_M - 1, is at key last_pos: end = min(last_pos + 1, N_kv).",
        ),
        "tiles": (
            "The result is right, but some blocks read keys that none of their rows sees: see the count.",
            "Of all rows of a block, the last one sees the most keys. At which key is it?",
        ),
        "crash": "The last block may have fewer than BLOCK_M rows, and no key from N_kv on exists: limit end to N_kv.",
        "tail": (
            "Here N and N_kv differ, and the last row is at the last key: at which key is row 0?",
            "Row i is at key i + N_kv - N. Both holes need it: the block's last key, and the keys that a row sees.",
        ),
        "nan": "A block may have rows that see no key beside rows that do: m_i has to stay finite.",
        "": "For N = N_kv = 80 and blocks of 32 rows, write down the last key that each block needs.",
    },
)
def causal_tiles(trial: Trial) -> None:
    """As many keys as rows; more keys; more rows, so that rows and whole blocks see no key; one row."""
    block = 32
    needed = sum(min(first + block, ROWS) for first in range(0, ROWS, block))
    for n, n_kv, d in trial.sizes("N, N_kv, d", (ROWS, ROWS, 8), (33, 65, 8), (70, 20, 8), (1, 17, 8)):
        q, k, _ = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        trial.launch("causal_tiles", blocks(n, block), block, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d)
        _, expected = reference.attention(q, k, k, causal=True, return_lse=True)
        keys, symptom = trial.figures("K").read // (4 * d), ""
        if n == n_kv == ROWS and not np.isnan(off := trial.xp.asnumpy(lse) - expected).any():
            is_short = off.max() < 1e-4 or (trial.report is not None and keys < needed)
            symptom = "missing" if is_short else "future" if off.min() > -1e-4 else ""
        trial.expect("lse", lse, expected, symptom=symptom)
    if trial.report:
        trial.limit("keys read by 3 blocks", keys, at_most=needed, symptom="tiles")


HEADS_FIRST, ROWS_FIRST = "(heads, seq, d)", "(seq, heads, d)"


def _stored(a: np.ndarray, layout: str) -> np.ndarray:
    """An array (heads, rows, d) as a layout stores it."""
    return np.ascontiguousarray(a.swapaxes(0, 1)) if layout == ROWS_FIRST else a


def _strides(rows: int, heads: int, d: int, layout: str) -> tuple[int, int]:
    """The distances of two rows and of two heads, in elements."""
    return (heads * d, d) if layout == ROWS_FIRST else (d, rows * d)


@exercise(
    "05_group_of_heads",
    minutes=6,
    hints={
        "modulo": (
            "Each head reads head % kv_heads, so neighbouring heads of Q share no head of K. Should they?",
            "With 4 heads of Q and 2 of K, heads 0 and 1 read head 0. How many heads of Q share one?",
            "heads / kv_heads heads of Q share one head of K: kv_head = head / (heads / kv_heads).",
        ),
        "empty": "Part of O was never written: does q_at depend on the head, so that no two heads write the same rows?",
        "race": "Two blocks write the same element of O: does q_at depend on the head?",
        "tail": (
            "Right for one layout and one group, wrong for others. Is every distance taken from the strides?",
            "How many heads of Q share one head of K, if heads is 8 and kv_heads 4?",
        ),
        "": (
            "Row r of head h of Q begins at r * q_row_stride + h * q_head_stride.",
            "V has the strides of K, and O has those of Q.",
        ),
    },
)
def group_of_heads(trial: Trial) -> None:
    """Layouts with heads or rows first, groups of 2, of 3 and of one head."""
    sizes = (
        (20, 24, 4, 2, ROWS_FIRST, ROWS_FIRST),
        (33, 17, 8, 4, HEADS_FIRST, HEADS_FIRST),
        (9, 12, 6, 3, ROWS_FIRST, HEADS_FIRST),
        (5, 7, 3, 3, HEADS_FIRST, ROWS_FIRST),
    )
    d = 8
    for n, n_kv, heads, kv_heads, q_layout, kv_layout in trial.sizes("N, N_kv, heads, kv_heads, Q, K", *sizes):
        q = trial.rng.standard_normal((heads, n, d), dtype=np.float32) + np.float32(0.25)
        k, v = trial.rng.standard_normal((2, kv_heads, n_kv, d), dtype=np.float32) + np.float32(0.25)
        arrays = _stored(q, q_layout), _stored(k, kv_layout), _stored(v, kv_layout)
        o = trial.empty(*arrays[0].shape)
        strides = *_strides(n, heads, d, q_layout), *_strides(n_kv, kv_heads, d, kv_layout)
        numbers = n, n_kv, heads, kv_heads, *strides, d**-0.5
        trial.launch("group_of_heads", (blocks(n, 32), heads), 32, *arrays, o, *numbers, HEAD_DIM=d)

        def attention(kv_head_of: Iterable[int], q: np.ndarray = q, k: np.ndarray = k, v: np.ndarray = v) -> np.ndarray:
            return np.stack([reference.attention(q[h], k[g], v[g]) for h, g in enumerate(kv_head_of)])

        by_modulo = _stored(attention(h % kv_heads for h in range(heads)), q_layout)
        is_modulo = heads != kv_heads and np.allclose(trial.xp.asnumpy(o), by_modulo, atol=1e-4)
        expected = _stored(attention(h // (heads // kv_heads) for h in range(heads)), q_layout)
        trial.expect("O", o, expected, symptom="modulo" * is_modulo)
