"""The exercises of notebook 07: swizzled tiles, accumulators and operands of mma.sync, copies in the background."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "07_swizzle",
    minutes=5,
    hints={
        "limit": (
            "The 8 chunks that are moved at a time must be in 8 different places of 16 bytes: the banks have 8.",
            "ldmatrix: chunk c of rows 0 to 7. cp.async: chunks 0 to 7 of one row. Let the place depend on both.",
            "Any permutation that differs for each of 8 neighbouring rows will do: chunk ^ row % 8, for example.",
        ),
        "bounds": (
            "A chunk leaves its row. A tile has 16 rows, but a row has only 8 places.",
            "Use row % 8: with row = 15 the exclusive or gives numbers up to 15.",
        ),
        "wrong": "Every chunk of a row needs a place of its own, within the 128 bytes of the row.",
        "": "Every chunk of a row needs a place of its own, within the 128 bytes of the row.",
    },
)
def swizzle(trial: Trial) -> None:
    for n in trial.sizes("N", 16, 40, 1):
        _, k, _ = trial.inputs(1, n, 64, np.float16)
        o = trial.empty(n, 64)
        trial.launch("fragments", blocks(n, 16), 32, k, o, n)
        trial.expect("O", o, k.astype(np.float32))
    if trial.report:
        trial.limit("bank conflicts", trial.figures("K_smem").conflicts, exactly=0)


@exercise(
    "07_row_max",
    minutes=6,
    hints={
        "limit": (
            "Two shuffles for each of the two rows. After the first, which lanes hold the same number?",
            "Exchange with the lane whose number differs in bit 0, take the maximum, then the same with bit 1.",
        ),
        "": (
            "Lane 4 g + t: d[0] and d[1] are keys 2 t and 2 t + 1 of row g, d[2] and d[3] the same keys of row g + 8.",
            "The lanes of a row are 4 g to 4 g + 3: their numbers differ in the two lowest bits only.",
            "a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, 1)), then the same with 2.",
        ),
    },
)
def row_max(trial: Trial) -> None:
    for n, n_kv in trial.sizes("N, N_kv", (16, 24), (33, 13), (1, 2)):
        # Distinct, and the same at every try. All are negative: a 0 in place of the lowest float is found.
        s = np.random.default_rng(7).permutation(n * n_kv).reshape(n, n_kv).astype(np.float32) - n * n_kv
        padded = np.full((16 * blocks(n, 16), 8 * blocks(n_kv, 8)), np.finfo(np.float32).min, np.float32)
        padded[:n, :n_kv] = s
        # block, row g or g + 8, g, keys 8 apart, t, pair -> block, lane 4 g + t, row g or g + 8
        own = padded.reshape(-1, 2, 8, padded.shape[1] // 8, 4, 2).max(axis=(3, 5)).transpose(0, 2, 3, 1)
        m, lanes = trial.empty(n), trial.empty(len(own), 32, 2)
        trial.launch("row_max", blocks(n, 16), 32, s, m, lanes, n, n_kv)
        trial.expect("L", lanes, own.reshape(lanes.shape))
        trial.expect("M", m, s.max(axis=1))
    if trial.report:
        trial.limit("shuffles of a warp", trial.report.collectives, at_most=4)
        trial.limit("requests of shared memory", trial.shared().requests, exactly=0)


@exercise(
    "07_find_the_wait",
    minutes=8,
    hints={
        "wait": (
            "A copy starts while others may still read its target. Which tile is in V_smem[stage ^ 1] then?",
            "It is the tile of the round before. How does this thread know that all others have read it?",
            "A thread behind the barrier knows that all threads have left the round before: start the copy there.",
        ),
        "race": "Between the last read of a tile and the copy that replaces it, all threads have to meet at a barrier.",
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
    for n in trial.sizes("N", 72, 16, 1):
        _, _, v = trial.inputs(1, n, 64)
        o = trial.empty(64)
        trial.launch("mean", 1, 64, v, o, n)
        trial.expect("O", o, v.mean(axis=0, dtype=np.float64))
    if trial.report:
        trial.limit("barriers for 5 tiles", trial.report.barriers, at_most=5)


@exercise(
    "07_two_products",
    minutes=12,
    hints={
        "limit": "The three tiles are stored with swizzled chunks: take every address from swizzle(row, chunk).",
        "bounds": "ldmatrix takes the address of a row: v + swizzle(row, chunk), with row below 16 and chunk below 8.",
        "": (
            "Compare the two maps under The idea: a[0], a[1] are rows g, g + 8 of keys 0 to 7, a[2], a[3] of 8 to 15.",
            "S[0] has keys 0 to 7, S[1] has keys 8 to 15; elements 0 and 1 are of row g, 2 and 3 of row g + 8.",
            "V is stored by keys, and B takes its columns: ldmatrix_x4_trans. Lane l: row l % 16, chunk 2 n + l / 16.",
        ),
    },
)
def two_products(trial: Trial) -> None:
    for n, n_kv in trial.sizes("N, N_kv", (16, 32), (33, 17), (1, 1)):
        q, k, v = trial.inputs(n, n_kv, 64, np.float16)
        o = trial.empty(n, 64)
        trial.launch("two_products", blocks(n, 16), 32, q, k, v, o, n, n_kv)
        s = product(q, k.T)
        rounding = np.abs(product(s.astype(np.float16), v) - product(s, v)).max()
        trial.expect("O", o, product(s, v), tolerance=max(2 * float(rounding), 1e-3))
    if trial.report:
        trial.limit("bank conflicts", trial.shared().conflicts, exactly=0)
