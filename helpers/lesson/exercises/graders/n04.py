"""Graders of notebooks 04 and 04b."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises import hints
from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import FIRST, XRAY, Trial, exercise

# Calls each function that exchanges values between a row's threads, to find which hole is wrong.
PROBES = """
extern "C" __global__ void probe_max(const float* a, float* result) { result[threadIdx.x] = row_max(a[threadIdx.x]); }
extern "C" __global__ void probe_sum(const float* a, float* result) { result[threadIdx.x] = row_sum(a[threadIdx.x]); }
"""


@exercise("04_register_tile", minutes=15)
def register_tile(trial: Trial) -> None:
    """Test the two functions by themselves; then maxima, the sums relative to them, and the exchanges."""
    a = trial.rng.standard_normal(128).astype(np.float32)
    shuffles = {}
    for name, reduce, symptom in (("max", np.max, "maximum"), ("sum", np.sum, "sum")):
        result = trial.empty(128)
        trial.launch(f"probe_{name}", 1, 128, a, result, extra=PROBES, HEAD_DIM=8)
        of_rows = np.repeat(reduce(a.reshape(-1, 8), axis=1), 8)
        every = 1 if name == "max" else 8  # the kernel uses only the sum of the row's first thread
        trial.expect(f"row_{name} of 128 numbers", trial.xp.asnumpy(result)[::every], of_rows[::every], symptom=symptom)
        # Shuffles of one warp or, if that is more, of one row: the four rows of a warp may shuffle separately.
        for threads in (32, 8) if trial.report and trial.rows[FIRST].passed is not False else ():
            if shuffles.get(name, 4) > 3:
                trial.launch(f"probe_{name}", 1, threads, a, result, extra=PROBES, HEAD_DIM=8)
                shuffles[name] = trial.report.collectives
    for n, n_kv, d in trial.sizes("N, N_kv, d", (64, 64, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (64, 64, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        m, lse = trial.empty(n), trial.empty(n)
        trial.launch("tile_lse", blocks(n, 64), 128, q, k, m, lse, n, n_kv, d**-0.5, extra=PROBES, HEAD_DIM=d)
        parts = attention_parts(q, k, v)
        trial.expect("M, the row maxima", m, parts.m, symptom="products")
        trial.expect("LSE", lse, parts.lse, symptom="products")
    for name, count in shuffles.items() if trial.report else ():
        trial.limit(f"shuffles of row_{name}", count, at_most=3, symptom="exchanges")


@exercise("04_outer_product", minutes=15)
def outer_product(trial: Trial) -> None:
    """Test the output, then that each word is read from shared memory once, in requests of four."""
    first = 64, 128, 8
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (33, 65, 8), (1, 1, 8), (70, 31, 8), (64, 128, 72)):
        q, k, _ = trial.inputs(n, n_kv, d)
        s = trial.empty(n, n_kv)
        trial.launch("outer_products", (blocks(n, 64), blocks(n_kv, 64)), 64, q, k, s, n, n_kv, HEAD_DIM=d)
        trial.expect("S", s, product(q, k.T), tolerance=1e-4)  # sums of up to 72 products, not scaled
    if trial.report:
        tiles = [trial.figures("Q_smem"), trial.figures("K_smem")]
        columns = 2 * first[2] * 2  # 2 blocks of 2 warps
        stores = 2 * columns
        loads = (sum(tile.requests for tile in tiles) - stores) / columns
        read = sum(tile.read for tile in tiles)
        trial.limit("bytes read from shared memory", read, at_least=4 * 16 * 32 * columns, symptom="reads")
        trial.limit("requests of shared memory for a column and warp", loads, at_most=4, symptom="requests")


@exercise("04_float4_rows", minutes=8, notebook="04b")
def float4_rows(trial: Trial) -> None:
    """Test sizes that are multiples of float4 first, then a longer Y, so that a write past its end shows."""
    first, second = 4096, 4602
    for count in trial.sizes("count", first, second, 1, 3, 33 * 33):
        x, _, _ = trial.inputs(1, 1, count)
        y, factor = trial.empty(count + 4 * (count % 4 > 0)), 0.125 if count == first else 0.375
        trial.launch("scale_all", blocks(count, 512), 128, x.ravel(), y, count, factor)
        if count == first and trial.rows[XRAY].passed is False:
            trial.rows[XRAY].symptoms = ("place",)
        written = trial.xp.asnumpy(y)
        past = np.count_nonzero(~hints.untouched(written[count:]))
        trial.expect("words of Y past the last one", np.array([past]), np.array([0]), symptom="past")
        trial.expect("Y", written[:count], factor * x.ravel())
    if trial.report:
        for count, awkward in ((first, False), (second, True)):
            at_most = count // 128 + 4  # a text that scales the last four words one by one needs four
            for array in ("X", "Y"):
                requests = trial.figures(array, awkward=awkward).requests
                what, symptom = f"requests of {array} for {count:,} words", "whole array" if awkward else "requests"
                trial.limit(what, requests, at_most=at_most, symptom=symptom)


@exercise("04_pad_the_tile", minutes=10, notebook="04b")
def pad_the_tile(trial: Trial) -> None:
    """Count conflicts and bytes for an even and for an odd number of float4 a row."""
    dims, runs = (64, 20, 96), []
    for n_kv in trial.sizes("N_kv", 64, 33, 1, 31):
        for d in dims:
            q, k, _ = trial.inputs(1, n_kv, d)
            s = trial.empty(n_kv)
            runs += [trial.launch("scores_of_a_query", blocks(n_kv, 32), 32, q.ravel(), k, s, n_kv, HEAD_DIM=d)]
            trial.expect("s", s, product(k, q.ravel()), at=f"N_kv = {n_kv}, d = {d}", tolerance=1e-4)
    if trial.report:
        for d, run, report, symptom in zip(dims, runs, trial.reports, ("conflicts", "odd", "conflicts"), strict=False):
            conflicts, size, most = report.shared["K_smem"].conflicts, run.shared_size_bytes, 32 * (d // 4 + 1) * 16
            limits = [(f"bank conflicts at d = {d}", conflicts, 0, symptom)]
            limits.insert(d == dims[0], (f"bytes of shared memory at d = {d}", size, most, "bytes"))
            for what, got, at_most, reason in limits:
                trial.limit(what, got, at_most=at_most, symptom=reason)
