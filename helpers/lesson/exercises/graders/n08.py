"""The exercises of 08 and 08b: D by a warp a row, the whole backward in small, a sum over blocks, its order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "08_delta",
    minutes=5,
    hints={
        "reads": (
            "The first hole: 32 lanes should read 32 neighbouring words at a time. Which c does lane 0 read? Lane 1?",
            "Lane l reads columns l, l + 32, l + 64, ...",
        ),
        "shuffles": (
            "The second hole: the result is right, but takes more than five shuffles: masks 16, 8, 4, 2 and 1 suffice.",
        ),
        "atomics": (
            "The second hole: the result is right, but lanes add to D[row] in memory, one after the other. Shuffles "
            "add in registers.",
            "Five exchanges, with masks 16, 8, 4, 2 and 1; then the last line's store is the only access to D[row].",
        ),
        "shared": (
            "The second hole: the result is right, but the sums go through shared memory. Shuffles pass registers from "
            "lane to lane.",
            "Five exchanges, with masks 16, 8, 4, 2 and 1.",
        ),
        "mask": (
            "A lane that is outside the `if`, or whose bit is missing, takes part in no shuffle: all 32 lanes must "
            "call it, with the mask 0xffffffff.",
        ),
        "never ends": "The second hole: a mask of 0 stays 0 when it is halved. At which mask does the loop end?",
        "lanes": (
            "The first hole is right: each lane has its share. But D has the shares of some lanes only, or some twice.",
            "The second hole: five exchanges, with masks 16, 8, 4, 2 and 1, and each adds to sum.",
            "for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);",
        ),
        "32 times": (
            "D is 32 times too large: the second hole adds 32 lanes, and in the first each of them sums the whole row.",
            "for (int c = lane; c < HEAD_DIM; c += 32) is a lane's share, at any HEAD_DIM.",
        ),
        "share": (
            "The first hole: each column of this row is added by one lane, once, as dO[c] * O[c]. Which are not?",
            "for (int c = lane; c < HEAD_DIM; c += 32) is a lane's share, at any HEAD_DIM.",
        ),
        "bounds": "The first hole: a row ends at HEAD_DIM, which may be less than a multiple of 32.",
        "empty": "One lane of each warp writes D[row]: does every row have a warp?",
    },
)
def delta(trial: Trial) -> None:
    first = 72, 64
    for n, d in trial.sizes("N, d", first, (5, 136), (1, 8)):
        o, do, _ = trial.inputs(n, n, d)
        if n > d:  # the last d rows of O have one column each: their D says how often it was added
            o[-d:] = np.eye(d)
        row_sums, expected = trial.empty(n), (do.astype(float) * o).sum(axis=1)
        trial.launch("delta", blocks(n, 4), 128, o, do, row_sums, n, HEAD_DIM=d)
        with np.errstate(invalid="ignore"):
            times = trial.xp.asnumpy(row_sums)[-d:] / expected[-d:] if n > d else np.ones(1)
        trial.expect("D", row_sums, expected, tolerance=1e-4, symptom=_wrong_hole(times))
    if trial.report:
        trial.blame("mask" * any(finding.kind == "inactive lane" for finding in trial.report.findings))
        n, d = first
        for name in ("O", "dO"):
            trial.limit(f"sectors of {name}", trial.figures(name).sectors, at_most=n * d * 4 // 32, symptom="reads")
        shuffles = trial.report.collectives - trial.report.warp_barriers
        trial.limit("shuffles", shuffles, at_most=5 * n, symptom="shuffles")
        trial.limit("atomics on D", trial.figures("D").atomics, exactly=0, symptom="atomics")
        trial.limit("requests of shared memory", trial.shared().requests, exactly=0, symptom="shared")


def _wrong_hole(times: np.ndarray) -> str:
    """Return the wrong hole of 08_delta as a symptom, by how many times each column is in the sum.

    Lanes whose share is right have columns 32 apart or, which is right as well, two neighbours: the columns of a lane
    are then added equally often. Columns 0 to 31 alone are taken for a wrong share.
    """
    if np.allclose(times, 32):
        return "32 times"
    if len(times) != 64 or np.allclose(times, 1) or np.allclose(times, np.arange(64) < 32):
        return "share"
    apart, neighbours = times.reshape(2, 32), times.reshape(32, 2).T
    return "lanes" if any(np.allclose(*shares) for shares in (apart, neighbours)) else "share"


TWICE = (
    "The first hole: two elements have one place. 32 lanes, 4 elements a lane and 8 fragments need 1,024 places.",
    "Count: an element of all lanes takes 32 places, a fragment 4 times as many.",
)
OUTSIDE = (
    "The first hole: 16 rows have 1,024 places in accum, 0 to 1,023. What is the largest place(f, i)?",
    "A fragment takes 128 places: 4 elements of 32 lanes.",
)


@exercise(
    "08_dq_order",
    minutes=6,
    notebook="08b",
    hints={
        "sectors": (
            "The first hole: 32 lanes that touch 32 neighbouring floats touch 4 sectors. By how much do the places of "
            "lanes 0 and 1 differ in yours?",
            "Elements i of all lanes side by side: lane 0, lane 1, ..., lane 31; then elements i + 1.",
            "return 128 * f + 32 * i + threadIdx.x;",
        ),
        "rows": (
            "accum has each sum once, at the place of the first hole. The second hole still reads it elsewhere.",
            "A lane of rows_of has the elements of one of add: dQ has them at element(f, i), accum at place(f, i).",
        ),
        "twice": TWICE,
        "bounds": OUTSIDE,
        "crash": OUTSIDE,
        "race": "Several blocks add to one place of accum: leave the addition to atomicAdd; only the place changes.",
        "": (
            "Each of the 1,024 sums of 16 rows needs a place in accum, and rows_of has to find it there.",
            "place(f, i) depends on f, i and the lane; rows_of reads accum at place(f, i).",
        ),
    },
)
def dq_order(trial: Trial) -> None:
    first, d = (32, 3), 64
    for n, many in trial.sizes("N, blocks", first, (16, 1), (80, 2)):
        shares = trial.rng.standard_normal((many, n, d)).astype(np.float32) + np.float32(0.25)
        accum, dq = trial.xp.zeros(n * d, np.float32), trial.empty(n, d)
        trial.launch("add", (n // 16, many), 32, shares, accum, n)
        trial.launch("rows_of", n // 16, 32, accum, dq)
        expected = shares.astype(float).sum(axis=0)
        sums = np.sort(trial.xp.asnumpy(accum))
        all_there = np.allclose(sums, np.sort(expected.ravel()), rtol=0, atol=1e-4)
        trial.expect("dQ", dq, expected, tolerance=1e-4, symptom="rows" if all_there else "twice")
    if trial.report:
        added = trial.reports[0].traffic["accum"]
        trial.limit("sectors a request of add", added.sectors_per_request, exactly=4, symptom="sectors")
        trial.limit("atomic additions", added.atomics, exactly=first[0] * first[1] * d)


OF_ROWS = (
    "Which number does an index count? dQ, Q, dO, lse and D have a place for each row, K, V, dK and dV for each key.",
    "In this loop, lse[row], D[row] and dQ[row * d + c] are of the row, dk[c] and dv[c] of the thread's key.",
)


@exercise(
    "08_ds",
    minutes=10,
    hints={
        "race": "All threads add to the same rows of dQ. Use atomicAdd there; dk and dv belong to one thread.",
        "large": (
            "No maximum is needed here: which number of this row contains it, and the sum of all exponentials?",
            "p = expf(softmax_scale * s - lse[row]): the difference is never above 0, apart from rounding.",
        ),
        "crash": OF_ROWS,
        "bounds": OF_ROWS,
        "exchanged": (
            "The second hole: p and ds are right, but q and k are exchanged: dK = scale dS^T Q, and dQ = scale dS K.",
            "The thread's key gets ds times the row's q; the row gets ds times the key's k.",
        ),
        "P": (
            "The first hole: dV and dK are wrong, and P is in both. P is normalised: lse has maximum and sum in it.",
            "p = expf(softmax_scale * s - lse[row]); then dv[c] += p * d_o[c].",
        ),
        "second hole": (
            "The second hole: dV has the same number in all columns: where is dO? dV = P^T dO, dK = scale dS^T Q.",
            "dv[c] += p * d_o[c]; dK and dQ are sums of softmax_scale * ds * q[c] and softmax_scale * ds * k[c].",
        ),
        "dV": (
            "The second hole: dK is right, so p is. What does this row add to dv[c]? dV = P^T dO.",
            "dv[c] += p * d_o[c].",
        ),
        "dS": (
            "The first hole: dV is right, so p is, and dK and dQ are wrong. dS = P * (dP - D): which one is wrong?",
            "dp is the sum of d_o[c] * v[c] over all c.",
            "ds = p * (dp - D[row]).",
        ),
        "dK": (
            "The second hole: dV and dQ are right, so p and ds are. What does a row add to dk[c]? dK = scale dS^T Q.",
            "dk[c] += softmax_scale * ds * q[c].",
        ),
        "dQ": (
            "The second hole: dK is right, so ds is. dQ of a row is the sum of softmax_scale * ds * k of all threads.",
            "atomicAdd(&dQ[row * d + c], softmax_scale * ds * k[c]).",
        ),
        "no scale": (
            "got / expected is 4 in each element of this gradient, and softmax_scale is 1/4 here: where is it missing?",
            "s is q k without the scale: softmax_scale belongs in p, in dK and in dQ.",
        ),
        "scale twice": (
            "got / expected is 1/4 in each element of this gradient, and so is softmax_scale here: is it in twice?",
            "dK and dQ have it once: in ds, or in the lines that use ds.",
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
        tolerances = [(1e-5 + 1e-6 * largest) * max(1.0, float(np.abs(a).max())) for a in right]
        got = [trial.xp.asnumpy(a) for a in (dq, dk, dv)]
        symptom = "" if factor > 1 else _wrong_gradient(got, right, tolerances, scale)
        if symptom == "dS":
            p = np.exp(scale * product(q, k.T) - lse[:, None])
            grad = scale * p * (product(do, v.T) - (do * o).sum(axis=1)[:, None])
            exchanged = grad.sum(axis=1)[:, None] * q, grad.sum(axis=0)[:, None] * k  # dQ of q, and dK of k
            if all(np.allclose(a, b, atol=1e-3) for a, b in zip(got, exchanged, strict=False)):
                symptom = "exchanged"
        for name, i in (("dV", 2), ("dK", 1), ("dQ", 0)):
            trial.expect(name, outputs[i], right[i], tolerance=tolerances[i], large=factor > 1, symptom=symptom)
    if trial.report:
        products = math.prod(first)
        trial.limit("atomic additions", trial.figures("dQ").atomics, at_most=products)
        for name in ("Q", "dO"):
            trial.limit(f"bytes of {name} read", trial.figures(name).read, at_most=4 * products)


def _wrong_gradient(
    got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerances: Sequence[float], scale: float
) -> str:
    """Return the symptom in 08_ds, by which of dQ, dK and dV are wrong together."""

    def off(factor: float) -> list[bool]:
        with np.errstate(invalid="ignore"):
            compared = zip(got, expected, tolerances, strict=True)
            return [not bool(np.abs(a - factor * b).max() <= factor * most) for a, b, most in compared]

    dq, dk, dv = wrong = off(1.0)
    if dv and np.ptp(got[2], axis=1).max() == 0 and (got[2] != len(got[0])).any():
        return "second hole"  # it is as it was, and the first is not: there p is 1, and dV the number of rows
    if dv:
        return "P" if dk else "dV"
    for factor, symptom in ((1 / scale, "no scale"), (scale, "scale twice")):
        if any(wrong) and not any(a and b for a, b in zip(wrong, off(factor), strict=True)):
            return symptom
    return "dS" if dk and dq else "dK" if dk else "dQ" if dq else ""


@exercise(
    "08_find_the_race",
    minutes=6,
    hints={
        "race": (
            "Two blocks read an element of dQ, add to it and store it: what happens if both read before either stores?",
            "atomicAdd(&dQ[...], x) reads, adds and stores as one step. (__syncthreads() is for one block.)",
        ),
        "limit": (
            "The sum over this block's keys needs no other block: must other blocks see it before it is complete?",
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
