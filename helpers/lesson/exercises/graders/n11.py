"""The exercise of notebook 11: scores with a soft cap."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


def _capped(q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float) -> np.ndarray:
    """Causal attention whose scaled scores are capped before the mask, float64. A row that sees no key is 0."""
    s = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(q.shape[1])
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s[~reference.visible(len(q), len(k), causal=True)] = -np.inf
    largest = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(largest), largest, 0.0))
    total = p.sum(axis=1, keepdims=True)
    return p @ v / np.where(total > 0, total, 1.0)


@exercise(
    "11_softcap",
    minutes=8,
    hints={
        "future": (
            "Row 0 sees key 0 alone, so its output is V's first row whatever the cap. Is a hidden key still hidden?",
            "tanh(-inf) is -1: a key that is hidden before the cap comes back with the score -softcap.",
            "First scale and cap, then hide: return seen ? ... : NEG_INF.",
        ),
        "no cap": (
            "With softcap = 0 there is no cap, as in FlashAttention. What does your line make of every score then?",
            "if (softcap > 0.0f) s = softcap * tanhf(s / softcap);",
        ),
        "large": (
            "Scores far beyond the cap: tanh is 1 there. How do you compute it, and which exponential overflows?",
            "tanhf has no such limit. By hand: 1 - 2 / (exp(2 x) + 1), where an infinite exp(2 x) gives 1.",
        ),
        "": (
            "In which order: the scale, the cap, the mask, the change to powers of 2?",
            "The cap is for the scaled score, in natural units: s = dot * softmax_scale, and LOG2_E comes last.",
            "s = softcap * tanhf(s / softcap): divided before, multiplied again after.",
        ),
    },
)
def softcap(trial: Trial) -> None:
    """A cap that bends most scores; more rows than keys, more keys than rows; no cap; scores far beyond the cap."""
    sizes = (
        (32, 32, 16, 2.0, 1),
        (33, 50, 16, 1.5, 1),
        (20, 7, 16, 3.0, 1),
        (17, 35, 16, 0.0, 1),
        (40, 40, 16, 5.0, 400),
    )
    for n, n_kv, d, cap, factor in trial.sizes("N, N_kv, d, softcap, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        o = trial.empty(n, d)
        numbers = n, n_kv, d**-0.5, cap
        trial.launch("softcap_attention", blocks(n, 32), 32, q, k, v, o, *numbers, HEAD_DIM=d, BLOCK_M=32)
        # Row 0 sees one key when there are as many keys as rows: a hidden key shows there first.
        sees_future = n == n_kv and np.abs(trial.xp.asnumpy(o)[0] - v[0]).max() > 1e-4
        symptom = "future" if sees_future else "no cap" if cap == 0 else ""
        tolerance = 1e-5 if factor == 1 else 1e-4
        trial.expect("O", o, _capped(q, k, v, cap), symptom=symptom, large=factor > 1, tolerance=tolerance)
