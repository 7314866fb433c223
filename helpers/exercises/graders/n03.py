"""Graders of notebook 03."""

from __future__ import annotations

import math

import numpy as np

from helpers import reference
from helpers.check import TOLERANCE, tolerance_for
from helpers.exercises.graders.expected import blocks, where
from helpers.exercises.trial import Trial, exercise


@exercise(
    "03_merge_halves",
    minutes=8,
    hints={
        "lse": (
            "O is right and lse is not: which m and which l belong to all the keys?",
            "m is the larger of the two maxima, l the sum of both rescaled sums.",
        ),
        "nan": (
            "Where a part has no keys, its m is -inf and its l is 0. Which expression is then 0 * inf or inf - inf?",
            "expf(m_part - m) with m the larger of both is 0 for an empty part; expf(m - m_part) is infinite.",
        ),
        "large": (
            "Large scores: an exponential of a score, without a maximum subtracted, overflows.",
            "Subtract the larger maximum from each part's: both arguments of expf are then at most 0.",
        ),
        "": (
            "Each part's l and acc are relative to that part's own m. To what do you bring them before you add?",
            "As in the loop: a part is multiplied by expf(its m - the new m).",
            "rescale_1 = expf(m_1[row] - m) for l_1 and acc_1, rescale_2 likewise, and m = fmaxf of both.",
        ),
    },
)
def merge_halves(trial: Trial) -> None:
    """Halves, an empty part, and scores whose exponential overflows."""
    block, d = 64, 8
    # (N, N_kv), where the second part begins, and a factor on q.
    cases = ((33, 65, 32, 1), (1, 2, 1, 1), (130, 31, 5, 1), (33, 65, 65, 1), (33, 65, 32, 100))
    for n, n_kv, split, factor in trial.sizes(*cases):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        half = trial.kernel("online_softmax_part", HEAD_DIM=d, BLOCK_M=block)
        merge = trial.kernel("merge", HEAD_DIM=d, BLOCK_M=block)
        inputs, scale = tuple(map(trial.xp.asarray, (q, k, v))), np.float32(1 / math.sqrt(d))
        parts = []
        for first, last in ((0, split), (split, n_kv)):
            part = trial.empty(n, d), trial.empty(n), trial.empty(n)
            args = (*inputs, *part, np.int32(n), np.int32(first), np.int32(last), scale)
            trial.launch(half, blocks(n, block), (block,), args)
            parts += part
        o, lse = trial.empty(n, d), trial.empty(n)
        trial.launch(merge, blocks(n * d, block), (block,), (*parts, o, lse, np.int32(n)))
        expected, expected_lse = reference.attention(q, k, v, return_lse=True)
        at = f"{where(n, n_kv, d)}, second part from key {split}" + ", large scores" * (factor > 1)
        trial.expect("O", o, expected, at=at, tolerance=tolerance_for(q, k), large=factor > 1)
        tolerance = max(TOLERANCE, float(np.abs(expected_lse).max()) * 2.0**-20)
        trial.expect("lse = m + log(l)", lse, expected_lse, at=at, tolerance=tolerance, symptom="lse")
