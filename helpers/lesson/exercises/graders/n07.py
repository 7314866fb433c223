"""The exercises of notebook 07: swizzled tiles, accumulators and operands of mma.sync, copies in the background."""

from __future__ import annotations

import re

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise
from helpers.xray import Report

# Asks the learner's function for the place of every chunk.
PLACES = """
extern "C" __global__ void places(int* offsets) {
  offsets[threadIdx.x] = (int)swizzle(threadIdx.x / 8, threadIdx.x % 8);
}
"""


@exercise(
    "07_swizzle",
    minutes=8,
    hints={
        "aligned": (
            "ldmatrix and cp.async take addresses that are multiples of 16 bytes. In which unit does yours count?",
            "A row is 64 elements of 2 bytes, 128 bytes; a chunk is 8 of them, 16 bytes.",
        ),
        "bounds": (
            "A chunk leaves the tile. The tile has 16 rows, but a row has only 8 places.",
            "row % 8 is below 8; with row = 15, an exclusive or of chunk and row gives numbers up to 15.",
        ),
        "shared": (
            "Two chunks have one place. Within a row, every chunk needs a place of its own.",
            "The place must depend on both, the row and the chunk, and the row only chooses the permutation.",
        ),
        "limit": (
            "The 8 chunks that are moved at a time must be in 8 different places of 16 bytes: the banks have 8.",
            "ldmatrix: chunk c of rows 0 to 7. cp.async: chunks 0 to 7 of one row. Let the place depend on both.",
            "Any permutation that differs for each of 8 neighbouring rows will do: chunk ^ row % 8, for example.",
        ),
    },
)
def swizzle(trial: Trial) -> None:
    """Test the function alone first, whose offsets show what is wrong; then the whole kernel."""
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
    """Return the symptom and the reason of the first misplaced chunk; two times "" if there is none."""
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


@exercise(
    "07_row_max",
    minutes=12,
    hints={
        "elements": (
            "Find lane 5 in the picture of the accumulators: which two rows does it hold, and which columns?",
            "Elements 0 and 1 are neighbours in one row; 2 and 3 are the same columns, 8 rows below.",
            "row += g + 8 * (e / 2); key += 2 * t + e % 2.",
        ),
        "reduce": (
            "Each lane's own maxima are right. Which other lanes hold keys of row g, and how do their numbers differ?",
            "Lanes 4 g to 4 g + 3 differ in bits 0 and 1. After an exchange across one bit, which lanes agree?",
            "a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, 1)), then the same with 2.",
        ),
        "shared": (
            "The result is right, but maxima go through shared memory. Shuffles pass registers from lane to lane.",
            "Exchange with the lane whose number differs in bit 0, take the maximum, then the same with bit 1.",
        ),
        "limit": (
            "Two shuffles for each of the two rows. After the first, which lanes hold the same number?",
            "Exchange with the lane whose number differs in bit 0, take the maximum, then the same with bit 1.",
        ),
    },
)
def row_max(trial: Trial) -> None:
    """Test a lane's own maxima first, which need no shuffle."""
    for n, n_kv in trial.sizes("N, N_kv", (16, 24), (33, 13), (1, 2)):
        # Distinct, and the same at every try. All are negative: a 0 in place of the lowest float is found.
        s = np.random.default_rng(7).permutation(n * n_kv).reshape(n, n_kv).astype(np.float32) - n * n_kv
        padded = np.full((16 * blocks(n, 16), 8 * blocks(n_kv, 8)), np.finfo(np.float32).min, np.float32)
        padded[:n, :n_kv] = s
        # block, row g or g + 8, g, keys 8 apart, t, pair -> block, lane 4 g + t, row g or g + 8
        own = padded.reshape(-1, 2, 8, padded.shape[1] // 8, 4, 2).max(axis=(3, 5)).transpose(0, 2, 3, 1)
        m, lanes = trial.empty(n), trial.empty(len(own), 32, 2)
        trial.launch("row_max", blocks(n, 16), 32, s, m, lanes, n, n_kv)
        trial.expect("L", lanes, own.reshape(lanes.shape), symptom="elements")
        trial.expect("M", m, s.max(axis=1), symptom="reduce")
    if trial.report:
        shuffles = trial.report.collectives - trial.report.warp_barriers
        trial.limit("shuffles of a warp", shuffles, at_most=4)
        trial.limit("requests of shared memory", trial.shared().requests, exactly=0, symptom="shared")


TILES = 5  # of the first size


@exercise(
    "07_find_the_wait",
    minutes=13,
    hints={
        "order": (
            "A copy starts while others may still read its target. Which tile is in V_smem[stage ^ 1] then?",
            "It is the tile of the round before. How does this thread know that all others have read it?",
            "A thread behind the barrier knows that all threads have left the round before: start the copy there.",
        ),
        "target": (
            "The next tile is copied over the one that this round sums, V_smem[stage]. Which of the two is free?",
            "The other one, V_smem[stage ^ 1]: the next round sums it.",
        ),
        "own copies": (
            "A thread reads a copy of its own that is in flight. How many of its groups does cp_async_wait let fly on?",
            "Where the wait comes before the next copy, one group is in flight, this tile's: <1> waits for nothing.",
            "cp_async_wait<0>(): no group stays in flight.",
        ),
        "others' copies": (
            "cp_async_wait is for the thread's own copies. How does it know that those of the others have arrived?",
            "Each thread waits for its own copies and meets the others afterwards: first the wait, then the barrier.",
        ),
        "barrier": (
            "Between the last read of a tile and the copy that replaces it, all threads of the block have to meet.",
            "__syncthreads(), once a tile; __syncwarp() is for the 32 lanes of one warp.",
        ),
        "overlap": (
            "Right, but nothing overlaps: the next tile should be in flight while this one is summed.",
            "V_smem[stage ^ 1] is free right behind the barrier: start its copy there, and wait for it a round later.",
        ),
        "limit": (
            "One barrier is enough: the order of the three lines decides what it separates.",
            "Wait for this tile, meet at the barrier, then start to copy the next one.",
        ),
        "": (
            "The output is wrong now: is this tile complete, of all threads, before it is read?",
            "cp_async_wait<P> leaves P groups in flight. How many groups has this thread started at that line?",
        ),
    },
)
def find_the_wait(trial: Trial) -> None:
    """Trace the X-ray's findings to the wait, the barrier or the order; then require copies to overlap with sums."""
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
    """Count the tiles that the first warp sums after it has started to copy another one."""
    started = summed = overlapping = 0
    for step in report.steps():
        if step.warp or step.what not in ("write shared", "read shared"):
            continue
        if step.what == "write shared":
            started += step.count
        else:
            summed += step.count
            overlapping += started // 4 > summed // 16  # copies and sums of this thread for a tile: 4 and 16
    return overlapping


@exercise(
    "07_two_products",
    minutes=20,
    hints={
        "transposed": (
            "Your lane has two columns of one key of V; as operand B it needs two keys of one column.",
            "ptx.cuh has a second load: ldmatrix_x4_trans transposes each matrix on the way.",
        ),
        "b": (
            "With S = 1 everywhere, O must be the sums of V's columns, and is not: b is wrong, whatever a is. "
            "Which four 8 x 8 matrices of V are b[0] to b[3]?",
            "b[0] and b[1]: keys 0 to 7 and 8 to 15 of the first 8 columns; b[2] and b[3]: the same of the others. "
            "Lane 8 i + j gives the address of row j of matrix i, and a row of V is a key.",
            "Lane l gives row l % 16, chunk 2 n + l / 16, at v + place(row, chunk), to ldmatrix_x4_trans.",
        ),
        "not packed": (
            "With S = 1 everywhere, a has to be 1 everywhere, and is not. What does a register of a hold?",
            "Two numbers of 16 bits: pack(x, y) makes them of two floats.",
        ),
        "halves": "Keys 0 to 7 of S meet keys 8 to 15 of V. Keys 0 to 7 are in a[0] and a[1], and in b[0] and b[2].",
        "a": (
            "Compare S and P in the figure under The idea: a register of P takes two elements of S. Which two?",
            "S[0] has keys 0 to 7, S[1] has keys 8 to 15; elements 0 and 1 are of row g, 2 and 3 of row g + 8.",
            "a[0] = pack(S[0][0], S[0][1]); a[1] is the same for row g + 8; a[2] and a[3] come from S[1].",
        ),
        "limit": "The three tiles have padded rows: take every address from place(row, chunk).",
        "bounds": "ldmatrix takes the address of a row: v + place(row, chunk), with row below 16 and chunk below 8.",
    },
)
def two_products(trial: Trial) -> None:
    """Test S = 1 first, where any arrangement of a is right, so that only b can be wrong. Then random numbers."""
    for n, n_kv in trial.sizes("N, N_kv", (16, 32), (33, 17), (1, 1)):
        q, k, v = trial.inputs(n, n_kv, 64, np.float16)
        inputs = {"O, with S = 1": (np.full_like(q, 0.125), np.full_like(k, 0.125)), "O": (q, k)}
        if "pack(1.0f, 1.0f)" in trial.plain:  # a is still as it was: the hint is about a
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
