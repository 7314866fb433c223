"""Graders of notebook 02."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "02_one_barrier",
    minutes=10,
    hints={
        "race": (
            "The two lines above need a barrier between them, or two different tiles. Which is it here?",
            "Two tiles need two arrays in shared memory, and iterations that use them in turn: 0, 1, 0, 1, ...",
            "first / BLOCK_N is the number of the iteration; its remainder by 2 chooses the tile.",
        ),
        "large": (
            "expf of a large score is infinite: take exponentials of score - maximum only.",
            "m_new = fmaxf(m_i, s) comes first; both exponentials then subtract m_new.",
        ),
        "barriers": (
            "With two tiles that are used in turn, one barrier a tile is enough. Which of yours protects nothing?",
            "The barrier between the load and the reads is the one to keep.",
        ),
        "reads": (
            "The scores are right, but they do not come from shared memory: read the keys from the tile.",
            "s += q[c] * tile[j][c] reads the copy that the block shares.",
        ),
        "": (
            "When the maximum grows, the sum so far is relative to the old maximum: by what is it multiplied?",
            "First m_new, then l_i *= expf(m_i - m_new), then the new term, then m_i = m_new.",
        ),
    },
)
def one_barrier(trial: Trial) -> None:
    """Several tiles at the first size, so that the X-ray sees whether one barrier is enough."""
    block_n, first = 16, (40, 48, 8, 1)
    sizes = first, (33, 65, 8, 1), (1, 1, 8, 1), (70, 31, 8, 1), (130, 257, 8, 300)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 64), 64, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=block_n)
        # float32 keeps 7 digits, and large scores are near a thousand.
        tolerance = 1e-2 if factor > 1 else 1e-5
        trial.expect("LSE", lse, attention_parts(q, k, v).lse, tolerance=tolerance, large=factor > 1)
    if trial.report:
        n, n_kv, d, _ = first
        barriers = trial.report.barriers
        trial.limit("barriers in a block of 3 tiles", barriers, at_most=n_kv // block_n, symptom="barriers")
        trial.limit("bytes read from shared memory", trial.shared().read, at_least=4 * n * n_kv * d, symptom="reads")


_TAIL = (
    "The last tile may have rows that K does not have. What does your copy do with them?",
    "Compare first + j with N_kv before you read.",
    "tile[j][c] = first + j < N_kv ? source[...] : 0.0f;",
)


@exercise(
    "02_load_tile",
    minutes=6,
    hints={
        "sectors": (
            "The tile is right. Which words do the 32 threads of a warp load in one turn of your loop?",
            "Threads with neighbouring numbers should load neighbouring words: start at threadIdx.x, not at a row.",
            "Number the words of the tile: i = threadIdx.x, threadIdx.x + BLOCK_M, ...; the row is i / HEAD_DIM.",
        ),
        "requests": (
            "Words are loaded more often than once per block. Where does each thread's share begin, and how far on is "
            "its next word?",
            "Start at threadIdx.x and step by BLOCK_M: then each word has one thread.",
        ),
        "unset": (
            "Some words of the tile are never written. How many words are there, and how many threads?",
            "A thread copies several words: a loop from threadIdx.x up to BLOCK_N * HEAD_DIM, in steps of BLOCK_M.",
        ),
        "tail": _TAIL,
        "bounds": _TAIL,
        "": (
            "Row j of the tile is row first + j of source, and a row of source has HEAD_DIM words.",
            "With i the number of a word in the tile: j = i / HEAD_DIM, c = i % HEAD_DIM.",
        ),
    },
)
def load_tile(trial: Trial) -> None:
    """Whole tiles first; behind K there is NaN, so that reading too far shows. Then sectors and requests of K.

    On the CPU K ends where its array does, so that the X-ray sees it, too.
    """
    block_n, d = 16, 8
    for n, n_kv in trial.sizes("N, N_kv", (40, 32), (33, 65), (64, 1), (70, 31)):
        q, k, _ = trial.inputs(n, n_kv, d)
        padded = trial.xp.asarray(np.vstack([k, np.full((block_n, d), np.nan, np.float32)])) if trial.on_gpu else k
        sums = trial.empty(n)
        trial.launch(
            "sum_of_scores", blocks(n, 64), 64, q, padded[:n_kv], sums, n, n_kv, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=block_n
        )
        # Sums are in the hundreds, and float32 keeps 7 digits.
        symptom = "tail" if n_kv % block_n else ""
        trial.expect("SUM", sums, product(q, k.T).sum(axis=1), tolerance=2e-3, symptom=symptom)
    if trial.report:
        words = 32 * d  # of K at the first size, which has one block
        figures = trial.figures("K")
        trial.limit("bytes requested from K", figures.read, at_most=4 * words, symptom="requests")
        trial.limit("sectors of K", figures.sectors, at_most=4 * words // 32, symptom="sectors")


@exercise(
    "02_no_conflicts",
    minutes=8,
    hints={
        "conflicts": (
            "Lane 4 r + part reads word r * STRIDE + c, with c = part, part + 4, ... In which banks are 8 rows?",
            "The four lanes of a row use four neighbouring banks. So where must the next row begin?",
            "8 rows of 4 banks fill all 32 banks if each row begins 4 banks further: STRIDE % 32 == 4.",
        ),
        "bytes": (
            "No conflicts, but the rows are longer than needed. What is the shortest stride that works?",
            "8,704 bytes are 32 rows of 68 words.",
        ),
        "crash": "place() must stay below ROWS * STRIDE for every row and word, and STRIDE holds a whole row.",
        "": (
            "Every word of the tile needs a place of its own, and writer and reader must use the same one.",
            "Let only STRIDE and place() change.",
        ),
    },
)
def no_conflicts(trial: Trial) -> None:
    """One block of rows, then one row, and a block and eight more; then conflicts and bytes."""
    for n, d in trial.sizes("N, d", (32, 64), (1, 64), (40, 64)):
        q, _, _ = trial.inputs(n, 1, d)
        part = trial.empty(n, 4)
        run = trial.launch("squares", blocks(n, 32), 128, q, part, n, HEAD_DIM=d)
        squares = (q.astype(np.float64) ** 2).reshape(n, d // 4, 4).sum(axis=1)
        trial.expect("PART", part, squares, tolerance=1e-4)
    if trial.report:
        trial.limit("bank conflicts of a block", trial.shared().conflicts, at_most=0, symptom="conflicts")
        size = run.attributes["shared_size_bytes"]
        trial.limit("bytes of shared memory", size, at_most=4 * 32 * (d + 4), symptom="bytes")


@exercise(
    "02_which_barrier",
    minutes=8,
    hints={
        "race": (
            "The X-ray names the array and two lines. A barrier must be between these two, and none is.",
            "Thread 0 writes `maximum`, the others read it. Which of the two barriers waits too late?",
            "Move the last barrier of the loop up, to just behind the if in which thread 0 writes the maximum.",
        ),
        "deadlock": "All threads of a block must reach a barrier: it must not be inside the if of thread 0.",
        "barriers": (
            "No race, but three barriers per tile. Which of them separates nothing that the other two do not?",
            "`scores` is written again in the next iteration, after the barrier behind `maximum`: the last one can go.",
        ),
        "": (
            "The statements are right as they are: move a barrier, change nothing else.",
            "All threads need the maximum of all scores of the tile, which thread 0 finds.",
        ),
    },
)
def which_barrier(trial: Trial) -> None:
    """Numbers are right on the engine wherever the barrier is: the X-ray of several tiles has to find the race."""
    threads, first = 64, (3, 130, 8)
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (5, 64, 8), (1, 1, 8), (2, 300, 8)):
        q, k, v = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        trial.launch("block_lse", n, threads, q, k, lse, n_kv, d**-0.5, HEAD_DIM=d)
        trial.expect("LSE", lse, attention_parts(q, k, v).lse)
    if trial.report:
        tiles = blocks(first[1], threads)
        barriers = trial.report.barriers // first[0] - 1  # the one after the loop
        trial.limit(f"barriers of a block in {tiles} tiles", barriers, at_most=2 * tiles, symptom="barriers")
