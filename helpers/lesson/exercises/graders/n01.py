"""Graders of notebook 01."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import Trial, exercise

SCALE = 0.375  # the softmax_scale of 01_scores: not d**-0.5, so that it has to be taken from the arguments

# A block far into the array: its scores are more than 2^32 elements from the start.
FAR_BLOCK = 2**20
FAR = f"#undef blockIdx\n#define blockIdx uint3{{{FAR_BLOCK}, 0, 0}}"

# Calls the learner's function for one index into a scratch array that would not fit in any memory.
AT = """
extern "C" __global__ void __launch_bounds__(32)
    index_of(unsigned long long* index, int row, int j, int N, int N_kv) {
  if (threadIdx.x == 0) index[0] = at(row, j, N, N_kv);
}
"""


@exercise("01_scores", minutes=5)
def scores(trial: Trial) -> None:
    """Test all scores, how often they are stored, and an index beyond 32 bits."""
    first = 40, 24, 8
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 24, 72)):
        q, k, _ = trial.inputs(n, n_kv, d)
        s = trial.empty(n, n_kv)
        trial.launch("scores", blocks(n, 64), 64, q, k, s, n, n_kv, SCALE, HEAD_DIM=d, BLOCK_M=64)
        trial.expect("S", s, SCALE * product(q, k.T))
    _scores_far_down(trial)
    if trial.report:
        at_most = 4 * first[0] * first[1]
        trial.limit("bytes written to S", trial.figures("S").written, at_most=at_most, symptom="stores")


def _scores_far_down(trial: Trial) -> None:
    """Test the scores of one block whose rows begin 2^32 elements after the first one."""
    n, n_kv, d, first = 64, 64, 8, 64 * FAR_BLOCK
    arrays = trial.far((first + n) * d, n_kv * d, (first + n) * n_kv)
    if arrays is None:
        return
    far_q, far_k, far_s = arrays
    q, k, _ = trial.inputs(n, n_kv, d)
    far_q[first * d :], far_k[:] = q.ravel(), k.ravel()
    numbers = first + n, n_kv, SCALE
    trial.launch("scores", 1, 64, far_q, far_k, far_s, *numbers, before=FAR, HEAD_DIM=d, BLOCK_M=64)
    s, at = far_s[first * n_kv :].reshape(n, n_kv), f"N = {first + n:,}, N_kv = {n_kv}, the last {n} rows"
    trial.expect("S", s, SCALE * product(q, k.T), at=at, symptom="overflow")


@exercise("01_off_by_one", minutes=6)
def off_by_one(trial: Trial) -> None:
    """Test the read past K, which only the X-ray sees: even the skeleton's numbers are right at every size.

    K does not fill a multiple of 256 bytes: if it did, the engine would stop the launch at K's end.
    """
    for n, n_kv, d in trial.sizes("N, N_kv, d", (40, 25, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 25, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        mean = trial.empty(n)
        trial.launch("row_mean", blocks(n, 64), 64, q, k, mean, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64)
        trial.expect("MEAN", mean, attention_parts(q, k, v).s.mean(axis=1))


@exercise("01_coalesced_scores", minutes=6)
def coalesced_scores(trial: Trial) -> None:
    """Test the output, the transposed scratch, an index beyond 32 bits, and sectors per request."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (40, 24, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 24, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        s, o = trial.empty(n_kv, n), trial.empty(n, d)
        trial.launch("naive_coalesced", blocks(n, 64), 64, q, k, v, s, o, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64)
        parts = attention_parts(q, k, v)
        trial.expect("S, stored as (N_kv, N)", s, parts.p.T, symptom="index")
        trial.expect("O", o, parts.o)
    index, (row, j, n) = trial.empty(1, dtype=np.uint64), (99_998, 99_999, 100_000)
    trial.launch("index_of", 1, 32, index, row, j, n, n, extra=AT, HEAD_DIM=8, BLOCK_M=64)
    at, expected = f"row = {row:,}, j = {j:,}, N = N_kv = {n:,}", np.array([j * n + row], np.uint64)
    trial.expect("the index at()", index, expected, at=at, tolerance=0, symptom="overflow")
    if trial.report:
        trial.limit("sectors per request of S", round(trial.figures("S").sectors_per_request, 2), at_most=5)
