"""Graders of notebook 01."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import attention_parts, blocks
from helpers.lesson.exercises.trial import Trial, exercise

# A block far down the array: its scores are beyond 2^32 elements.
FAR_BLOCK = 2**20
FAR = f"#undef blockIdx\n#define blockIdx uint3{{{FAR_BLOCK}, 0, 0}}"

# Asks the learner's function for one index, of a scratch that would not fit in any memory.
AT = """
extern "C" __global__ void __launch_bounds__(32)
    index_of(unsigned long long* index, int row, int j, int N, int N_kv) {
  if (threadIdx.x == 0) index[0] = at(row, j, N, N_kv);
}
"""


@exercise(
    "01_scores",
    minutes=5,
    hints={
        "empty": (
            "The line above counts the scores that nobody stores. For each j, the loop body computes one number and "
            "stores it once, in row `row` of S.",
            "Sum up q[c] * k[c] over c in a float of this thread, then store softmax_scale times the sum.",
            "Row `row` of S begins at (size_t)row * N_kv; the score of key j is j words further.",
        ),
        "index": (
            "The scores are right, their places are not. How long is a row of S?",
            "S has N_kv columns: S[row][j] is at index (size_t)row * N_kv + j.",
        ),
        "race": (
            "Two threads store to the same element of S. How long is a row of S?",
            "S has N_kv columns: S[row][j] is at index (size_t)row * N_kv + j.",
        ),
        "unset": (
            "The line above reads an unwritten value. Is it a sum without a first value, or S itself?",
            "Begin each sum with float dot = 0.0f; and only store to S: S[...] = softmax_scale * dot;",
        ),
        **dict.fromkeys(
            ("crash", "bounds"),
            (
                "The index is outside S, or K. How long is a row of each? Threads past the last row have left already.",
                "S has N_kv columns: S[row][j] is at index (size_t)row * N_kv + j.",
            ),
        ),
        "width": (
            "Right for HEAD_DIM = 8, wrong for 72. How far does your sum over c go, and by which name?",
            "The sum has HEAD_DIM terms: c < HEAD_DIM.",
        ),
        "overflow": (
            "Right for small arrays. Here S has more than 2^32 elements: in which type is your index computed?",
            "Make the row 64 bits wide before it is multiplied: (size_t)row * N_kv + j.",
        ),
        "columns": "The first keys' scores are right. Does the sum begin at 0 for every key, and are all keys visited?",
        "factor": (
            "All scores are wrong by the same factor. How often is the sum multiplied by softmax_scale?",
            "S[...] = softmax_scale * dot, once for each score.",
        ),
        "stores": (
            "The scores are right, but S is used for the sum. Sum up in a variable of the thread, which is a register.",
            "One store for each j, after the loop over c has ended.",
        ),
        "": (
            "Follow S[0][0] by hand: the sum over c of q[c] * k[c], for all HEAD_DIM words, times softmax_scale.",
            "The sum begins at 0 for every j, and is multiplied by softmax_scale once.",
        ),
    },
)
def scores(trial: Trial) -> None:
    """Test all scores, how often they are stored, and an index beyond 32 bits."""
    first = 40, 24, 8
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 24, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        s = trial.empty(n, n_kv)
        trial.launch("scores", blocks(n, 64), 64, q, k, s, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64)
        trial.expect("S", s, attention_parts(q, k, v).s)
    _scores_far_down(trial)
    if trial.report:
        at_most = 4 * first[0] * first[1]
        trial.limit("bytes written to S", trial.figures("S").written, at_most=at_most, symptom="stores")


def _scores_far_down(trial: Trial) -> None:
    """Test the scores of one block whose rows begin 2^32 elements after the first one."""
    n, n_kv, d, first = 64, 64, 8, 64 * FAR_BLOCK
    arrays = trial.far((first + n) * d, n_kv * d, (first + n) * n_kv)
    if arrays is None:
        return
    far_q, far_k, far_s = arrays
    q, k, v = trial.inputs(n, n_kv, d)
    far_q[first * d :], far_k[:] = q.ravel(), k.ravel()
    numbers = first + n, n_kv, d**-0.5
    trial.launch("scores", 1, 64, far_q, far_k, far_s, *numbers, before=FAR, HEAD_DIM=d, BLOCK_M=64)
    s, at = far_s[first * n_kv :].reshape(n, n_kv), f"N = {first + n:,}, N_kv = {n_kv}, the last {n} rows"
    trial.expect("S", s, attention_parts(q, k, v).s, at=at, symptom="overflow")


@exercise(
    "01_off_by_one",
    minutes=6,
    hints={
        "bounds": (
            "The X-ray names the element. K has N_kv rows of HEAD_DIM words: of which j and c is this the word k[c]?",
            "It is read in the last turn of the loop over c, for the last key. Who uses the word that is loaded there?",
            "Nobody does: load only where c + 1 < HEAD_DIM, and take 0.0f otherwise.",
        ),
        "crash": "For which j and c is the element of the message the word k[c]? Is there such a word?",
        "": (
            "The results were right before. Only one load of each key is too much: every turn of the loop still adds "
            "q[c] times k[c], HEAD_DIM of them.",
            "All HEAD_DIM products are needed; what is not needed is the last load.",
        ),
    },
)
def off_by_one(trial: Trial) -> None:
    """Test the read past K, which the X-ray alone sees: even the skeleton's numbers are right at every size.

    K fills no multiple of 256 bytes: where it does, the engine stops the launch at its end.
    """
    for n, n_kv, d in trial.sizes("N, N_kv, d", (40, 25, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 25, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        mean = trial.empty(n)
        trial.launch("row_mean", blocks(n, 64), 64, q, k, mean, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64)
        trial.expect("MEAN", mean, attention_parts(q, k, v).s.mean(axis=1))


@exercise(
    "01_coalesced_scores",
    minutes=6,
    hints={
        "index": (
            "S has N_kv rows of N elements. In which row, and in which column of it, is the score of (row, j)?",
            "For one j, the 32 rows of a warp must be next to each other: row has the factor 1. Which factor has j?",
            "S[j][row] is element j * N + row.",
        ),
        "overflow": (
            "At N = N_kv = 100,000 the index does not fit in 32 bits. In which type is the product computed?",
            "Make one factor 64 bits wide before the product: (size_t)j * N, not (size_t)(j * N).",
        ),
        "race": (
            "Two threads use the same element of S. For which two pairs (row, j) does at() give the same index?",
            "j * N + row with row < N is another number for every pair; a shorter factor than N is not.",
        ),
        "bounds": (
            "Which is the largest index that at() gives, and how many elements has S?",
            "j goes up to N_kv - 1 and row up to N - 1: the element after the last is N_kv * N.",
        ),
        "": (
            "S is written and read in three places: all of them go through at(row, j, N, N_kv). What must it return?",
            "Element (j, row) of an array of N_kv rows and N columns.",
        ),
    },
)
def coalesced_scores(trial: Trial) -> None:
    """Test the output, the transposed scratch, an index beyond 32 bits, and sectors per request."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (40, 24, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (40, 24, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        s, o = trial.empty(n_kv, n), trial.empty(n, d)
        trial.launch("naive_coalesced", blocks(n, 64), 64, q, k, v, s, o, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64)
        parts = attention_parts(q, k, v)
        trial.expect("S, stored as (N_kv, N)", s, parts.p.T, symptom="index")
        trial.expect("O", o, parts.o)
    index, (row, j, n) = trial.empty(1, dtype=np.uint64), (99_998, 99_999, 100_000)
    trial.launch("index_of", 1, 32, index, row, j, n, n, extra=AT, HEAD_DIM=8, BLOCK_M=64)
    at, expected = f"row = {row:,}, j = {j:,}, N = N_kv = {n:,}", np.array([j * n + row], np.uint64)
    trial.expect("the index at()", index, expected, at=at, tolerance=0, symptom="overflow")
    if trial.report:
        trial.limit("sectors per request of S", round(trial.figures("S").sectors_per_request, 2), at_most=5)
