"""Graders of notebook 03."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.attention.check import TOLERANCE, tolerance_for
from helpers.lesson.exercises.graders.expected import blocks, expect_v, wrong_for_one_key
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "03_rescale",
    minutes=5,
    hints={
        "nan": (
            "Which difference of maxima is inf - inf, or which exponential infinite? In the first tile m_i is -inf.",
            "expf(m_i - m_new) is 0 in the first tile; expf(m_new - m_i) is infinite there.",
        ),
        "large": (
            "Large scores: an exponential of a maximum alone overflows. Take the difference first.",
            "One factor, expf(m_i - m_new): its argument is never above 0.",
        ),
        "limit": ("The scores of the keys so far are computed again. One factor per tile corrects both sums.",),
        "": (
            "What was summed so far is relative to m_i. By which factor does e^(s - m_new) differ from e^(s - m_i)?",
            "The same factor, expf(m_i - m_new), multiplies l_i and every element of acc.",
            "const float rescale = expf(m_i - m_new); then l_i *= rescale; then a loop over acc.",
        ),
        **dict.fromkeys(
            ("columns", "overrun", "bounds"),
            (
                "acc has HEAD_DIM elements, and each of them needs the factor. How far does your loop over acc go?",
                "BLOCK_N counts keys of a tile, BLOCK_M rows of a block. The elements of acc are c = 0 .. HEAD_DIM - "
                "1.",
            ),
        ),
    },
)
def rescale(trial: Trial) -> None:
    """Test three tiles, one of them incomplete, then other tails, then scores whose exponential overflows.

    HEAD_DIM is above BLOCK_N and BLOCK_M at first, and below both afterwards.
    """
    first = 40, 40, 72, 1
    sizes = first, (33, 65, 8, 1), (65, 1, 8, 1), (33, 65, 8, 100)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        o = trial.empty(n, d)
        trial.launch("one_pass", blocks(n, 64), 64, q, k, v, o, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=16)
        trial.expect("O", o, reference.attention(q, k, v), tolerance=tolerance_for(q, k), large=factor > 1)
        expect_v(trial, o, v)
    if trial.report:
        trial.limit("bytes of K read", trial.figures("K").read, at_most=4 * math.prod(first))


@exercise(
    "03_no_key",
    minutes=6,
    hints={
        "nan": (
            "Until a row has seen a key, m_i and m_new are both -inf, and -inf - (-inf) is NaN. Where is it computed?",
            "Subtract any finite number there instead: all weights are 0 then anyway.",
            "m = m_new == NEG_INF ? 0.0f : m_new. A row that never sees a key ends with l_i = 0 and divides 0 by 0.",
        ),
        "empty": ("Every row of O and lse is written, also of a row that sees no key.",),
        "large": (
            "Large scores: only where no key was seen may something else than the maximum be subtracted.",
            "m is m_new, except where m_new is -inf.",
        ),
        "lse": (
            "The lse of a row that sees no key is -inf, of all other rows m_i + log(l_i).",
            "logf(0) is -inf already; l_i must not be changed for the sake of the division.",
        ),
        "": (
            "Follow one row by hand: which tiles hold no key that it sees, and what are m_i, m_new and rescale there?",
            "Where a key was seen, nothing may change: m is m_new, and the factor of acc is 1 / l_i.",
        ),
    },
)
def no_key(trial: Trial) -> None:
    """Test rows that see no key, rows whose first tiles are masked, and scores far below and above 0."""
    sizes = (40, 24, 10, 8, 0), (33, 65, 3, 8, 0), (40, 40, 5, 8, 300), (65, 1, 0, 8, 0), (40, 24, 10, 72, 0)
    for n, n_kv, left, d, shift in trial.sizes("N, N_kv, left, d, scores shifted by", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        if shift:
            q[:, -1], k[:, -1] = np.where(np.arange(n) % 2, shift, -shift), math.sqrt(d)
        o, lse = trial.empty(n, d), trial.empty(n)
        numbers = n, n_kv, left, d**-0.5
        trial.launch("windowed", blocks(n, 64), 64, q, k, v, o, lse, *numbers, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=16)
        expected, expected_lse = reference.attention(q, k, v, window=(left, 0), return_lse=True)
        seen = reference.visible(n, n_kv, window=(left, 0))
        symptom = "" if shift else wrong_for_one_key(trial, o, expected, seen)
        trial.expect("O", o, expected, tolerance=tolerance_for(q, k), large=shift > 0, symptom=symptom)
        if n_kv == 1:  # after the large scores, which say more of an answer that is wrong there
            expect_v(trial, o, v, seen)
        trial.expect("lse", lse, expected_lse, tolerance=512 * 2.0**-20 if shift else TOLERANCE, symptom="lse")


@exercise(
    "03_find_the_race",
    minutes=6,
    hints={
        "race": (
            "Each finding names a read and the write that it races with. Which of the two threads of a row does which?",
            "The odd thread may read P_smem before the even one has written it. What must lie between the two lines?",
            "A barrier between the if, where P_smem is written, and the loop over acc. All threads must reach it.",
        ),
        "deadlock": (
            "The odd threads never enter the if. A barrier must be reached by all threads of the block.",
            "Move the barrier behind the closing brace of the if.",
        ),
        "unset": (
            "All threads of the block copy the tile, those past the last row as well. Does one of them leave too "
            "early?",
        ),
        "barriers": (
            "It is clean, with more barriers than it needs. Which line follows each of them, and what would go wrong?",
            "Two barriers guard the tile, as in 02. One more guards P_smem.",
        ),
        "": (
            "The numbers were right before: change nothing but the barriers.",
            "The two barriers around the load of a tile stay where they are.",
        ),
    },
)
def find_the_race(trial: Trial) -> None:
    """Test three tiles, then a tail of keys and of rows."""
    tiles = 3
    sizes = (32, 16 * tiles, 8), (33, 65, 8), (40, 1, 8), (32, 16 * tiles, 72)
    for n, n_kv, d in trial.sizes("N, N_kv, d", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        o = trial.empty(n, d)
        trial.launch("two_per_row", blocks(n, 32), 64, q, k, v, o, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=32, BLOCK_N=16)
        trial.expect("O", o, reference.attention(q, k, v), tolerance=tolerance_for(q, k))
        expect_v(trial, o, v)
    if trial.report:
        what, barriers = f"barriers in a block of {tiles} tiles", trial.report.barriers
        trial.limit(what, barriers, at_most=3 * tiles + 1, symptom="barriers")


@exercise(
    "03_merge_halves",
    minutes=10,
    hints={
        "factor": (
            "In each row, O is a multiple of what it should be: both parts of acc are merged, l is not. What is l "
            "then?",
            "l_1 and l_2 are relative to their own maxima, as acc_1 and acc_2 are: the same two factors belong to "
            "them.",
            "l = l_1[row] * rescale_1 + l_2[row] * rescale_2, and O[i] is divided by it once.",
        ),
        "lse": (
            "O is right and lse is not: which m and which l belong to all the keys?",
            "m is the larger of the two maxima, l the sum of both rescaled sums.",
        ),
        **dict.fromkeys(
            ("crash", "bounds", "width"),
            (
                "m_1, l_1, m_2 and l_2 have a number for each row, acc_1 and acc_2 HEAD_DIM of them. Which index has "
                "each?",
                "m and l are read at [row], acc at [i], and O is written at [i].",
            ),
        ),
        "nan": (
            "Where a part has no keys, its m is -inf and its l is 0. Which expression is then 0 * inf or inf - inf?",
            "expf(m_part - m) with m the larger of both is 0 for an empty part; expf(m - m_part) is infinite.",
        ),
        "large": (
            "Large scores: an exponential of a score, without a maximum subtracted, overflows.",
            "Subtract the larger maximum from each part's: both arguments of expf are then at most 0.",
        ),
        "": (
            "Each part's l and acc are relative to that part's own m. To what do you bring them before you add?",
            "As in the loop: a part is multiplied by expf(its m - the new m).",
            "rescale_1 = expf(m_1[row] - m) for l_1 and acc_1, rescale_2 likewise, and m = fmaxf of both.",
        ),
    },
)
def merge_halves(trial: Trial) -> None:
    """Test halves, either part empty, and scores whose exponential overflows."""
    one = (33, 65, 32, 8, 1), (1, 2, 1, 8, 1), (130, 31, 5, 8, 1), (33, 65, 65, 8, 1), (33, 65, 0, 8, 1)
    sizes = *one, (33, 65, 32, 8, 100), (65, 1, 1, 8, 1), (33, 65, 32, 72, 1)
    for n, n_kv, split, d, factor in trial.sizes("N, N_kv, second part's first key, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        defines = {"HEAD_DIM": d, "BLOCK_M": 64}
        parts = []
        for first, last in ((0, split), (split, n_kv)):
            part = trial.empty(n, d), trial.empty(n), trial.empty(n)
            numbers = n, first, last, d**-0.5
            trial.launch("online_softmax_part", blocks(n, 64), 64, q, k, v, *part, *numbers, **defines)
            parts += part
        o, lse = trial.empty(n, d), trial.empty(n)
        trial.launch("merge", blocks(n * d, 64), 64, *parts, o, lse, n, **defines)
        expected, expected_lse = reference.attention(q, k, v, return_lse=True)
        trial.expect("O", o, expected, tolerance=tolerance_for(q, k), large=factor > 1)
        expect_v(trial, o, v)
        tolerance = max(TOLERANCE, float(np.abs(expected_lse).max()) * 2.0**-20)
        trial.expect("lse = m + log(l)", lse, expected_lse, tolerance=tolerance, symptom="lse")
