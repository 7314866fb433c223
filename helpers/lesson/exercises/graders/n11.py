"""Graders of notebook 11: scores with a soft cap, a dilated mask, the gradient of a broadcast bias."""

from __future__ import annotations

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise

SCALE = 0.1875  # the softmax_scale of 11_softcap: not d**-0.5, so that it has to be taken from the arguments


def _capped(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float) -> np.ndarray:
    """Compute causal attention in float64, its scaled scores capped before the mask unless softcap is 0."""
    s = SCALE * product(q, k.T)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s[~reference.visible(len(q), len(k), causal=True)] = -np.inf
    p, total = reference.exponentials(s)
    return p @ v / total


@exercise("11_softcap", minutes=8)
def softcap(trial: Trial) -> None:
    """Test a cap that bends most scores; more rows than keys and the reverse; no cap; scores far beyond the cap."""
    sizes = (
        (32, 32, 16, 2.0, 1),
        (33, 50, 24, 1.5, 1),
        (20, 7, 16, 3.0, 1),
        (17, 35, 16, 0.0, 1),
        (40, 40, 16, 5.0, 400),
    )
    for n, n_kv, d, cap, factor in trial.sizes("N, N_kv, d, softcap, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        o = trial.empty(n, d)
        numbers = n, n_kv, SCALE, cap
        trial.launch("softcap_attention", blocks(n, 32), 32, q, k, v, o, *numbers, HEAD_DIM=d, BLOCK_M=32)
        # With as many keys as rows, row 0 sees one key: a wrongly hidden key shows there first.
        sees_future = n == n_kv and np.abs(trial.xp.asnumpy(o)[0] - v[0]).max() > 1e-4
        expected = _capped(q, k, v, cap)
        with np.errstate(invalid="ignore"):  # unwritten elements are NaN
            wrong = ~(np.abs(trial.xp.asnumpy(o) - expected).max(axis=1) <= 1e-4)
        is_empty = wrong.any() and n > n_kv and not wrong[n - n_kv :].any()
        symptom = "future" if sees_future else "no cap" if cap == 0 else "no key" if is_empty else ""
        tolerance = 1e-5 if factor == 1 else 1e-4
        trial.expect("O", o, expected, symptom=symptom, large=factor > 1, tolerance=tolerance)


@exercise("11_dilated", minutes=10)
def dilated(trial: Trial) -> None:
    """Test a small step, one that skips tiles, one that keeps every key; and rows that see no key."""
    block_m, block_n = 32, 16
    sizes = (64, 64, 16, 3), (70, 200, 16, 100), (33, 50, 24, 1), (40, 7, 8, 2), (1, 90, 8, 30)
    for number, (n, n_kv, d, step) in enumerate(trial.sizes("N, N_kv, d, step", *sizes)):
        q, k, v = trial.inputs(n, n_kv, d)
        o, lse = trial.empty(n, d), trial.empty(n)
        numbers = n, n_kv, d**-0.5, step
        trial.launch("dilated_attention", blocks(n, block_m), block_m, q, k, v, o, lse, *numbers, HEAD_DIM=d)
        distance = np.arange(n)[:, None] + n_kv - n - np.arange(n_kv)
        seen = (distance >= 0) & (distance % step == 0)
        needed = np.zeros(n_kv, int)  # how many blocks have to load each key
        for i in range(0, n, block_m):
            for j in range(0, n_kv, block_n):
                needed[j : j + block_n] += seen[i : i + block_m, j : j + block_n].any()
        report = (trial.report, trial.awkward_report)[number] if number < 2 else None  # only the first two are X-rayed
        loaded = report.fetches["K"][:, 0] if report else needed
        symptom = "lost" if (loaded < needed).any() else ""
        expected, expected_lse = reference.attention(q, k, v, bias=seen, return_lse=True)
        trial.expect("O", o, expected, symptom=symptom)
        trial.expect("lse", lse, expected_lse, symptom=symptom)
        if report:
            what = f"bytes of K loaded at {trial.size}"
            trial.limit(what, 4 * d * int(loaded.sum()), at_most=4 * d * int(needed.sum()), symptom="too many")


@exercise("11_one_for_many", minutes=10)
def one_for_many(trial: Trial) -> None:
    """Test several batches and heads; sizes that tiles do not divide; fewer rows than warps; one batch; eight warps."""
    first = 2, 3, 32, 64
    others = (3, 2, 37, 45, 4), (1, 1, 2, 33, 4), (2, 2, 61, 1, 4), (4, 1, 1, 32, 4), (*first, 8)
    names = "batches, heads, N, N_kv, GROUPS"
    for number, (batches, heads, n, n_kv, groups) in enumerate(trial.sizes(names, (*first, 4), *others)):
        ds = (trial.rng.standard_normal((batches, heads, n, n_kv)) + 0.25).astype(np.float32)
        dbias = trial.empty(heads, n_kv)
        grid, threads = (blocks(n_kv, 32), heads), 32 * groups
        trial.launch("bias_gradient", grid, threads, ds, dbias, batches, n, n_kv, GROUPS=groups)
        got, wide = trial.xp.asnumpy(dbias), ds.astype(np.float64)
        of_batches, of_warps = wide.sum(axis=2), [wide[:, :, i::groups].sum(axis=(0, 2)) for i in range(groups)]
        with np.errstate(invalid="ignore"):  # unwritten elements are NaN
            of_one = {
                "one batch": batches > 1 and any(np.allclose(got, a, atol=1e-4) for a in of_batches),
                "one warp": n > 1 and any(np.allclose(got, a, atol=1e-4) for a in of_warps),
            }
        symptom = next((name for name, found in of_one.items() if found), "")
        trial.expect("dBias", dbias, wide.sum(axis=(0, 2)), symptom=symptom, tolerance=1e-4)
        if number == 0 and trial.report:
            atomics = trial.figures("dBias").atomics + trial.shared().atomics
            trial.limit("atomic additions", atomics, at_most=0, symptom="atomics")
            trial.limit("bytes of dS loaded", trial.report.traffic["dS"].read, at_most=ds.nbytes, symptom="twice")
