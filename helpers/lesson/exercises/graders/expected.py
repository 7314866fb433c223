"""Expected values that several graders compare with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.trial import Trial


class Parts(NamedTuple):
    """Intermediate values in float64: scaled scores s, row maxima m, p = exp(s - m), row sums l, lse, the output o."""

    s: np.ndarray
    m: np.ndarray
    p: np.ndarray
    l: np.ndarray  # noqa: E741 (the paper's name)
    lse: np.ndarray
    o: np.ndarray


def attention_parts(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Parts:
    """Compute the parts of attention for q (n, d), k and v (n_kv, d)."""
    s = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(q.shape[1])
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    row_sums = p.sum(axis=1)
    return Parts(s, m, p, row_sums, m + np.log(row_sums), reference.attention(q, k, v))


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b in float64."""
    return a.astype(np.float64) @ b.astype(np.float64)


def wrong_for_one_key(trial: Trial, o: Any, expected: np.ndarray, seen: np.ndarray) -> str:
    """Return "one key" if only rows that see exactly one key are wrong, else "". See `expect_v`."""
    wrong = ~np.isclose(trial.xp.asnumpy(o), expected, rtol=0, atol=1e-3).all(axis=1)
    return "one key" if wrong.any() and (seen[wrong].sum(axis=1) == 1).all() else ""


def expect_v(trial: Trial, o: Any, v: np.ndarray, seen: np.ndarray | None = None) -> None:
    """Expect rows that see a single key to return its row of V, bit for bit.

    Args:
        o: the output (n, d), on the device. seen: (n, n_kv) of bool, True where the row sees the key; None: everywhere.
    """
    o = trial.xp.asnumpy(o)
    seen = np.ones((len(o), len(v)), bool) if seen is None else seen
    rows = np.flatnonzero(seen.sum(axis=1) == 1)
    if len(rows):
        what = "O of the rows that see one key, which is a row of V"
        trial.expect(what, o[rows], v[seen[rows].argmax(axis=1)], tolerance=0, symptom="one key")


def blocks(n: int, block: int) -> int:
    """Count the blocks of `block` that cover n."""
    return -(-n // block)
