"""Graders of notebook 07."""

from __future__ import annotations

import numpy as np

from helpers.exercises.graders.expected import blocks
from helpers.exercises.trial import Trial, exercise


@exercise(
    "07_two_products",
    minutes=12,
    hints={
        "limit": (
            "ldmatrix reads the same chunk of 8 rows at once: which banks may they not share?",
            "Give the 8 rows 8 different chunks: exchange chunks by XOR with something that differs from row to row.",
            "128 * row + 16 * (chunk ^ row % 8).",
        ),
        "": (
            "This lane has rows g and g + 8, columns 2t and 2t + 1 of S[0] (keys 0 .. 7) and of S[1] (keys 8 .. 15).",
            "a[0] and a[1] are columns 2t, 2t + 1 of the operand, rows g and g + 8; a[2] and a[3] are 8 columns later.",
            "a[0] = pack(S[0][0], S[0][1]), a[1] = pack(S[0][2], S[0][3]); a[2] and a[3] are the same of S[1].",
        ),
    },
)
def two_products(trial: Trial) -> None:
    """One block of whole tiles is enough to see how shared memory is read."""
    for n, n_kv in trial.sizes((16, 16), (1, 1), (33, 17), (64, 50)):
        q, k, v = trial.inputs(n, n_kv, 64, np.float16)
        run = trial.kernel("two_products")
        o = trial.empty(n, 64)
        args = (*map(trial.xp.asarray, (q, k, v)), o, np.int32(n), np.int32(n_kv))
        trial.launch(run, blocks(n, 16), (32,), args)
        s, values = q.astype(np.float64) @ k.astype(np.float64).T, v.astype(np.float64)
        rounding = np.abs(s.astype(np.float16).astype(np.float64) @ values - s @ values).max()
        trial.expect("O", o, s @ values, at=f"N = {n}, N_kv = {n_kv}", tolerance=max(2 * float(rounding), 1e-3))
    if trial.report:
        trial.limit("bank conflicts", sum(figures.conflicts for figures in trial.report.shared.values()), at_most=0)
