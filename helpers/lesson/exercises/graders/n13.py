"""Graders of notebook 13: Q as a right operand that is summed over rows, and the fence before a bulk addition."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import product
from helpers.lesson.exercises.graders.n10 import tensor_map_of
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("13_mn_major", minutes=8, only_cc=90)
def mn_major(trial: Trial) -> None:
    for n in trial.sizes("N", 128, 70, 1):
        q, ds, _ = (a.astype(np.float16) for a in trial.inputs(n, n, 128))
        ds = ds[:, :64].copy()
        q_on_device, dk, expected = trial.xp.asarray(q), trial.empty(64, 128), product(ds.T, q)
        symptom = ""
        try:
            trial.launch("gradient", 1, 128, tensor_map_of(trial, q_on_device, 64), trial.xp.asarray(ds), dk, n)
            tolerance = 1e-3 * max(1.0, float(np.abs(expected).max()))
            left = np.abs(trial.xp.asnumpy(dk)[:, :64] - expected[:, :64])
            symptom = "panels" if left.max() <= tolerance else "step"
            trial.expect("dK", dk, expected, tolerance=tolerance)
        finally:
            kinds = [finding.kind for finding in trial.report.findings[:1]] if trial.report else []
            trial.blame(symptom or ("step" if kinds == ["misaligned"] else "bounds"), everywhere=True)
    if trial.report:
        products = sum(event.kind == "product" for event in trial.report.events)
        trial.limit("products", products, exactly=8)


@exercise("13_find_the_fence", minutes=7, only_cc=90)
def find_the_fence(trial: Trial) -> None:
    first = 3, 4
    for blocks, tiles in trial.sizes("blocks, tiles", first, (2, 1), (1, 5)):
        parts, _, _ = trial.inputs(blocks, 1, 512 * tiles)
        dq, expected = trial.xp.zeros((tiles, 512), np.float32), parts.astype(float).sum(0).reshape(tiles, 512)
        trial.launch("add_tiles", blocks, 160, parts, dq, tiles)
        trial.expect("dQ", dq, expected, tolerance=1e-5 * max(1.0, float(np.abs(expected).max())))
    if trial.report:
        if any(finding.kind == "no proxy fence" for finding in trial.report.findings):
            trial.blame("fence")
        trial.limit("bytes added", trial.figures("dQ").written, exactly=2048 * first[0] * first[1])
