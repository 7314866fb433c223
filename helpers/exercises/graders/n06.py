"""Graders of notebook 06."""

from __future__ import annotations

import math

import numpy as np

from helpers import reference
from helpers.exercises.graders.expected import blocks, where
from helpers.exercises.trial import Trial, exercise


@exercise(
    "06_row_of_scores",
    minutes=12,
    hints={
        "race": (
            "A lane reads a row of S that other lanes have not stored yet: how do the lanes of a warp wait?",
            "__syncwarp() after store_matrix_sync: then the whole tile has been stored.",
        ),
        "tail": (
            "Right where keys come in whole tiles. Which keys of the last tile do not exist?",
            "Their rows were filled with zeros, and exp(0) counts: the score must be NEG_INF where first + j >= N_kv.",
        ),
        "empty": "Every row of the 16 has a lane that writes its lse: does it still, with your changes?",
        "": (
            "K^T: row j of K is column j of the right operand. Which layout has matrix_b then?",
            "matrix_a is row_major at Q_smem + k, matrix_b col_major at K_smem + k, both with the stride STRIDE.",
            "mma_sync(S, q_frag, k_frag, S) adds to S; store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major).",
        ),
    },
)
def row_of_scores(trial: Trial) -> None:
    """Whole tiles first, then a tail of keys and of rows."""
    for n, n_kv, d in trial.sizes((32, 48, 16), (33, 65, 16), (1, 1, 16), (16, 57, 64)):
        q, k, _ = trial.inputs(n, n_kv, d, np.float16)
        run = trial.kernel("row_lse", HEAD_DIM=d)
        lse = trial.empty(n)
        args = (*map(trial.xp.asarray, (q, k)), lse, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        trial.launch(run, blocks(n, 16), (32,), args)
        _, expected = reference.attention(q, k, k, return_lse=True)
        trial.expect("lse", lse, expected, at=where(n, n_kv, d), tolerance=1e-4)
