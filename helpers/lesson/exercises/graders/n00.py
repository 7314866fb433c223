"""Graders of notebook 00."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises import hints
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import XRAY, Trial, exercise


@exercise("00_first_kernel", minutes=5)
def first_kernel(trial: Trial) -> None:
    """Test an element-wise sum: several blocks, the last of them incomplete."""
    first = 192
    sizes = (first, 128), (1, 128), (128, 128), (129, 128), (1000, 128), (first, 64)
    for n, block in trial.sizes("n, BLOCK", *sizes):
        x, y = trial.rng.standard_normal((2, n)).astype(np.float32) + np.float32(0.5)
        z, a = trial.empty(n), np.float32(trial.rng.uniform(1.5, 3))
        trial.launch("axpy", blocks(n, block), block, x, y, z, a, n, BLOCK=block)
        if n == first and trial.report and "race" in trial.rows[XRAY].symptoms:
            # A reader of this first table does not know "race" or "X-ray" yet.
            stores = trial.figures("Z").written // 4
            elements = int((~hints.untouched(trial.xp.asnumpy(z))).sum())
            trial.rows[XRAY].lines = [
                f"{blocks(n, 128) * 128} threads made {stores:,} stores, to {elements} of Z's {n} elements:",
                "so several threads stored to the same element. Each element is for one thread.",
            ]
        trial.expect("Z", z, a.astype(np.float64) * x + y)
    if trial.report:
        warps = blocks(first, 128) * 128 // 32
        trial.limit("requests of Z, one for a warp", trial.figures("Z").requests, at_most=warps, symptom="alone")


@exercise("00_safe_softmax", minutes=5)
def safe_softmax(trial: Trial) -> None:
    """Test ordinary scores, then scores whose exponential overflows or underflows."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (33, 65, 8), (1, 1, 8), (64, 1, 8), (63, 257, 8)):
        q, k, _ = trial.inputs(n, n_kv, d)
        ordinary = q @ k.T / np.float32(math.sqrt(d))
        # All scores of these rows are far below 0, so a maximum that starts at 0 or at -10,000 is also wrong.
        shifts = np.resize(np.array([-100_000, 1000, -1000], np.float32), n)
        large = 10 * ordinary + shifts[:, None]
        large[::3, -1] += 200  # the maximum must include the last key, and the first ones
        rows = np.arange(1, n, 3)
        large[rows, rows // 3 % n_kv] += 200
        large[5::9] = -1e30  # all equal: each key has an equal share
        for name, s in (("P of ordinary scores", ordinary), ("P of scores near -100,000, 1000, -1000 or -1e30", large)):
            p = trial.empty(n, n_kv)
            trial.launch("safe_softmax", blocks(n, 64), 64, s, p, n, n_kv, BLOCK_M=64)
            expected = reference.softmax(s)
            right = np.isclose(trial.xp.asnumpy(p), expected, rtol=0, atol=1e-5).all(axis=1)
            trial.expect(name, p, expected, large=s is large, symptom="maximum" if s is large and right.any() else "")
