"""Graders of 08 and 08b: D by one warp per row, a small backward pass, a sum over blocks, its order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("08_delta", minutes=5)
def delta(trial: Trial) -> None:
    first = 72, 64
    for n, d in trial.sizes("N, d", first, (5, 136), (1, 8)):
        o, do, _ = trial.inputs(n, n, d)
        if n > d:  # the last d rows of O have one non-zero column each: D shows how often it was added
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
    """Return the wrong hole of 08_delta as a symptom, from how many times each column was added.

    A lane may sum columns 32 apart, or pairs of neighbours: in both cases all columns of a lane are added equally
    often. Only the first columns, or all of them, count as a wrong share.
    """
    if np.allclose(times, 32):
        return "32 times"
    if len(times) != 64 or np.allclose(times, np.arange(64) < times.sum()):
        return "share"
    apart, neighbours = times.reshape(2, 32), times.reshape(32, 2).T
    return "lanes" if any(np.allclose(*shares) for shares in (apart, neighbours)) else "share"


@exercise("08_dq_order", minutes=6, notebook="08b")
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


@exercise("08_ds", minutes=10)
def ds(trial: Trial) -> None:
    first, scale = (12, 64, 16, 1), 0.375  # not d**-0.5, so that it has to be taken from the arguments
    sizes = first, (7, 70, 16, 1), (1, 1, 16, 1), (7, 70, 16, 40)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        do, _, _ = trial.inputs(n, 1, d)
        q *= np.float32(factor)
        o, lse = reference.attention(q, k, v, softmax_scale=scale, return_lse=True)
        inputs = (a.astype(np.float32) for a in (q, k, v, do, lse, (do * o).sum(axis=1)))
        dq, dk, dv = outputs = trial.xp.zeros((n, d), np.float32), trial.empty(n_kv, d), trial.empty(n_kv, d)
        trial.launch("gradients", blocks(n_kv, 64), 64, *inputs, *outputs, n, n_kv, scale)
        largest = float(np.abs(scale * product(q, k.T)).max())  # exp turns its rounding into a relative error
        right = reference.attention_backward(do, q, k, v, softmax_scale=scale)
        tolerances = [(1e-5 + 1e-6 * largest) * max(1.0, float(np.abs(a).max())) for a in right]
        got = [trial.xp.asnumpy(a) for a in (dq, dk, dv)]
        symptom = "" if factor > 1 else _wrong_gradient(got, right, tolerances, scale)
        if symptom == "dS":
            p = np.exp(scale * product(q, k.T) - lse[:, None])
            grad = scale * p * (product(do, v.T) - (do * o).sum(axis=1)[:, None])
            exchanged = grad.sum(axis=1)[:, None] * q, grad.sum(axis=0)[:, None] * k  # dQ computed from q, dK from k
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
        return "second hole"  # it is unchanged while the first is not: then p is 1, and dV the number of rows
    if dv:
        return "P" if dk else "dV"
    for factor, symptom in ((1 / scale, "no scale"), (scale, "scale twice")):
        if any(wrong) and not any(a and b for a, b in zip(wrong, off(factor), strict=True)):
            return symptom
    return "dS" if dk and dq else "dK" if dk else "dQ" if dq else ""


@exercise("08_find_the_race", minutes=6)
def find_the_race(trial: Trial) -> None:
    for n, n_kv in trial.sizes("N, N_kv", (16, 128), (5, 70), (3, 1)):
        _, k, _ = trial.inputs(1, n_kv, 64)
        ds, _, _ = trial.inputs(n, 1, n_kv)
        dq, expected = trial.xp.zeros((n, 64), np.float32), product(ds, k)
        trial.launch("sum_of_keys", blocks(n_kv, 64), 64, ds, k, dq, n, n_kv)
        trial.expect("dQ", dq, expected, tolerance=1e-5 * max(1.0, float(np.abs(expected).max())))
    if trial.report:
        trial.limit("atomic additions", trial.figures("dQ").atomics, exactly=2 * 16 * 64)
