"""Graders of notebook 09: a causal mask in either corner, the mean of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helpers.attention import reference
from helpers.attention.check import TOLERANCE
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("09_two_corners", minutes=6)
def two_corners(trial: Trial) -> None:
    """Test more keys than rows, more rows than keys, as many, and one row, under both rules."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (24, 40, 8), (70, 33, 8), (17, 17, 8), (1, 9, 8)):
        q, k, v = trial.inputs(n, n_kv, d)
        tried = {}
        for top_left, corner in enumerate(("bottom-right", "top-left")):
            o = trial.empty(n, d)
            trial.launch("attention", blocks(n, 64), 64, q, k, v, o, n, n_kv, top_left, d**-0.5, HEAD_DIM=d)
            seen = np.tri(n, n_kv, 0 if top_left else n_kv - n, dtype=bool)
            expected = np.zeros((n, d))
            for i in np.flatnonzero(seen.any(axis=1)):
                expected[i] = reference.attention(q[i : i + 1], k[seen[i]], v[seen[i]])
            tried[corner] = trial.xp.asnumpy(o), expected
            if trial.report and n == 24:
                keys = trial.figures("K").read // (4 * d)
                trial.limit(f"keys read, {corner}", keys, at_most=int(seen.sum()))
        wrong = [corner for corner, (o, expected) in tried.items() if not np.allclose(o, expected, atol=TOLERANCE)]
        if len(wrong) == 2:
            (first, of_first), (second, of_second) = tried.values()
            is_exchanged = np.allclose(first, of_second, atol=1e-4) and np.allclose(second, of_first, atol=1e-4)
            wrong = ["exchanged" if is_exchanged else "both"]
        for corner, (o, expected) in tried.items():
            trial.expect("O", o, expected, at=f"{corner}, {trial.size}", symptom=wrong[0] if wrong else "")


def _unit(rows: np.ndarray) -> np.ndarray:
    """Divide rows (n, width) by their lengths; a row of zeros stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


@np.errstate(invalid="ignore")  # unwritten elements are NaN
def _wrong_mean(out: np.ndarray, expected: np.ndarray, x: np.ndarray, lengths: Sequence[int]) -> str:
    """Return the symptom of wrong means (sentences, width) of rows x; "" if it is unknown."""
    out, has_rows = out.astype(float), np.array(lengths) > 0
    if not has_rows.all() and np.allclose(out[has_rows], expected[has_rows], atol=1e-4):
        return "empty sentence"
    width, columns = expected.shape[1], -(-expected.shape[1] // 128)
    c = np.arange(width)
    neighbours = c % 128 * columns + c // 128
    if width > 128 and neighbours.max() < width and np.allclose(out, expected[:, neighbours], atol=1e-4):
        return "neighbours"
    is_zero, i = (out == 0).all(axis=0), c // 128
    if is_zero.any() and not is_zero.all() and set(i[is_zero]).isdisjoint(i[~is_zero]):
        return "missing"
    # A thread uses one total for all of its columns; where the total is 0, it stores 0.
    seen = np.where(out == 0, 0.0, expected)
    threads = [(_unit(a[:, t::128]) for a in (out, seen)) for t in range(128)]
    if width > 128 and out.any() and all(np.allclose(*pair, atol=1e-3) for pair in threads):
        return "length"
    sums = np.concatenate([np.zeros((1, width)), np.cumsum(x, axis=0, dtype=float)])
    ranges = _unit(np.array([sums[j] - sums[i] for j in range(1, len(sums)) for i in range(j)]))
    are_ranges = all(np.abs(ranges - row).max(axis=1).min() < 1e-4 for row in _unit(out[has_rows]))
    return "other rows" if are_ranges else ""


@exercise("09_mean_pool", minutes=9)
def mean_pool(trial: Trial) -> None:
    """Test sentences of several lengths, one of them empty, and widths that are not multiples of 128."""
    first = 384, (3, 5)
    for width, lengths in trial.sizes("WIDTH, lengths", first, (520, (1, 0, 33, 2)), (40, (7,))):
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        x = trial.rng.standard_normal((ends[-1], width), dtype=np.float32) + np.float32(0.25)
        out = trial.empty(len(lengths), width)
        trial.launch("mean_pool", len(lengths), 128, x, ends, out, WIDTH=width)
        sums = np.stack([part.sum(axis=0, dtype=float) for part in np.split(x, ends[1:-1])])
        expected = _unit(sums)
        symptom = _wrong_mean(trial.xp.asnumpy(out), expected, x, lengths)
        trial.expect("out", out, expected, symptom=symptom)
    if trial.report:
        width, lengths = first
        trial.limit("elements of X read", trial.figures("X").read // 4, at_most=sum(lengths) * width)
        trial.limit("barriers", trial.report.barriers, at_most=len(lengths))
