"""Graders of notebook 05."""

from __future__ import annotations

import math

import numpy as np

from helpers import reference
from helpers.exercises.graders.expected import blocks, where
from helpers.exercises.trial import Trial, exercise


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
    block, d = 64, 8
    for n, n_kv, left in trial.sizes((33, 65, 5), (130, 31, 7), (64, 1, 0), (63, 257, 300), (1, 1, 0)):
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("sliding_window", HEAD_DIM=d, BLOCK_M=block)
        o, lse, visited = trial.empty(n, d), trial.empty(n), trial.empty(n, dtype=np.int32)
        sizes = np.int32(n), np.int32(n_kv), np.int32(left), np.float32(1 / math.sqrt(d))
        args = (*map(trial.xp.asarray, (q, k, v)), o, lse, visited, *sizes)
        trial.launch(run, blocks(n, block), (block,), args)
        expected, expected_lse = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        seen = reference.visible(n, n_kv, window=(left, 0)).sum(axis=1)
        at = f"{where(n, n_kv, d)}, window_left = {left}"
        trial.expect("keys visited by each row", visited, seen, at=at, symptom="visited")
        trial.expect("O", o, expected, at=at)
        trial.expect("lse", lse, expected_lse, at=at, symptom="" if np.isnan(trial.xp.asnumpy(lse)).any() else "lse")
