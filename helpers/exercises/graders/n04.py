"""Graders of notebook 04."""

from __future__ import annotations

import math

import numpy as np

from helpers.exercises.graders.expected import attention_parts, blocks, where
from helpers.exercises.trial import Trial, exercise


@exercise(
    "04_register_tile",
    minutes=10,
    hints={
        "maximum": (
            "A thread has 4 of a tile's 32 keys. Are all 16 products in s, and are all 8 threads of the row asked?",
            "The lanes of a row differ in bits 0, 1 and 2: exchange with lane ^ 1, lane ^ 2 and lane ^ 4.",
            "a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit)) for bit = 1, 2, 4.",
        ),
        "sum": (
            "The maxima are right. l_i is the sum over one thread's keys; the row's sum is that of its 8 threads.",
            "The same three exchanges as for the maximum, with += instead of fmaxf.",
        ),
        "deadlock": (
            "All 32 lanes that the mask names must call the shuffle: is yours inside an if that some lanes skip?",
            "A lane must read from a lane of its own row: ^ 1, ^ 2 and ^ 4 stay within the eight.",
        ),
        "": "s[i][j] += q[i] * k[j] for all 16 pairs; the maximum and the sum then go over the 8 threads of a row.",
    },
)
def register_tile(trial: Trial) -> None:
    """Maxima first, since sums are relative to them."""
    d = 8
    for n, n_kv in trial.sizes((64, 64), (33, 65), (1, 1), (130, 31)):
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("tile_lse", HEAD_DIM=d)
        m, lse = trial.empty(n), trial.empty(n)
        args = (*map(trial.xp.asarray, (q, k)), m, lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        trial.launch(run, blocks(n, 64), (128,), args)
        parts = attention_parts(q, k, v)
        at = where(n, n_kv, d)
        trial.expect("M, the row maxima", m, parts["m"], at=at, symptom="maximum")
        trial.expect("LSE", lse, parts["m"] + np.log(parts["l"]), at=at, symptom="sum")
