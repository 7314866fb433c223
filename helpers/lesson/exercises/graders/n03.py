"""Graders of notebook 03."""

from __future__ import annotations

import math

import numpy as np

from helpers.attention import reference
from helpers.attention.check import TOLERANCE, tolerance_for
from helpers.lesson.exercises.graders.expected import blocks, expect_v, wrong_for_one_key
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("03_rescale", minutes=5)
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


@exercise("03_no_key", minutes=6)
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
        if n_kv == 1:  # checked after the large scores, which tell more about a wrong answer
            expect_v(trial, o, v, seen)
        trial.expect("lse", lse, expected_lse, tolerance=512 * 2.0**-20 if shift else TOLERANCE, symptom="lse")


@exercise("03_find_the_race", minutes=6)
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


@exercise("03_merge_halves", minutes=10)
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
