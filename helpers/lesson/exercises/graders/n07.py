"""Graders of notebooks 07 and 07b: accumulators and operands of mma.sync, swizzled tiles, prefetching copies."""

from __future__ import annotations

import re

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise
from helpers.xray import Report

# Calls the learner's function for the place of every chunk.
PLACES = """
extern "C" __global__ void places(int* offsets) {
  offsets[threadIdx.x] = (int)swizzle(threadIdx.x / 8, threadIdx.x % 8);
}
"""


@exercise("07_swizzle", minutes=8, notebook="07b")
def swizzle(trial: Trial) -> None:
    """Test the function alone first, because its offsets show what is wrong; then the whole kernel."""
    places = trial.empty(16, 8, dtype=np.int32)
    for n in trial.sizes("N", 16, 40, 1):
        if n == 16:
            trial.launch("places", 1, 128, places, extra=PLACES)
            symptom, reason = _wrong_place(trial.xp.asnumpy(places))
            if symptom:
                trial.rows[FIRST].fail([reason], symptom)
                continue
        _, k, _ = trial.inputs(1, n, 64, np.float16)
        o = trial.empty(n, 64)
        trial.launch("fragments", blocks(n, 16), 32, k, o, n)
        trial.expect("O", o, k.astype(np.float32))
    if trial.report:
        trial.limit("bank conflicts", trial.figures("K_smem").conflicts, exactly=0)


def _wrong_place(places: np.ndarray) -> tuple[str, str]:
    """Return the symptom and the reason of the first misplaced chunk; ("", "") if there is none."""
    chunk_at: dict[int, str] = {}
    for (row, chunk), place in np.ndenumerate(places):
        call = f"swizzle({row}, {chunk})"
        if place % 16:
            return "aligned", f"{call} is {place}, which is no multiple of 16"
        if not 0 <= place < places.size * 16:
            return "bounds", f"{call} is {place}; the tile has bytes 0 to {places.size * 16 - 1}"
        if place in chunk_at:
            return "shared", f"{call} and {chunk_at[place]} are both {place}"
        chunk_at[place] = call
    return "", ""


# Calls the learner's function for every lane.
OF_LANES = """
extern "C" __global__ void of_lanes(const float* a, float* result) {
  result[threadIdx.x] = row_allreduce(a[threadIdx.x]);
}
"""


@exercise("07_row_max", minutes=12)
def row_max(trial: Trial) -> None:
    """Test each lane's own maxima first, which need no shuffle."""
    for n, n_kv in trial.sizes("N, N_kv", (16, 24), (33, 13), (1, 2)):
        # Distinct, and the same in every try. All are negative, so a 0 in place of the lowest float is noticed.
        s = np.random.default_rng(7).permutation(n * n_kv).reshape(n, n_kv).astype(np.float32) - n * n_kv
        padded = np.full((16 * blocks(n, 16), 8 * blocks(n_kv, 8)), np.finfo(np.float32).min, np.float32)
        padded[:n, :n_kv] = s
        # block, row g or g + 8, g, keys 8 apart, t, pair -> block, lane 4 g + t, row g or g + 8
        own = padded.reshape(-1, 2, 8, padded.shape[1] // 8, 4, 2).max(axis=(3, 5)).transpose(0, 2, 3, 1)
        m, lanes = trial.empty(n), trial.empty(len(own), 32, 2)
        of_lanes, first = trial.empty(8, 4), s[:8, :4]
        if n == 16:
            trial.launch("of_lanes", 1, 32, np.ascontiguousarray(first), of_lanes, extra=OF_LANES)
        trial.launch("row_max", blocks(n, 16), 32, s, m, lanes, n, n_kv, extra=OF_LANES)
        trial.expect("L", lanes, own.reshape(lanes.shape), symptom="elements")
        trial.expect("M", m, s.max(axis=1), symptom="reduce")
        if n == 16:
            largest = first.max(axis=1, keepdims=True).repeat(4, axis=1)
            trial.expect("row_allreduce, which each of a row's four lanes needs", of_lanes, largest, symptom="reduce")
    if trial.report:
        shuffles = trial.report.collectives - trial.report.warp_barriers
        trial.limit("shuffles of a warp", shuffles, at_most=4)
        trial.limit("requests of shared memory", trial.shared().requests, exactly=0, symptom="shared")


TILES = 5  # at the first size


@exercise("07_find_the_wait", minutes=13, notebook="07b")
def find_the_wait(trial: Trial) -> None:
    """Attribute the X-ray's findings to the wait, barrier or order; then require copies to overlap with sums."""
    for n in trial.sizes("N", 16 * TILES - 8, 16, 1):
        _, _, v = trial.inputs(1, n, 64)
        o = trial.empty(64)
        expected = v.mean(axis=0, dtype=np.float64)
        trial.launch("mean", 1, 64, v, o, n)
        if trial.report and n > 16:
            is_same = re.search(r"\bload_tile\s*\(\s*V_smem\[stage\]", trial.plain) is not None
            trial.blame(
                "target" if is_same else _cause(trial.report, np.allclose(trial.xp.asnumpy(o), expected, atol=1e-4))
            )
        trial.expect("O", o, expected)
    if trial.report:
        trial.limit(f"barriers for {TILES} tiles", trial.report.barriers, at_most=TILES)
        overlapping = _sums_with_a_copy_in_flight(trial.report) if trial.plain.count("cp_async_wait<") <= 2 else 0
        what = "tiles that are summed while the next one is copied"
        trial.limit(what, overlapping, at_least=TILES - 1, symptom="overlap")


def _cause(report: Report, right: bool) -> str:
    """Return the cause of the findings. right: the output is right on the engine, where a copy arrives at its wait."""
    unfinished = [finding for finding in report.findings if finding.kind == "not waited for"]
    if any(finding.thread == finding.other_thread for finding in unfinished):
        return "own copies"
    if report.barriers < TILES:
        return "barrier"
    if unfinished and not right:
        return "others' copies"
    return "order"


def _sums_with_a_copy_in_flight(report: Report) -> int:
    """Count the tiles that the first warp sums while its copy of another one is in flight."""
    started = summed = overlapping = 0
    for step in report.steps():
        if step.warp or step.what not in ("write shared", "read shared"):
            continue
        if step.what == "write shared":
            started += step.count
        else:
            summed += step.count
            overlapping += started // 4 > summed // 16  # per tile and thread: 4 copies and 16 sums
    return overlapping


@exercise("07_two_products", minutes=20)
def two_products(trial: Trial) -> None:
    """Test S = 1 first, where only b can be wrong, since any arrangement of a is right. Then random numbers."""
    for n, n_kv in trial.sizes("N, N_kv", (16, 32), (33, 17), (1, 1)):
        q, k, v = trial.inputs(n, n_kv, 64, np.float16)
        inputs = {"O, with S = 1": (np.full_like(q, 0.125), np.full_like(k, 0.125)), "O": (q, k)}
        if "pack(1.0f, 1.0f)" in trial.plain:  # a is unchanged: the hint is about a
            del inputs["O, with S = 1"]
        for what, (left, right) in inputs.items():
            s, o = product(left, right.T), trial.empty(n, 64)
            trial.launch("two_products", blocks(n, 16), 32, left, right, v, o, n, n_kv)
            rounding = np.abs(product(s.astype(np.float16), v) - product(s, v)).max()
            tolerance = max(2 * float(rounding), 1e-3)
            symptom = _wrong_operand(trial.xp.asnumpy(o), s, v, tolerance)
            trial.expect(what, o, product(s, v), tolerance=tolerance, symptom=symptom)
    if trial.report:
        trial.limit("bank conflicts", trial.shared().conflicts, exactly=0)


def _fits(row: np.ndarray, parts: np.ndarray) -> bool:
    """Check whether a non-zero row (d,) is a linear combination of the columns of parts (d, n)."""
    weights = np.linalg.lstsq(parts.astype(float), row.astype(float), rcond=None)[0]
    size = float(np.abs(row).max())
    return size > 0 and float(np.abs(parts @ weights - row).max()) < 1e-2 * size


def _wrong_operand(o: np.ndarray, s: np.ndarray, v: np.ndarray, tolerance: float) -> str:
    """Return the symptom of a wrong output. If S is 1 everywhere, b is wrong."""
    keys, is_one = len(v), bool((s == 1).all())
    if keys % 16 == 0:
        untransposed = v.reshape(-1, 8, 8, 8).swapaxes(1, 3).reshape(v.shape)  # by matrices of 8 x 8
        if is_one and np.allclose(o, product(s, untransposed), atol=tolerance):
            return "transposed"
        if is_one and _fits(o[0], np.stack([v[0::2].sum(axis=0), v[1::2].sum(axis=0)], axis=1)):
            return "not packed"
        exchanged = v.reshape(-1, 2, 8, 64)[:, ::-1].reshape(v.shape)  # keys 8 to 15 before keys 0 to 7
        if not is_one and np.allclose(o, product(s, exchanged), atol=tolerance):
            return "halves"
    return "b" if is_one else "a"
