"""Graders of notebook 00."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


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
            "Elements of the later blocks are never written. Do all blocks compute the same numbers?",
            "i = blockIdx.x * BLOCK + threadIdx.x",
        ),
        "crash": (
            "The grid is rounded up to whole blocks, so some threads have no element. What must they not do?",
            "Load and store only if (i < n).",
        ),
        "bounds": "Some threads have no element: load and store only if (i < n).",
        "wrong": "Z[i] is a times X[i] plus Y[i].",
    },
)
def first_kernel(trial: Trial) -> None:
    """An element-wise sum: several blocks, the last of them incomplete."""
    for n in trial.sizes("n", 192, 1, 128, 129, 1000):
        x, y = trial.rng.standard_normal((2, n)).astype(np.float32) + np.float32(0.5)
        z, a = trial.empty(n), np.float32(trial.rng.uniform(1.5, 3))
        trial.launch("axpy", blocks(n, 128), 128, x, y, z, a, n, BLOCK=128)
        trial.expect("Z", z, a.astype(np.float64) * x + y)


@exercise(
    "00_safe_softmax",
    minutes=5,
    hints={
        "large": (
            "exp of 1000 is inf and exp of -1000 is 0. What do you subtract from every score first?",
            "The largest score of the row may be negative, and it may be the last one of the row.",
            "Start m_i at s[0], compare all s[j] with it, then write expf(s[j] - m_i).",
        ),
        "wrong": (
            "The sum of each row of P must be 1. Is l_i the sum of the same exponentials that are divided by it?",
            "p[j] is expf(s[j] - m_i), nothing else.",
        ),
        "crash": "s has the keys 0 .. N_kv - 1: where does your loop end?",
    },
)
def safe_softmax(trial: Trial) -> None:
    """Ordinary scores, then scores whose exponential overflows or underflows."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (33, 65, 8), (1, 1, 8), (64, 1, 8), (63, 257, 8)):
        q, k, _ = trial.inputs(n, n_kv, d)
        ordinary = q @ k.T / np.float32(math.sqrt(d))
        # Every other row is far below 0, where a maximum that starts at 0 is wrong as well.
        large = 10 * ordinary + np.where(np.arange(n) % 2, 1000, -1000).astype(np.float32)[:, None]
        large[::3, -1] += 200  # nor may the maximum miss the last key
        for name, s in (("P of ordinary scores", ordinary), ("P of scores near -1000 or 1000", large)):
            p = trial.empty(n, n_kv)
            trial.launch("safe_softmax", blocks(n, 64), 64, s, p, n, n_kv, BLOCK_M=64)
            trial.expect(name, p, reference.softmax(s), large=s is large)
