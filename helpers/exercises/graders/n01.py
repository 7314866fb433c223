"""Graders of notebook 01."""

from __future__ import annotations

import math

import numpy as np

from helpers.exercises.graders.expected import attention_parts, blocks, where
from helpers.exercises.trial import Trial, exercise

# Asks the learner's function for one index, of a scratch that would not fit in any memory.
AT = """
extern "C" __global__ void __launch_bounds__(32)
    index_of(unsigned long long* found, int row, int j, int N, int N_kv) {
  if (threadIdx.x == 0) found[0] = at(row, j, N, N_kv);
}
"""


@exercise(
    "01_coalesced_scores",
    minutes=6,
    hints={
        "index": (
            "S has N_kv rows of N elements. In which row, and in which column of it, is the score of (row, j)?",
            "For one j, the 32 rows of a warp must be next to each other: row has the factor 1. Which factor has j?",
            "S[j][row] is element j * N + row.",
        ),
        "overflow": (
            "At N = N_kv = 100,000 the index does not fit in 32 bits. In which type is the product computed?",
            "Make one factor 64 bits wide before the product: (size_t)j * N, not (size_t)(j * N).",
        ),
        "race": (
            "Two threads use the same element of S. For which two pairs (row, j) does at() give the same index?",
            "j * N + row with row < N is another number for every pair; a shorter factor than N is not.",
        ),
        "bounds": (
            "Which is the largest index that at() gives, and how many elements has S?",
            "j goes up to N_kv - 1 and row up to N - 1: the element after the last is N_kv * N.",
        ),
        "": (
            "S is written and read in three places: all of them go through at(row, j, N, N_kv). What must it return?",
            "Element (j, row) of an array of N_kv rows and N columns.",
        ),
    },
)
def coalesced_scores(trial: Trial) -> None:
    """The output, the scratch as the transpose, an index beyond 32 bits, and sectors per request."""
    block = 64
    for n, n_kv, d in trial.sizes((40, 24, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8)):
        q, k, v = trial.inputs(n, n_kv, d)
        run = trial.kernel("naive_coalesced", HEAD_DIM=d, BLOCK_M=block)
        s, o = trial.empty(n_kv, n), trial.empty(n, d)
        args = (*map(trial.xp.asarray, (q, k, v)), s, o, np.int32(n), np.int32(n_kv), np.float32(1 / math.sqrt(d)))
        trial.launch(run, blocks(n, block), (block,), args)
        parts = attention_parts(q, k, v)
        trial.expect("S, stored as (N_kv, N)", s, parts["P"].T, at=where(n, n_kv, d), symptom="index")
        trial.expect("O", o, parts["O"], at=where(n, n_kv, d))
    probe = trial.kernel("index_of", extra=AT, HEAD_DIM=8, BLOCK_M=block)
    found = trial.empty(1, dtype=np.uint64)
    row, j, n = 99_998, 99_999, 100_000
    trial.launch(probe, (1,), (32,), (found, *map(np.int32, (row, j, n, n))))
    size = f"row = {row:,}, j = {j:,}, N = N_kv = {n:,}"
    trial.expect("the index at()", found, np.array([j * n + row], np.uint64), at=size, tolerance=0, symptom="overflow")
    if trial.report:
        trial.limit("sectors per request of S", round(trial.figures("S").sectors_per_request, 2), at_most=5)
