"""Graders of notebook 02."""

from __future__ import annotations

import math

import numpy as np

from helpers.exercises.graders.expected import attention_parts, blocks, where
from helpers.exercises.trial import Trial, exercise


@exercise(
    "02_one_barrier",
    minutes=10,
    hints={
        "race": (
            "A fast thread loads the next tile while slow threads still read. Into which tile must it load?",
            "Two tiles need two arrays in shared memory, and iterations that use them in turn: 0, 1, 0, 1, ...",
            "first / BLOCK_N is the number of the iteration; its remainder by 2 chooses the tile.",
        ),
        "large": (
            "expf of a large score is infinite: take exponentials of score - maximum only.",
            "m_new = fmaxf(m_i, s) comes first; both exponentials then subtract m_new.",
        ),
        "barriers": (
            "With two tiles that are used in turn, one barrier a tile is enough. Which of yours protects nothing?",
            "The barrier between the load and the reads is the one to keep.",
        ),
        "reads": (
            "The scores are right, but they do not come from shared memory: read the keys from the tile.",
            "s += q[c] * tile[j][c] reads the copy that the block shares.",
        ),
        "": (
            "When the maximum grows, the sum so far is relative to the old maximum: by what is it multiplied?",
            "First m_new, then l_i *= expf(m_i - m_new), then the new term, then m_i = m_new.",
        ),
    },
)
def one_barrier(trial: Trial) -> None:
    """Several tiles at the first size, so that the X-ray sees whether one barrier is enough."""
    block, block_n, d = 64, 16, 8
    sizes = ((40, 48, 1), (33, 65, 1), (1, 1, 1), (70, 31, 1), (130, 257, 300))
    for n, n_kv, factor in trial.sizes(*sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        run = trial.kernel("row_lse", HEAD_DIM=d, BLOCK_M=block, BLOCK_N=block_n)
        lse = trial.empty(n)
        args = (*map(trial.xp.asarray, (q, k)), lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        trial.launch(run, blocks(n, block), (block,), args)
        parts = attention_parts(q, k, v)
        expected = parts["m"] + np.log(parts["l"])
        # float32 keeps 7 digits, and large scores are near a thousand.
        at, tolerance = where(n, n_kv, d) + ", large scores" * (factor > 1), 1e-2 if factor > 1 else 1e-5
        trial.expect("LSE", lse, expected, at=at, tolerance=tolerance, large=factor > 1)
    if trial.report:
        n, n_kv, _ = sizes[0]
        trial.limit(
            "barriers in a block of 3 tiles", trial.report.barriers, at_most=n_kv // block_n, symptom="barriers"
        )
        read = sum(figures.read for figures in trial.report.shared.values())
        trial.limit("bytes read from shared memory", read, at_least=4 * n * n_kv * d, symptom="reads")
