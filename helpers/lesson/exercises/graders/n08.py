"""The exercises of notebook 08: D by a warp a row, the whole backward in small, a sum over blocks."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "08_delta",
    minutes=5,
    hints={
        "limit": (
            "The 32 lanes of a warp should read 32 neighbouring words at a time: which c does lane 0 read, lane 1?",
            "Lane l reads columns l, l + 32, ... Five exchanges, with masks 16, 8, 4, 2 and 1, give all lanes the sum.",
        ),
        "empty": "One lane of each warp writes D[row]: does every row have a warp?",
        "": (
            "Each column is added by one lane, and then the sums of 32 lanes become one. Which of the two is missing?",
            "for (int c = lane; c < HEAD_DIM; c += 32) is a lane's share, at any HEAD_DIM.",
            "for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);",
        ),
    },
)
def delta(trial: Trial) -> None:
    first = 8, 64
    for n, d in trial.sizes("N, d", first, (5, 40), (1, 8)):
        o, do, _ = trial.inputs(n, n, d)
        row_sums = trial.empty(n)
        trial.launch("delta", blocks(n, 4), 128, o, do, row_sums, n, HEAD_DIM=d)
        trial.expect("D", row_sums, (do.astype(float) * o).sum(axis=1), tolerance=1e-4)
    if trial.report:
        n, d = first
        for name in ("O", "dO"):
            trial.limit(f"sectors of {name}", trial.figures(name).sectors, at_most=n * d * 4 // 32)
        trial.limit("shuffles", trial.report.collectives, at_most=5 * n)


@exercise(
    "08_ds",
    minutes=10,
    hints={
        "race": "All threads add to the same rows of dQ. Use atomicAdd there; dk and dv belong to one thread.",
        "large": (
            "No maximum is needed here: which number of this row has it, and the sum of all exponentials, in it?",
            "p = expf(softmax_scale * s - lse[row]): the difference is never above 0, apart from rounding.",
        ),
        "P": (
            "dV is wrong, and it needs P alone. P is already normalised: lse has the maximum and the sum in it.",
            "p = expf(softmax_scale * s - lse[row]), and dv[c] += p * d_o[c].",
        ),
        "dS": (
            "dV is right, so P is. dS = P * (dP - D): which of the three is wrong?",
            "dp is the sum of d_o[c] * v[c]. Is softmax_scale a factor of dK and of dQ?",
            "ds = p * (dp - D[row]); dk[c] += softmax_scale * ds * q[c].",
        ),
        "dQ": (
            "dK is right, so dS is. dQ of a row is the sum of softmax_scale * ds * k over all keys: of all threads.",
            "atomicAdd(&dQ[row * d + c], softmax_scale * ds * k[c]).",
        ),
        "limit": ("Each thread adds once to each element of dQ, and reads each element of Q and dO once.",),
        "": (
            "dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K: which of them is wrong in the line above?",
            "A thread has one key j: row i adds P[i][j] dO[i] to its dV and scale dS[i][j] Q[i] to its dK.",
        ),
    },
)
def ds(trial: Trial) -> None:
    first, scale = (12, 64, 16, 1), 0.25
    sizes = first, (7, 70, 16, 1), (1, 1, 16, 1), (7, 70, 16, 40)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        do, _, _ = trial.inputs(n, 1, d)
        q *= np.float32(factor)
        o, lse = reference.attention(q, k, v, softmax_scale=scale, return_lse=True)
        inputs = (a.astype(np.float32) for a in (q, k, v, do, lse, (do * o).sum(axis=1)))
        dq, dk, dv = outputs = trial.xp.zeros((n, d), np.float32), trial.empty(n_kv, d), trial.empty(n_kv, d)
        trial.launch("gradients", blocks(n_kv, 64), 64, *inputs, *outputs, n, n_kv, scale)
        largest = float(np.abs(scale * product(q, k.T)).max())  # exp makes of its rounding a relative error
        right = reference.attention_backward(do, q, k, v, softmax_scale=scale)
        for name, got, expected, symptom in (
            ("dV", dv, right[2], "P"),
            ("dK", dk, right[1], "dS"),
            ("dQ", dq, right[0], "dQ"),
        ):
            tolerance = (1e-5 + 1e-6 * largest) * max(1.0, float(np.abs(expected).max()))
            is_large = factor > 1
            trial.expect(name, got, expected, tolerance=tolerance, large=is_large, symptom="" if is_large else symptom)
    if trial.report:
        products = math.prod(first)
        trial.limit("atomic additions", trial.figures("dQ").atomics, at_most=products)
        for name in ("Q", "dO"):
            trial.limit(f"bytes of {name} read", trial.figures(name).read, at_most=4 * products)


@exercise(
    "08_find_the_race",
    minutes=6,
    hints={
        "race": (
            "Two blocks read an element of dQ, add to it and store it: what happens if both read before either stores?",
            "atomicAdd(&dQ[...], x) reads, adds and stores as one step. (__syncthreads() is for one block.)",
        ),
        "limit": (
            "The sum over the keys of this block needs no other block: who has to see it before it is complete?",
            "Add up the block's 64 keys in a register, and then add that to dQ, once.",
        ),
        "": (
            "dQ of a row is the sum over all keys, of all blocks: is each block's share added, once?",
            "float sum = 0.0f; a loop over this block's keys; then one atomicAdd.",
        ),
    },
)
def find_the_race(trial: Trial) -> None:
    for n, n_kv in trial.sizes("N, N_kv", (16, 128), (5, 70), (3, 1)):
        _, k, _ = trial.inputs(1, n_kv, 64)
        ds, _, _ = trial.inputs(n, 1, n_kv)
        dq, expected = trial.xp.zeros((n, 64), np.float32), product(ds, k)
        trial.launch("sum_of_keys", blocks(n_kv, 64), 64, ds, k, dq, n, n_kv)
        trial.expect("dQ", dq, expected, tolerance=1e-5 * max(1.0, float(np.abs(expected).max())))
    if trial.report:
        trial.limit("atomic additions", trial.figures("dQ").atomics, exactly=2 * 16 * 64)
