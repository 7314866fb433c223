"""Graders of notebook 00."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises import hints
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import XRAY, Trial, exercise


@exercise(
    "00_first_kernel",
    minutes=5,
    hints={
        "race": (
            "Several threads write the same element. How does a thread know in which block it is?",
            "Blocks are numbered by blockIdx.x, and each has BLOCK threads: where do the numbers of block 1 begin?",
            "i = blockIdx.x * BLOCK + threadIdx.x",
        ),
        "empty": (
            "The line above names the first element that is never written. Which block and thread should compute it, "
            "and which i do they get from your line?",
            "i = blockIdx.x * BLOCK + threadIdx.x",
        ),
        "crash": (
            "The grid is rounded up to whole blocks, so some threads have no element. What must they not do?",
            "Load and store only if (i < n).",
        ),
        "bounds": "Some threads have no element: load and store only if (i < n).",
        "alone": (
            "The result is right, but few threads compute all of it: see how many requests that takes. One element is "
            "one thread's.",
            "No loop is needed: each thread has one i, and an if.",
        ),
        "wrong": "Z[i] is a times X[i] plus Y[i].",
    },
)
def first_kernel(trial: Trial) -> None:
    """Test an element-wise sum: several blocks, the last of them incomplete."""
    first = 192
    for n in trial.sizes("n", first, 1, 128, 129, 1000):
        x, y = trial.rng.standard_normal((2, n)).astype(np.float32) + np.float32(0.5)
        z, a = trial.empty(n), np.float32(trial.rng.uniform(1.5, 3))
        trial.launch("axpy", blocks(n, 128), 128, x, y, z, a, n, BLOCK=128)
        if n == first and trial.report and "race" in trial.rows[XRAY].symptoms:
            # To the reader of this first table, neither "race" nor "X-ray" means anything yet.
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


@exercise(
    "00_safe_softmax",
    minutes=5,
    hints={
        "large": (
            "exp of 1000 is inf and exp of -1000 is 0. What do you subtract from every score first?",
            "The largest score of the row, m_i: then no exponential is above 1, and one of them is 1.",
            "Start m_i at s[0], compare all s[j] with it, then write expf(s[j] - m_i).",
        ),
        "maximum": (
            "Some rows of large scores are right, others are not: there m_i is too far from the row's largest score. "
            "Which scores is it compared with, and where does it start?",
            "The largest score of a row may be below -100,000, and at any place of the row, also the last one.",
            "Start m_i at s[0], and compare all s[j] with it.",
        ),
        "wrong": (
            "Subtracted inside expf, from each score, m_i changes no quotient. What stands inside your expf?",
            "The sum of each row of P must be 1. Is l_i the sum of the same exponentials that are divided by it?",
            "p[j] is expf(s[j] - m_i), nothing else.",
        ),
        "crash": "s has the keys 0 .. N_kv - 1: where does your loop end?",
    },
)
def safe_softmax(trial: Trial) -> None:
    """Test ordinary scores, then scores whose exponential overflows or underflows."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (33, 65, 8), (1, 1, 8), (64, 1, 8), (63, 257, 8)):
        q, k, _ = trial.inputs(n, n_kv, d)
        ordinary = q @ k.T / np.float32(math.sqrt(d))
        # Rows are far below 0, where a maximum that starts at 0, or at -10,000, is wrong as well.
        shifts = np.resize(np.array([-100_000, 1000, -1000], np.float32), n)
        large = 10 * ordinary + shifts[:, None]
        large[::3, -1] += 200  # nor may the maximum miss the last key, or one in the middle
        large[1::3, n_kv // 2] += 200
        for name, s in (("P of ordinary scores", ordinary), ("P of scores near -100,000, 1000 or -1000", large)):
            p = trial.empty(n, n_kv)
            trial.launch("safe_softmax", blocks(n, 64), 64, s, p, n, n_kv, BLOCK_M=64)
            expected = reference.softmax(s)
            rows = np.isclose(trial.xp.asnumpy(p), expected, rtol=0, atol=1e-5).all(axis=1)
            trial.expect(name, p, expected, large=s is large, symptom="maximum" if s is large and rows.any() else "")
