"""Graders of notebook 06."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from helpers.attention import reference
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise
from helpers.xray import Finding


@exercise(
    "06_row_of_scores",
    minutes=18,
    hints={
        "race": (
            "A lane reads a row of S that other lanes have not stored yet: how do the lanes of a warp wait?",
            "__syncwarp() after store_matrix_sync: then the whole tile has been stored.",
        ),
        "tail": (
            "Right where keys come in whole tiles. Which keys of the last tile do not exist?",
            "Their rows were filled with zeros, and exp(0) counts: the score must be NEG_INF where first + j >= N_kv.",
        ),
        "zero": (
            "A key counts for no row although it exists: its score happens to be 0. What tells you that a key is "
            "missing?",
            "Its number: key first + j exists where first + j < N_kv, whatever its score is.",
        ),
        "keys": "The last key counts for no row, although it exists: for which first + j is a score NEG_INF?",
        "steps": (
            "Right with one step of k (d = 16), wrong with four. What do the two loads and the product do at k = 16?",
            "Both fragments begin at column k, and mma_sync(S, q_frag, k_frag, S) adds to what S already has.",
        ),
        "not stored": (
            "S never reaches S_smem: what takes a fragment to shared memory?",
            "store_matrix_sync, called by all 32 lanes after the loop over k.",
        ),
        "stride of S": (
            "S was stored, but not where the lanes read it: how far apart are two rows of S_smem?",
            "S_STRIDE floats: that is store_matrix_sync's third argument.",
        ),
        "stride of Q and K": (
            "A fragment has elements from the padding, which are unwritten: how far apart are two rows of the tile?",
            "STRIDE elements, not HEAD_DIM: that is load_matrix_sync's third argument.",
        ),
        "by columns": (
            "A lane has a column of each tile of S, not a row: what do you store or read by columns?",
            "mem_row_major stores row r from r * S_STRIDE on, and lane r reads S_smem[lane * S_STRIDE + j].",
        ),
        "scale": "The scores are not scaled: s is softmax_scale times the element of S_smem.",
        "layout of Q": "Q's fragment is transposed: a row of Q is a row of the left operand, so it is row_major.",
        "layout of K": (
            "The product is Q K, not Q K^T: row j of K has to be column j of the right operand.",
            "matrix_b is col_major: then each row of K_smem is one of its columns.",
        ),
        "no product": (
            "The result is right, but CUDA cores computed it. A tensor core multiplies two fragments by mma_sync.",
            "A matrix_a from Q_smem and a matrix_b from K_smem, loaded by load_matrix_sync; mma_sync adds to S.",
        ),
        "empty": "Every row of the 16 has a lane that writes its lse: does it still, with your changes?",
        "": (
            "Take row 0 and key 0 of the first tile: does their score meet the same 16 columns of Q and of K?",
            "matrix_a is row_major at Q_smem + k, matrix_b col_major at K_smem + k, both with the stride STRIDE.",
            "mma_sync(S, q_frag, k_frag, S) adds to S; store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major).",
        ),
    },
)
def row_of_scores(trial: Trial) -> None:
    """Test whole tiles, then several steps of k, then a tail of keys and of rows. All scores of key 5 are 0."""
    first, steps = (32, 48, 16), (16, 32, 48)
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, steps, (33, 65, 16), (1, 1, 16)):
        q, k, _ = trial.inputs(n, n_kv, d, np.float16)
        k[5:6] = 0  # as a row of q is
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 16), 32, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d)
        _, expected = reference.attention(q, k, k, return_lse=True)
        symptom = "steps" if (n, n_kv, d) == steps else ""
        if (n, n_kv, d) == first:
            s = product(q, k.T).reshape(n // 16, 16, n_kv // 16, 16) * d**-0.5
            others = np.delete(k, 5, axis=0)
            q_transposed = q.reshape(-1, 16, 16).swapaxes(1, 2).reshape(q.shape)
            k_transposed = k.reshape(-1, 16, 16).swapaxes(1, 2).reshape(k.shape)
            slips = {
                "zero": reference.attention(q, others, others, return_lse=True)[1],
                "scale": reference.attention(q, k, k, softmax_scale=1.0, return_lse=True)[1],
                "layout of Q": reference.attention(q_transposed, k, k, return_lse=True)[1],
                "layout of K": reference.attention(q, k_transposed, k, return_lse=True)[1],
                "by columns": np.log(np.exp(s).sum(axis=(1, 2))).ravel(),
                "keys": reference.attention(q, k[:-1], k[:-1], return_lse=True)[1],
            }
            some = q.any(axis=1)  # of the other all scores are 0
            symptom = trial.slip(trial.xp.asnumpy(lse)[some], {name: a[some] for name, a in slips.items()})
        trial.expect("lse", lse, expected, tolerance=1e-4, symptom=symptom)
    if trial.report:
        trial.blame(_unset(trial, trial.report.findings))
        products = trial.report.tensor_flop // (2 * 16 * 16 * 16)
        needed = first[0] // 16 * first[1] // 16 * first[2] // 16
        trial.limit("products by mma_sync", products, at_least=needed, symptom="no product")


def _unset(trial: Trial, findings: Sequence[Finding]) -> str:
    """Return the symptom of a read of an unwritten word: a wrong stride, or what is missing; "" if there is none."""
    array = next((f.array or "" for f in findings[:1] if f.kind == "uninitialised"), "")
    if "S_smem" in array:
        return "stride of S" if trial.figures("S_smem").written else "not stored"
    return "stride of Q and K" if "_smem" in array else ""


@exercise(
    "06_factor_fragment",
    minutes=12,
    hints={
        "race": (
            "The 32 lanes load the fragment together: what must have happened before, and what may happen after?",
            "__syncwarp() after the store, so that all factors are there, and one before it, in each turn of the loop: "
            "another lane may still load the last tile's factors.",
        ),
        "layout": (
            "x[e] was taken to be of a certain row, which is right in one layout only: another GPU may have another.",
            "Fragments of one type share one layout. What can you load, to have each factor where acc has its row?",
            "Load the factors as an Accumulator: in every column the same 16 floats. Then acc[n].x[e] *= factor.x[e].",
        ),
        "outside": (
            "A lane stores past the end of factors, which has 16 floats, one for each row of this warp. Which lanes "
            "store, and where?",
            "Lanes r and r + 16 have the same factor, of the warp's row r: lane r < 16 stores factors[r].",
        ),
        "twice": (
            "The result is right, but each factor is stored twice: lanes r and r + 16 have the same one.",
            "Only lanes 0 to 15 store: if (lane < 16).",
        ),
        "own row": (
            "Each lane multiplies its elements by the factor that it computed, of row lane % 16. Are its elements of "
            "that row?",
            "No: an element's row depends on the layout. Load the factors as a fragment with the layout of acc.",
        ),
        "some": (
            "Some 16 columns of O are right, others are not: which of the accumulators acc[n] are multiplied?",
            "All HEAD_DIM / 16 of them, at every HEAD_DIM.",
        ),
        "array": (
            "The result is right, but each factor is stored 16 times, once for every column. Can load_matrix_sync read "
            "the same 16 floats for all columns?",
            "Its third argument is the distance of two columns in memory: 0.",
        ),
        "trip": (
            "The result is right, but more than the factors goes through shared memory.",
            "acc stays in its fragments: only 16 floats are stored for a tile, and loaded as a fragment.",
        ),
        "by columns": (
            "Columns were multiplied, not rows: are the 16 floats a column of the fragment, or a row?",
            "Every column is the same 16 floats: tc::mem_col_major.",
        ),
        "unset": "Which lanes store a factor, and where? Elements 0 to 15 are the factors of rows 0 to 15.",
        "bounds": (
            "The fragment has 16 columns, and all of them are the same 16 floats: how far apart are two columns?",
            "A stride of 0: load_matrix_sync(factor, factors, 0, ...).",
        ),
        "deadlock": "All 32 lanes must reach load_matrix_sync and __syncwarp(): only the store belongs in the if.",
        "": (
            "Which rows must be multiplied, by what, and is that before or after P V of this tile is added?",
            "Rows have one factor each. Loaded column by column (mem_col_major), each column is the 16 factors.",
            "Accumulator factor; tc::load_matrix_sync(factor, factors, 0, tc::mem_col_major); then "
            "acc[n].x[e] *= factor.x[e] for every n and every e < factor.num_elements.",
        ),
    },
)
def factor_fragment(trial: Trial) -> None:
    """Test P and M of an online softmax; the bytes written to shared memory are limited.

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


@np.errstate(invalid="ignore")  # what nobody wrote is NaN
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
    """Compute the sum with element (r, c) of each 16 x 16 accumulator times the factor of row `factor[r, c]`."""
    n, d = len(p), v.shape[1]
    acc = np.zeros((n // 16, 16, d))
    for tile in range(len(maxima)):
        if tile:
            factors = np.exp2(maxima[tile - 1] - maxima[tile]).reshape(n // 16, 16)[:, factor]
            acc *= np.tile(factors, (1, 1, d // 16))
        keys = slice(16 * tile, 16 * tile + 16)
        acc += product(p[:, keys], v[keys]).reshape(acc.shape)
    return acc.reshape(n, d)


@exercise(
    "06_find_the_race",
    minutes=9,
    hints={
        "race": (
            "The two lines that race are above. Which one must be finished by all lanes before the other may begin?",
            "P overlays S, and its rows are closer together: row r of P is where another lane still reads a row of S.",
            "All 32 lanes must have read S before one of them stores P: __syncwarp() between these two lines.",
        ),
        "barriers": "One barrier more is enough. Which of yours separates no store from another lane's access?",
        "barriers in a loop": "A barrier in a loop over j is reached 16 times for each tile: where is one enough?",
        "bytes": "P keeps its place in S_smem: nothing but a barrier is missing.",
        "": "Only a barrier is missing: the lines that compute can stay as they are.",
    },
)
def find_the_race(trial: Trial) -> None:
    """Find the race by the X-ray, and count barriers: the numbers are right without the barrier, too."""
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
