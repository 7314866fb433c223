"""Graders of notebook 02."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise


@exercise("02_one_barrier", minutes=6)
def one_barrier(trial: Trial) -> None:
    """Test several tiles at the first size, so that the X-ray sees whether one barrier is enough."""
    first = 40, 48, 8, 16
    sizes = first, (40, 48, 8, 8), (33, 65, 8, 16), (1, 1, 8, 16), (70, 31, 8, 16), (130, 257, 8, 16), (40, 48, 72, 16)
    for n, n_kv, d, block_n in trial.sizes("N, N_kv, d, BLOCK_N", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 64), 64, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=block_n)
        trial.expect("LSE", lse, attention_parts(q, k, v).lse)
    if trial.report:
        n, n_kv, d, block_n = first
        barriers = trial.report.barriers
        trial.limit("barriers in a block of 3 tiles", barriers, at_most=n_kv // block_n, symptom="barriers")
        trial.limit("bytes read from shared memory", trial.shared().read, at_least=4 * n * n_kv * d, symptom="reads")


# Calls the learner's function to load one tile.
ONE_TILE = """
extern "C" __global__ void __launch_bounds__(BLOCK_M) one_tile(const float* K, float* copy, int first, int N_kv) {
  __shared__ float tile[BLOCK_N][HEAD_DIM];
  load_tile(tile, K, first, N_kv);
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) copy[i] = tile[i / HEAD_DIM][i % HEAD_DIM];
}
"""


def _tile_far_down(trial: Trial) -> None:
    """Test an incomplete tile whose words begin 2^32 elements after K's first one."""
    block_n, d, first, rows = 16, 8, 2**29, 5
    arrays = trial.far((first + block_n) * d, block_n * d)
    if arrays is None:
        return
    far_k, copy = arrays
    words = trial.rng.standard_normal((rows, d)).astype(np.float32)
    far_k[first * d : (first + rows) * d] = words.ravel()
    defines = {"HEAD_DIM": d, "BLOCK_M": 64, "BLOCK_N": block_n}
    trial.launch("one_tile", 1, 64, far_k, copy, first, first + rows, extra=ONE_TILE, **defines)
    expected = np.concatenate([words, np.zeros((block_n - rows, d), np.float32)])
    at = f"first = {first:,}, N_kv = {first + rows:,}, d = {d}"
    trial.expect("the tile", copy.reshape(block_n, d), expected, at=at, tolerance=0, symptom="overflow")


@exercise("02_load_tile", minutes=6)
def load_tile(trial: Trial) -> None:
    """Test whole tiles first, then count the sectors and requests that loading K takes.

    On a GPU, NaN behind K exposes reads past its end; on the CPU, K is not padded, so the X-ray finds them.
    """
    block_n, first = 16, (40, 32, 8, 64)
    sizes = first, (33, 65, 8, 64), (64, 1, 8, 64), (70, 31, 8, 64), (40, 32, 24, 64), (40, 32, 72, 64), (40, 32, 8, 32)
    for n, n_kv, d, block_m in trial.sizes("N, N_kv, d, BLOCK_M", *sizes):
        q, k, _ = trial.inputs(n, n_kv, d)
        padded = trial.xp.asarray(np.vstack([k, np.full((block_n, d), np.nan, np.float32)])) if trial.on_gpu else k
        sums = trial.empty(n)
        defines = {"HEAD_DIM": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
        trial.launch("sum_of_scores", blocks(n, block_m), block_m, q, padded[:n_kv], sums, n, n_kv, **defines)
        # sums are in the hundreds, and float32 has 7 digits
        symptom = "tail" if n_kv % block_n else "threads" if block_m < 64 else ""
        trial.expect("SUM", sums, product(q, k.T).sum(axis=1), tolerance=2e-3, symptom=symptom)
    _tile_far_down(trial)
    if trial.report:
        words = first[1] * first[2]  # of K at the first size, which has one block
        figures = trial.figures("K")
        trial.limit("bytes requested from K", figures.read, at_most=4 * words, symptom="requests")
        trial.limit("sectors of K", figures.sectors, at_most=4 * words // 32, symptom="sectors")
        trial.limit("requests of K", figures.requests, at_most=words // 32, symptom="few")


@exercise("02_no_conflicts", minutes=8)
def no_conflicts(trial: Trial) -> None:
    """Test one block of rows, one row, a block and eight rows; then conflicts and bytes. HEAD_DIM is 64, 96 or 32."""
    dims, runs = (64, 96, 32), []
    for n in trial.sizes("N", 32, 1, 40):
        for d in dims:
            q, _, _ = trial.inputs(n, 1, d)
            part = trial.empty(n, 4)
            runs += [trial.launch("squares", blocks(n, 32), 128, q, part, n, HEAD_DIM=d)]
            squares = (q.astype(np.float64) ** 2).reshape(n, d // 4, 4).sum(axis=1)
            symptom = "width" if d > dims[0] else ""
            trial.expect("PART", part, squares, at=f"N = {n}, d = {d}", tolerance=1e-4, symptom=symptom)
            if trial.rows[FIRST].passed is False:
                break
    if trial.report:
        for d, run, report in zip(dims, runs, trial.reports, strict=False):
            conflicts = sum(array.conflicts for array in report.shared.values())
            trial.limit(f"bank conflicts of a block at d = {d}", conflicts, at_most=0, symptom="conflicts")
            most = 4 * 32 * d + 808  # 9,000 at d = 64: does not give the stride away
            trial.limit(f"bytes of shared memory at d = {d}", run.shared_size_bytes, at_most=most, symptom="bytes")


@exercise("02_which_barrier", minutes=8)
def which_barrier(trial: Trial) -> None:
    """Find the race by the X-ray of several tiles: the engine's numbers are right wherever the barrier is."""
    threads, first = 64, (8, 130, 8, 1)
    sizes = first, (5, 64, 8, 1), (1, 1, 8, 1), (2, 300, 8, 1), (5, 300, 8, 300), (8, 130, 72, 1)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        lse = trial.empty(n)
        trial.launch("block_lse", n, threads, q, k, lse, n_kv, d**-0.5, HEAD_DIM=d)
        tolerance = 1e-2 if factor > 1 else 1e-5
        trial.expect("LSE", lse, attention_parts(q, k, v).lse, tolerance=tolerance, large=factor > 1)
    if trial.report:
        tiles = blocks(first[1], threads)
        barriers = trial.report.barriers // first[0] - 1  # the one after the loop
        trial.limit(f"barriers of a block in {tiles} tiles", barriers, at_most=2 * tiles, symptom="barriers")
