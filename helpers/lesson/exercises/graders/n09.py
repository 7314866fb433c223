"""The exercises of notebook 09: a causal mask in either corner, the mean of packed rows."""

from __future__ import annotations

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "09_two_corners",
    minutes=6,
    hints={
        "top-left": (
            "Right for top_left = 0, wrong for top_left = 1: there, N and N_kv play no part in which keys a row sees.",
            "Row i sees keys 0 .. i, so end is row + 1, and at most N_kv.",
        ),
        "bottom-right": (
            "Right for top_left = 1, wrong for top_left = 0. Then the last row sees all keys: how many does row 0 see?",
            "Row i is at key i + N_kv - N. Where N is larger than N_kv, the first rows are before key 0.",
            "end = max(0, min(row + 1 + N_kv - N, N_kv)).",
        ),
        "bounds": "With more rows than keys, row + 1 is beyond the last key: end is at most N_kv.",
        "limit": "O is right, so rows read keys that they do not use. Where does the loop end?",
        "": (
            "Draw 2 rows and 4 keys, and mark what each row sees under either rule.",
            "Both rules are row + 1 + shift keys, with shift 0 or N_kv - N.",
        ),
    },
)
def two_corners(trial: Trial) -> None:
    """More keys than rows, more rows than keys, as many, one row: under both rules."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (24, 40, 8), (70, 33, 8), (17, 17, 8), (1, 9, 8)):
        q, k, v = trial.inputs(n, n_kv, d)
        for top_left, corner in enumerate(("bottom-right", "top-left")):
            o = trial.empty(n, d)
            trial.launch("attention", blocks(n, 64), 64, q, k, v, o, n, n_kv, top_left, d**-0.5, HEAD_DIM=d)
            seen = np.tri(n, n_kv, 0 if top_left else n_kv - n, dtype=bool)
            expected = np.zeros((n, d))
            for i in np.flatnonzero(seen.any(axis=1)):
                expected[i] = reference.attention(q[i : i + 1], k[seen[i]], v[seen[i]])
            trial.expect("O", o, expected, at=f"{corner}, {trial.size}", symptom=corner)
            if trial.report and n == 24:
                keys = trial.figures("K").read // (4 * d)
                trial.limit(f"keys read, {corner}", keys, at_most=int(seen.sum()))


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows (n, width) divided by their lengths; a row of zeros stays one."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


@exercise(
    "09_mean_pool",
    minutes=9,
    hints={
        "race": (
            "The X-ray names two lines: a thread reads of_warp before another has written it. What has to be between?",
            "A __syncthreads() after the stores to of_warp, and before all threads add up its four elements.",
        ),
        "length": (
            "Directions are right, lengths are not: total has to be the sum of squares of all 128 threads.",
            "Shuffles with masks 16, 8, 4, 2, 1 give each lane the sum of its warp. One lane stores it in of_warp.",
            "After the barrier, total = of_warp[0] + of_warp[1] + of_warp[2] + of_warp[3].",
        ),
        "tail": (
            "Right for 384 columns, wrong for others or for an empty sentence: which threads have a column i?",
            "if (threadIdx.x + 128 * i < WIDTH): the last columns do not have a thread for each i.",
        ),
        "limit": (
            "Each column belongs to one thread, which reads each of its rows once. And one barrier is enough.",
            "The shuffles need no barrier: only of_warp goes from one warp to another.",
        ),
        "": (
            "The rows of this block's sentence are cu_seqlens[blockIdx.x] .. cu_seqlens[blockIdx.x + 1] - 1.",
            "sum[i] += X[(size_t)row * WIDTH + threadIdx.x + 128 * i], where that column exists.",
        ),
    },
)
def mean_pool(trial: Trial) -> None:
    """Sentences of several lengths, an empty one among them; widths that are no multiple of 128."""
    first = 384, (3, 5)
    for width, lengths in trial.sizes("WIDTH, lengths", first, (200, (1, 0, 33, 2)), (40, (7,))):
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        x = trial.rng.standard_normal((ends[-1], width), dtype=np.float32) + np.float32(0.25)
        out = trial.empty(len(lengths), width)
        trial.launch("mean_pool", len(lengths), 128, x, ends, out, WIDTH=width)
        sums = np.stack([part.sum(axis=0, dtype=float) for part in np.split(x, ends[1:-1])])
        expected = _unit(sums)
        same_way = np.allclose(_unit(trial.xp.asnumpy(out).astype(float)), expected, atol=1e-4)
        trial.expect("out", out, expected, symptom="length" * same_way)
    if trial.report:
        width, lengths = first
        trial.limit("elements of X read", trial.figures("X").read // 4, at_most=sum(lengths) * width)
        trial.limit("barriers", trial.report.barriers, at_most=len(lengths))
