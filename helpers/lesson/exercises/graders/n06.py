"""Graders of notebook 06."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise
from helpers.xray import Finding

SCALE = 0.1875  # the softmax_scale of 06_row_of_scores: not d**-0.5, so that it has to be taken from the arguments


@exercise("06_row_of_scores", minutes=18)
def row_of_scores(trial: Trial) -> None:
    """Test whole tiles, then several steps of k, then a tail of keys and of rows. All scores of key 5 are 0.

    The only score of the last size is -12288: next to it, too, keys past the end must not count.
    """
    first, steps = (32, 48, 16), (16, 32, 48)
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, steps, (33, 65, 16), (1, 1, 16)):
        q, k, _ = trial.inputs(n, n_kv, d, np.float16)
        k[5:6] = 0  # like a row of q
        if n == 1:
            q[...], k[...] = -4096, 1
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 16), 32, q, k, lse, n, n_kv, SCALE, HEAD_DIM=d)
        expected = _lse(q, k)
        symptom = "steps" if (n, n_kv, d) == steps else ""
        if (n, n_kv, d) == first:
            s = product(q, k.T).reshape(n // 16, 16, n_kv // 16, 16) * SCALE
            others = np.delete(k, 5, axis=0)
            q_transposed = q.reshape(-1, 16, 16).swapaxes(1, 2).reshape(q.shape)
            k_transposed = k.reshape(-1, 16, 16).swapaxes(1, 2).reshape(k.shape)
            slips = {
                "zero": _lse(q, others),
                "scale": _lse(q, k, 1.0),
                "layout of Q": _lse(q_transposed, k),
                "layout of K": _lse(q, k_transposed),
                "by columns": np.log(np.exp(s).sum(axis=(1, 2))).ravel(),
                "keys": _lse(q, k[:-1]),
            }
            some = q.any(axis=1)  # all scores of the other row are 0
            symptom = trial.slip(trial.xp.asnumpy(lse)[some], {name: a[some] for name, a in slips.items()})
        trial.expect("lse", lse, expected, tolerance=1e-4, symptom=symptom)
    if trial.report:
        trial.blame(_unset(trial, trial.report.findings))
        products = trial.report.tensor_flop // (2 * 16 * 16 * 16)
        needed = first[0] // 16 * first[1] // 16 * first[2] // 16
        trial.limit("products by mma_sync", products, at_least=needed, symptom="no product")


def _lse(q: np.ndarray, k: np.ndarray, scale: float = SCALE) -> np.ndarray:
    """Compute the log-sum-exp of each row's scores (n,) for q (n, d) and k (n_kv, d)."""
    return reference.attention(q, k, k, softmax_scale=scale, return_lse=True)[1]


def _unset(trial: Trial, findings: Sequence[Finding]) -> str:
    """Return the symptom of a read of an unwritten word: a wrong stride or missing code; "" without such a read."""
    array = next((f.array or "" for f in findings[:1] if f.kind == "uninitialised"), "")
    if "S_smem" in array:
        return "stride of S" if trial.figures("S_smem").written else "not stored"
    return "stride of Q and K" if "_smem" in array else ""


@exercise("06_factor_fragment", minutes=12)
def factor_fragment(trial: Trial) -> None:
    """Test P and M of an online softmax; bytes written to shared memory are limited.

    The second size is computed twice on the CPU, the second time with accumulators in a layout that no GPU has.
    """
    first, both = (32, 48, 32), (48, 112, 48)
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, both, (16, 16, 32)):
        _, _, v = trial.inputs(n, n_kv, d, np.float16)
        s = trial.rng.normal(0, 2, (n, n_kv // 16, 16))
        m = np.maximum.accumulate(s.max(axis=2), axis=1)  # (n, tiles): after each tile
        p = np.exp2(s - m[:, :, None]).reshape(n, n_kv).astype(np.float16)
        maxima = np.ascontiguousarray(m.T, np.float32)
        weights = p * np.exp2(maxima - maxima[-1]).T.astype(np.float64).repeat(16, axis=1)
        arguments = "rescaled_sum", blocks(n, 16), 32, p, v, maxima
        o = trial.empty(n, d)
        trial.launch(*arguments, o, n, n_kv, HEAD_DIM=d)
        expected = product(weights, v)
        trial.expect(
            "O", o, expected, tolerance=1e-4, symptom=_wrong_factor(trial.xp.asnumpy(o), expected, p, v, maxima)
        )
        if (n, n_kv, d) == both and not trial.on_gpu:
            o = trial.empty(n, d)
            trial.launch(*arguments, o, n, n_kv, HEAD_DIM=d, __ENGINE_WMMA_SWAP=2)
            at = f"{trial.size}, accumulators in another layout"
            trial.expect("O", o, product(weights, v), at=at, tolerance=1e-4, symptom="layout")
    if trial.report:
        is_outside = [f.kind == "out of bounds" and f.message.startswith("write") for f in trial.report.findings[:1]]
        trial.blame("outside" * any(is_outside))
        tiles = first[0] // 16 * first[1] // 16
        what, written = "bytes written to shared memory for a tile", trial.shared().written // tiles
        symptom = "twice" if written <= 128 else "array" if written <= 2 * 4 * 16 * 16 else "trip"
        trial.limit(what, written, at_most=64, symptom=symptom)


@np.errstate(invalid="ignore")  # unwritten elements are NaN
def _wrong_factor(o: np.ndarray, expected: np.ndarray, p: np.ndarray, v: np.ndarray, maxima: np.ndarray) -> str:
    """Return the symptom of wrong factors in 06_factor_fragment; "" if it is unknown."""
    row, column = np.indices((16, 16))
    slips = {"by columns": column, "own row": (row % 8 * 4 + column % 8 // 2) % 16}
    for symptom, factor in slips.items():
        if len(maxima) > 1 and np.allclose(o, _multiplied(p, v, maxima, factor), atol=1e-4):
            return symptom
    wrong = (np.abs(o - expected) > 1e-4).reshape(len(o), -1, 16).any(axis=(0, 2))
    return "some" if wrong.any() and not wrong.all() else ""


def _multiplied(p: np.ndarray, v: np.ndarray, maxima: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Compute the sum with each element (r, c) of 16 x 16 accumulators times the factor of row `factor[r, c]`."""
    n, d = len(p), v.shape[1]
    acc = np.zeros((n // 16, 16, d))
    for tile in range(len(maxima)):
        if tile:
            factors = np.exp2(maxima[tile - 1] - maxima[tile]).reshape(n // 16, 16)[:, factor]
            acc *= np.tile(factors, (1, 1, d // 16))
        keys = slice(16 * tile, 16 * tile + 16)
        acc += product(p[:, keys], v[keys]).reshape(acc.shape)
    return acc.reshape(n, d)


@exercise("06_find_the_race", minutes=9)
def find_the_race(trial: Trial) -> None:
    """Find the race by the X-ray, and count barriers: the numbers are right even without the barrier."""
    first = 32, 48, 16
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (16, 16, 16), (48, 112, 48)):
        q, k, v = (0.5 * a for a in trial.inputs(n, n_kv, d, np.float16))
        o = trial.empty(n, d)
        run = trial.launch("weighted_sum", blocks(n, 16), 32, q, k, v, o, n, n_kv, HEAD_DIM=d)
        p = np.exp2(product(q, k.T))
        size = float(product(p, np.abs(v)).max())  # P is rounded to 11 bits
        trial.expect("O", o, product(p, v), tolerance=size * 2.0**-10)
    if trial.report:
        tiles = first[0] // 16 * first[1] // 16
        barriers = (trial.report.warp_barriers + trial.report.barriers) // tiles
        symptom = "barriers" if barriers <= 5 else "barriers in a loop"
        trial.limit("barriers for a tile", barriers, at_most=4, symptom=symptom)
        trial.limit("bytes of shared memory", run.shared_size_bytes, at_most=1280, symptom="bytes")
