"""Graders of notebook 05."""

from __future__ import annotations

import numpy as np

from helpers.attention import reference
from helpers.attention.check import tolerance_for
from helpers.lesson.exercises.graders.expected import blocks, expect_v, wrong_for_one_key
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("05_sliding_window", minutes=8)
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


@exercise("05_causal_tiles", minutes=12)
def causal_tiles(trial: Trial) -> None:
    """Test as many keys as rows; more keys; more rows, so that rows and whole blocks see no key; one row."""
    counted = {}  # size -> (keys that all blocks read, keys that they need)
    first = 80, 80, 8, 32
    sizes = first, (70, 77, 8, 32), (70, 20, 8, 32), (1, 17, 8, 32), (80, 80, 72, 32), (80, 80, 8, 64)
    for n, n_kv, d, block_m in trial.sizes("N, N_kv, d, BLOCK_M", *sizes):
        q, k, _ = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        defines = {"HEAD_DIM": d, "BLOCK_M": block_m}
        trial.launch("causal_tiles", blocks(n, block_m), block_m, q, k, lse, n, n_kv, d**-0.5, **defines)
        _, expected = reference.attention(q, k, k, causal=True, return_lse=True)
        symptom = ""
        if n <= n_kv and len(counted) < 2:
            ends = (min(row + block_m + n_kv - n, n_kv) for row in range(0, n, block_m))
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
        symptom = "every key" if read == blocks(n, first[-1]) * n_kv else "tiles"
        trial.limit(f"keys read at N = {n}, N_kv = {n_kv}", read, at_most=needed, symptom=symptom)


HEADS_FIRST, ROWS_FIRST = "(heads, seq, d)", "(seq, heads, d)"


def _stored(a: np.ndarray, layout: str) -> np.ndarray:
    """Change an array (heads, rows, d) to a storage layout, or back."""
    return np.ascontiguousarray(a.swapaxes(0, 1)) if layout == ROWS_FIRST else a


def _strides(rows: int, heads: int, d: int, layout: str) -> tuple[int, int]:
    """Return the strides of rows and of heads, in elements."""
    return (heads * d, d) if layout == ROWS_FIRST else (d, rows * d)


@exercise("05_group_of_heads", minutes=8)
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

        with_each = np.stack([[reference.attention(a, k[g], v[g]) for a in q] for g in range(kv_heads)])
        got, head = _stored(trial.xp.asnumpy(o), q_layout), np.arange(heads)
        fits = np.isclose(got, with_each, rtol=0, atol=1e-4).all(axis=(2, 3))  # (KV head, query head)
        right = head // (heads // kv_heads)
        slips = {"zero": 0 * head, "modulo": head % kv_heads, "quotient": head // kv_heads}
        slips = {name: kv_head for name, kv_head in slips.items() if kv_head.max() < kv_heads}
        matches = [name for name, kv_head in slips.items() if (kv_head != right).any() and fits[kv_head, head].all()]
        matches += ["other head"] if fits.any(axis=0).all() else []
        trial.expect("O", o, _stored(with_each[right, head], q_layout), symptom=matches[0] if matches else "")
        if n_kv == 1:
            expect_v(trial, got.reshape(-1, d), v[right].reshape(heads, d), np.eye(heads, dtype=bool).repeat(n, axis=0))
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
