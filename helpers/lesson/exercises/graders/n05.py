"""Graders of notebook 05."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from helpers.attention import reference
from helpers.attention.check import tolerance_for
from helpers.lesson.exercises.graders.expected import blocks, expect_v, wrong_for_one_key
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
            "If l_i is 0, the factor is 0.",
        ),
        "lse": "A row that sees no key has lse = minus infinity; any other one m_i + logf(l_i).",
        "crash": "Where a row is before the first key, or the window reaches beyond it, begin must still be 0 or more.",
        "": "visited, O and lse all follow from begin and end: for one row, write the keys down that it may see.",
    },
)
def sliding_window(trial: Trial) -> None:
    """Test more keys than rows, more rows than keys, a window of one key, and one of all keys."""
    sizes = (33, 65, 8, 5), (130, 31, 8, 7), (64, 1, 8, 0), (63, 257, 8, 300), (1, 1, 8, 0), (33, 65, 72, 5)
    for n, n_kv, d, left in trial.sizes("N, N_kv, d, window_left", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        o, lse, visited = trial.empty(n, d), trial.empty(n), trial.empty(n, dtype=np.int32)
        numbers = n, n_kv, left, d**-0.5
        trial.launch("sliding_window", blocks(n, 64), 64, q, k, v, o, lse, visited, *numbers, HEAD_DIM=d, BLOCK_M=64)
        expected, expected_lse = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        seen = reference.visible(n, n_kv, window=(left, 0))
        trial.expect("keys visited by each row", visited, seen.sum(axis=1), symptom="visited")
        symptom = wrong_for_one_key(trial, o, expected, seen)
        trial.expect("O", o, expected, tolerance=tolerance_for(q, k), symptom=symptom)
        expect_v(trial, o, v, seen)
        trial.expect("lse", lse, expected_lse, symptom="" if np.isnan(trial.xp.asnumpy(lse)).any() else "lse")


CAUSAL_BLOCK = 32  # BLOCK_M of 05_causal_tiles


@exercise(
    "05_causal_tiles",
    minutes=12,
    hints={
        "future": (
            "A row's lse is too large: it includes keys that come after the row. Which key is the row's own?",
            "Row i is at key i + N_kv - N and sees keys up to and including that one.",
            "s = NEG_INF where first + j > row + N_kv - N.",
        ),
        "hidden": (
            "The block reads every key that its rows see, but some row misses one of them: it is hidden in the loop.",
            "Row i is at key i + N_kv - N, and sees that key too.",
        ),
        "short": (
            "Some block ends too early: it does not read all keys that its rows see. Which of its rows sees the most?",
            "The last row, first_row + BLOCK_M - 1, is at that row's number + N_kv - N. end is one more than this key.",
            "The last row, first_row + BLOCK_M - 1, is at key last_pos: end = min(last_pos + 1, N_kv).",
        ),
        "every key": (
            "The result is right, but each block reads all N_kv keys. Of all rows of a block, which sees the most?",
            "The last row of the block, at its own number + N_kv - N, whether or not N and N_kv are equal.",
        ),
        "tiles": (
            "The result is right, but some block reads keys that none of its rows sees: see the count.",
            "A block ends at its last row's key, which need not be the end of a tile: end is one more than that key, "
            "not a multiple of BLOCK_N.",
        ),
        "crash": "The last block may have fewer than BLOCK_M rows, and no key from N_kv on exists: limit end to N_kv.",
        "tail": (
            "Here N and N_kv differ, and the last row is at the last key: at which key is row 0?",
            "Row i is at key i + N_kv - N. Both holes need it: the block's last key, and the keys that a row sees.",
        ),
        "empty": "A block whose rows see no key still stores their lse. Let its loop make no turn, but do not return.",
        "nan": "A block may have rows that see no key next to rows that do: m_i has to stay finite.",
        "no key": (
            "Rows that see some key are right. A row that sees none has lse = minus infinity: what does a hidden score "
            "add to its l_i?",
            "A hidden score is NEG_INF, whose exponential is 0 whatever m_i is. A very small number will not do.",
        ),
        "": "For N = N_kv = 80 and blocks of 32 rows, write down the last key that each block needs.",
    },
)
def causal_tiles(trial: Trial) -> None:
    """Test as many keys as rows; more keys; more rows, so that rows and whole blocks see no key; one row."""
    counted = {}  # size -> the keys that all blocks read, those that they need
    for n, n_kv, d in trial.sizes("N, N_kv, d", (80, 80, 8), (70, 77, 8), (70, 20, 8), (1, 17, 8), (80, 80, 72)):
        q, k, _ = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        trial.launch("causal_tiles", blocks(n, CAUSAL_BLOCK), CAUSAL_BLOCK, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d)
        _, expected = reference.attention(q, k, k, causal=True, return_lse=True)
        symptom = ""
        if n <= n_kv and len(counted) < 2:
            ends = (min(first + CAUSAL_BLOCK + n_kv - n, n_kv) for first in range(0, n, CAUSAL_BLOCK))
            needed, read = sum(ends), trial.figures("K", awkward=bool(counted)).read // (4 * d)
            counted[n, n_kv] = read, needed
            off = trial.xp.asnumpy(lse) - expected
            if not np.isnan(off).any():
                symptom = "short" if trial.report and read < needed else "future" if off.max() > 1e-4 else "hidden"
        sees_none = expected == -np.inf
        got = trial.xp.asnumpy(lse)
        if np.allclose(got[~sees_none], expected[~sees_none], rtol=0, atol=1e-4) and (got[sees_none] < 0).all():
            symptom = "no key"
        trial.expect("lse", lse, expected, symptom=symptom)
    for (n, n_kv), (read, needed) in counted.items() if trial.report else ():
        symptom = "every key" if read == blocks(n, CAUSAL_BLOCK) * n_kv else "tiles"
        trial.limit(f"keys read at N = {n}, N_kv = {n_kv}", read, at_most=needed, symptom=symptom)


HEADS_FIRST, ROWS_FIRST = "(heads, seq, d)", "(seq, heads, d)"


def _stored(a: np.ndarray, layout: str) -> np.ndarray:
    """Store an array (heads, rows, d) in a layout."""
    return np.ascontiguousarray(a.swapaxes(0, 1)) if layout == ROWS_FIRST else a


def _strides(rows: int, heads: int, d: int, layout: str) -> tuple[int, int]:
    """Return the strides of rows and of heads, in elements."""
    return (heads * d, d) if layout == ROWS_FIRST else (d, rows * d)


@exercise(
    "05_group_of_heads",
    minutes=8,
    hints={
        "overflow": (
            "Right for short strides. Here an offset is beyond 32 bits: in which type is each product computed?",
            "Make one factor of each product 64 bits wide: (size_t)row * q_row_stride + (size_t)head * q_head_stride.",
        ),
        "modulo": (
            "Each head reads head % kv_heads, so neighbouring heads of Q share no head of K. Should they?",
            "With 4 heads of Q and 2 of K, heads 0 and 1 read head 0. How many heads of Q share one?",
            "heads / kv_heads heads of Q share one head of K: kv_head = head / (heads / kv_heads).",
        ),
        "quotient": (
            "head / kv_heads puts kv_heads heads of Q into each group. How many belong in one, with 8 heads of Q and 4 "
            "of K?",
            "heads / kv_heads heads of Q share one head of K: that is what head is divided by.",
        ),
        "other head": (
            "Each head of Q reads one head of K and V, but some read another one's. How many neighbouring heads of Q "
            "share one, with heads and kv_heads as above?",
            "heads / kv_heads heads of Q share one head of K: kv_head = head / (heads / kv_heads).",
        ),
        "zero": "Every head of Q reads head 0 of K and V. How many heads of Q share one, and which one does head read?",
        "crash": (
            "The line above names an array that is read past its end. Strides are in elements; K and V have only "
            "kv_heads heads, and strides of their own.",
            "kv_at is kv_head * kv_head_stride. Which head of K and V does this head of Q read?",
        ),
        "empty": "Part of O was never written: does q_at depend on the head, so that no two heads write the same rows?",
        "race": "Two heads write the same element of O. Does q_at depend on the head, and by the head's own stride?",
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
    """Test layouts with heads or rows first, and groups of 2, of 3 and of one head."""
    sizes = (
        (20, 24, 4, 2, 8, ROWS_FIRST, ROWS_FIRST),
        (33, 17, 8, 4, 8, HEADS_FIRST, HEADS_FIRST),
        (9, 12, 6, 3, 8, ROWS_FIRST, HEADS_FIRST),
        (5, 7, 3, 3, 8, HEADS_FIRST, ROWS_FIRST),
        (7, 1, 6, 2, 8, HEADS_FIRST, HEADS_FIRST),
        (20, 24, 4, 2, 72, ROWS_FIRST, ROWS_FIRST),
    )
    for n, n_kv, heads, kv_heads, d, q_layout, kv_layout in trial.sizes("N, N_kv, heads, kv_heads, d, Q, K", *sizes):
        q = trial.rng.standard_normal((heads, n, d), dtype=np.float32) + np.float32(0.25)
        k, v = trial.rng.standard_normal((2, kv_heads, n_kv, d), dtype=np.float32) + np.float32(0.25)
        arrays = _stored(q, q_layout), _stored(k, kv_layout), _stored(v, kv_layout)
        o = trial.empty(*arrays[0].shape)
        strides = *_strides(n, heads, d, q_layout), *_strides(n_kv, kv_heads, d, kv_layout)
        numbers = n, n_kv, heads, kv_heads, *strides, d**-0.5
        trial.launch("group_of_heads", (blocks(n, 32), heads), 32, *arrays, o, *numbers, HEAD_DIM=d)

        def attention(kv_head_of: Iterable[int], q: np.ndarray = q, k: np.ndarray = k, v: np.ndarray = v) -> np.ndarray:
            return np.stack([reference.attention(q[h], k[g], v[g]) for h, g in enumerate(kv_head_of)])

        right = [h // (heads // kv_heads) for h in range(heads)]
        slips = {
            "modulo": [h % kv_heads for h in range(heads)],
            "quotient": [h // kv_heads for h in range(heads)],
            "zero": [0] * heads,
        }
        symptom = ""
        for name, kv_head_of in slips.items():
            if kv_head_of != right and max(kv_head_of) < kv_heads:
                is_slip = np.allclose(trial.xp.asnumpy(o), _stored(attention(kv_head_of), q_layout), atol=1e-4)
                symptom = name if is_slip else symptom
        if not symptom:  # each head of Q right with some head of K and V
            tried = np.stack([_stored(attention([g] * heads), q_layout) for g in range(kv_heads)])
            close = np.isclose(trial.xp.asnumpy(o), tried, rtol=0, atol=1e-4)
            of_heads = (0, 1, 3) if q_layout == ROWS_FIRST else (0, 2, 3)
            axes = tuple(axis for axis in of_heads if axis)
            symptom = "other head" if close.all(axis=axes).any(axis=0).all() else ""
        trial.expect("O", o, _stored(attention(right), q_layout), symptom=symptom)
        if n_kv == 1:
            rows = trial.xp.asnumpy(o).reshape(heads, n, d)  # heads are first at this size
            expect_v(
                trial, rows.reshape(-1, d), v[right].reshape(heads, d), np.eye(heads, dtype=bool).repeat(n, axis=0)
            )
    _heads_far_apart(trial)


def _heads_far_apart(trial: Trial) -> None:
    """Test heads, then rows, whose stride is above 2^30 elements."""
    n, n_kv, heads, kv_heads, d, far = 6, 5, 6, 3, 8, 2**30
    for q_row, q_head, kv_row, kv_head in ((d, far, d, 2 * far - d), (far, d, d, 2 * far - d)):
        kv_count, q_count = (kv_heads - 1) * kv_head + n_kv * d, 5 * far + 6 * d
        arrays = trial.far(q_count, kv_count, kv_count, q_count)
        if arrays is None:
            return
        q, k, v, o = (
            np.lib.stride_tricks.as_strided(a, (many, rows, d), (4 * head, 4 * row, 4))
            for a, many, rows, head, row in zip(
                arrays,
                (heads, kv_heads, kv_heads, heads),
                (n, n_kv, n_kv, n),
                (q_head, kv_head, kv_head, q_head),
                (q_row, kv_row, kv_row, q_row),
                strict=True,
            )
        )
        for a in (q, k, v):
            a[...] = trial.rng.standard_normal(a.shape, dtype=np.float32)
        numbers = n, n_kv, heads, kv_heads, q_row, q_head, kv_row, kv_head, d**-0.5
        trial.launch("group_of_heads", (1, heads), 32, *arrays, *numbers, HEAD_DIM=d)
        expected = np.stack([reference.attention(q[h], k[h // 2], v[h // 2]) for h in range(heads)])
        at = f"strides of Q {q_row:,} and {q_head:,}, of K {kv_row:,} and {kv_head:,}"
        trial.expect("O", np.array(o), expected, at=at, symptom="overflow")
