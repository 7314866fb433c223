"""Graders of notebook 06."""

from __future__ import annotations

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


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
    for n, n_kv, d in trial.sizes("N, N_kv, d", (32, 48, 16), (33, 65, 16), (1, 1, 16), (16, 57, 64)):
        q, k, _ = trial.inputs(n, n_kv, d, np.float16)
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 16), 32, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d)
        _, expected = reference.attention(q, k, k, return_lse=True)
        trial.expect("lse", lse, expected, tolerance=1e-4)


@exercise(
    "06_factor_fragment",
    minutes=8,
    hints={
        "race": (
            "The 32 lanes load the fragment together: what must have happened before, and what may happen after?",
            "__syncwarp() after the store, so that all factors are there, and one before it, in each turn of the loop: "
            "another lane may still load the last tile's factors.",
        ),
        "trip": (
            "The result is right, but more than the factors goes through shared memory.",
            "acc stays in its fragments: only 16 floats are stored for a tile, and loaded as a fragment.",
        ),
        "unset": "Which lanes store a factor, and where? Elements 0 to 15 are the factors of rows 0 to 15.",
        "bounds": (
            "The fragment has 16 columns, and all of them are the same 16 floats: how far apart are two columns?",
            "A stride of 0: load_matrix_sync(factor, factors, 0, ...).",
        ),
        "deadlock": "All 32 lanes must reach load_matrix_sync and __syncwarp(): only the store belongs in the if.",
        "": (
            "Which rows must be multiplied, by what, and is that before or after P V of this tile is added?",
            "Rows have one factor each. Loaded column by column (mem_col_major), each column is the 16 factors.",
            "Accumulator factor; tc::load_matrix_sync(factor, factors, 0, tc::mem_col_major); then "
            "acc[n].x[e] *= factor.x[e] for every n and every e < factor.num_elements.",
        ),
    },
)
def factor_fragment(trial: Trial) -> None:
    """P and M as an online softmax has them; the bytes that were written to shared memory are limited."""
    first = 32, 48, 32
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (16, 16, 32), (48, 112, 32)):
        _, _, v = trial.inputs(n, n_kv, d, np.float16)
        s = trial.rng.normal(0, 2, (n, n_kv // 16, 16))
        m = np.maximum.accumulate(s.max(axis=2), axis=1)  # (n, tiles): after each tile
        p = np.exp2(s - m[:, :, None]).reshape(n, n_kv).astype(np.float16)
        maxima = np.ascontiguousarray(m.T, np.float32)
        o = trial.empty(n, d)
        trial.launch("rescaled_sum", blocks(n, 16), 32, p, v, maxima, o, n, n_kv, HEAD_DIM=d)
        weights = p * np.exp2(maxima - maxima[-1]).T.astype(np.float64).repeat(16, axis=1)
        trial.expect("O", o, product(weights, v), tolerance=1e-4)
    if trial.report:
        tiles = first[0] // 16 * first[1] // 16
        what, written = "bytes written to shared memory for a tile", trial.shared().written // tiles
        trial.limit(what, written, at_most=64, symptom="trip")


@exercise(
    "06_find_the_race",
    minutes=6,
    hints={
        "race": (
            "The two lines that race are above. Which one must be finished by all lanes before the other may begin?",
            "P overlays S, and its rows are closer together: row r of P is where another lane still reads a row of S.",
            "All 32 lanes must have read S before one of them stores P: __syncwarp() between these two lines.",
        ),
        "barriers": "One barrier more is enough. Which of yours separates no store from another lane's access?",
        "bytes": "P keeps its place in S_smem: nothing but a barrier is missing.",
        "": "Only a barrier is missing: the lines that compute can stay as they are.",
    },
)
def find_the_race(trial: Trial) -> None:
    """The numbers are right without the barrier too: the X-ray finds it, and the text's barriers are counted."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (32, 48, 16), (16, 16, 16), (48, 112, 16)):
        q, k, v = (0.5 * a for a in trial.inputs(n, n_kv, d, np.float16))
        o = trial.empty(n, d)
        run = trial.launch("weighted_sum", blocks(n, 16), 32, q, k, v, o, n, n_kv, HEAD_DIM=d)
        p = np.exp2(product(q, k.T))
        size = float(product(p, np.abs(v)).max())  # P is rounded to 11 bits
        trial.expect("O", o, product(p, v), tolerance=size * 2.0**-10)
    if trial.report:
        barriers = trial.plain.count("__syncwarp") + trial.plain.count("__syncthreads")
        trial.limit("barriers in the text", barriers, at_most=4, symptom="barriers")
        trial.limit("bytes of shared memory", run.shared_size_bytes, at_most=1280, symptom="bytes")
