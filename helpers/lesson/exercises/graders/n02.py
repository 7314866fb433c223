"""Graders of notebook 02."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise


@exercise(
    "02_one_barrier",
    minutes=6,
    hints={
        "race": (
            "The two lines above need a barrier between them, or two different tiles. Which is it here?",
            "Two tiles need two arrays in shared memory, and iterations that use them in turn: 0, 1, 0, 1, ...",
            "first / BLOCK_N is the number of the iteration; its remainder by 2 chooses the tile.",
        ),
        **dict.fromkeys(
            ("crash", "bounds"),
            (
                "K_smem has as many tiles as you declared, numbered from 0. Which tile does the third iteration use?",
                "Tiles are used alternately: 0, 1, 0, 1, ... What makes the number of the iteration 0 or 1?",
                "first / BLOCK_N is the number of the iteration; its remainder by 2 chooses the tile.",
            ),
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
            "The update of m_i and l_i is right as it is. Does an iteration read the tile that it has just loaded?",
            "One name for both: tile is chosen once, and the load and the reads use it.",
        ),
    },
)
def one_barrier(trial: Trial) -> None:
    """Test several tiles at the first size, so that the X-ray sees whether one barrier is enough."""
    block_n, first = 16, (40, 48, 8)
    sizes = first, (33, 65, 8), (1, 1, 8), (70, 31, 8), (130, 257, 8), (40, 48, 72)
    for n, n_kv, d in trial.sizes("N, N_kv, d", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        lse = trial.empty(n)
        trial.launch("row_lse", blocks(n, 64), 64, q, k, lse, n, n_kv, d**-0.5, HEAD_DIM=d, BLOCK_M=64, BLOCK_N=block_n)
        trial.expect("LSE", lse, attention_parts(q, k, v).lse)
    if trial.report:
        n, n_kv, d = first
        barriers = trial.report.barriers
        trial.limit("barriers in a block of 3 tiles", barriers, at_most=n_kv // block_n, symptom="barriers")
        trial.limit("bytes read from shared memory", trial.shared().read, at_least=4 * n * n_kv * d, symptom="reads")


_TAIL = (
    "The last tile may have rows that K does not have. What does your copy do with them?",
    "Compare first + j with N_kv before you read.",
    "tile[j][c] = first + j < N_kv ? source[...] : 0.0f;",
)


# Has the learner's function load one tile.
ONE_TILE = """
extern "C" __global__ void __launch_bounds__(BLOCK_M) one_tile(const float* K, float* copy, int first, int N_kv) {
  __shared__ float tile[BLOCK_N][HEAD_DIM];
  load_tile(tile, K, first, N_kv);
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) copy[i] = tile[i / HEAD_DIM][i % HEAD_DIM];
}
"""


def _tile_far_down(trial: Trial) -> None:
    """Test an incomplete tile whose words begin 2^32 elements after K's first one."""
    block_n, d, first, rows = 16, 8, 2**29, 5
    arrays = trial.far((first + block_n) * d, block_n * d)
    if arrays is None:
        return
    far_k, copy = arrays
    words = trial.rng.standard_normal((rows, d)).astype(np.float32)
    far_k[first * d : (first + rows) * d] = words.ravel()
    defines = {"HEAD_DIM": d, "BLOCK_M": 64, "BLOCK_N": block_n}
    trial.launch("one_tile", 1, 64, far_k, copy, first, first + rows, extra=ONE_TILE, **defines)
    expected = np.concatenate([words, np.zeros((block_n - rows, d), np.float32)])
    at = f"first = {first:,}, N_kv = {first + rows:,}, d = {d}"
    trial.expect("the tile", copy.reshape(block_n, d), expected, at=at, tolerance=0, symptom="overflow")


@exercise(
    "02_load_tile",
    minutes=6,
    hints={
        "overflow": (
            "Right for a short K. Here first * HEAD_DIM is beyond 32 bits: in which type is the index of source "
            "computed?",
            "Make the row 64 bits wide before it is multiplied: (size_t)(first + j) * HEAD_DIM + c.",
        ),
        "threads": (
            "Right with 64 threads a block, wrong with 32. Which number stands in your copy for how many threads share "
            "it?",
            "The threads of a block are BLOCK_M: so far on is a thread's next word.",
        ),
        "few": (
            "Each word is loaded once, by too many requests: in some of them most lanes have nothing to load. Which "
            "threads are idle in your loop?",
            "All BLOCK_M threads take words, one after the other: i = threadIdx.x, then threadIdx.x + BLOCK_M, ...",
        ),
        "width": (
            "Right for HEAD_DIM = 8, wrong where rows are longer. Which thread copies column 70, and what does your "
            "loop do where BLOCK_M is no multiple of HEAD_DIM?",
            "Number the words of the tile: i = threadIdx.x, threadIdx.x + BLOCK_M, ...; the row is i / HEAD_DIM.",
        ),
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
        "race": (
            "Several threads write the same word of the tile. Which words does each thread take, and which row and "
            "column has word i, where a row has HEAD_DIM words?",
            "Each thread starts at threadIdx.x and goes on by BLOCK_M; word i is tile[i / HEAD_DIM][i % HEAD_DIM].",
        ),
        "crash": (
            "Which array does the line above name? The tile has BLOCK_N rows of HEAD_DIM words, K has N_kv rows.",
            "Word i of the tile is tile[i / HEAD_DIM][i % HEAD_DIM], for i < BLOCK_N * HEAD_DIM.",
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
    """Test whole tiles first; NaN behind K shows reads past its end. Then count sectors and requests of K.

    On the CPU K ends where its array does, so that the X-ray sees it, too.
    """
    block_n, first = 16, (40, 32, 8, 64)
    sizes = first, (33, 65, 8, 64), (64, 1, 8, 64), (70, 31, 8, 64), (40, 32, 24, 64), (40, 32, 72, 64), (40, 32, 8, 32)
    for n, n_kv, d, block_m in trial.sizes("N, N_kv, d, BLOCK_M", *sizes):
        q, k, _ = trial.inputs(n, n_kv, d)
        padded = trial.xp.asarray(np.vstack([k, np.full((block_n, d), np.nan, np.float32)])) if trial.on_gpu else k
        sums = trial.empty(n)
        defines = {"HEAD_DIM": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
        trial.launch("sum_of_scores", blocks(n, block_m), block_m, q, padded[:n_kv], sums, n, n_kv, **defines)
        # Sums are in the hundreds, and float32 keeps 7 digits.
        symptom = "tail" if n_kv % block_n else "threads" if block_m < 64 else ""
        trial.expect("SUM", sums, product(q, k.T).sum(axis=1), tolerance=2e-3, symptom=symptom)
    _tile_far_down(trial)
    if trial.report:
        words = first[1] * first[2]  # of K at the first size, which has one block
        figures = trial.figures("K")
        trial.limit("bytes requested from K", figures.read, at_most=4 * words, symptom="requests")
        trial.limit("sectors of K", figures.sectors, at_most=4 * words // 32, symptom="sectors")
        trial.limit("requests of K", figures.requests, at_most=words // 32, symptom="few")


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
            "HEAD_DIM is a multiple of 32 and a row of HEAD_DIM words must fit: four words of padding are enough.",
        ),
        "width": (
            "Right for HEAD_DIM = 64, wrong for 96: a row has 96 words there. Does STRIDE follow HEAD_DIM?",
            "A stride is HEAD_DIM and some padding, not a number.",
        ),
        "crash": "place() must stay below ROWS * STRIDE for every row and word, and STRIDE holds a whole row.",
        "": (
            "Every word of the tile needs a place of its own, and writer and reader must use the same one.",
            "Let only STRIDE and place() change.",
        ),
    },
)
def no_conflicts(trial: Trial) -> None:
    """Test one block of rows, one row, a block and eight rows; then conflicts and bytes. HEAD_DIM is 64, 96, 32."""
    dims, runs = (64, 96, 32), []
    for n in trial.sizes("N", 32, 1, 40):
        for d in dims:
            q, _, _ = trial.inputs(n, 1, d)
            part = trial.empty(n, 4)
            runs += [trial.launch("squares", blocks(n, 32), 128, q, part, n, HEAD_DIM=d)]
            squares = (q.astype(np.float64) ** 2).reshape(n, d // 4, 4).sum(axis=1)
            symptom = "width" if d > dims[0] else ""
            trial.expect("PART", part, squares, at=f"N = {n}, d = {d}", tolerance=1e-4, symptom=symptom)
            if trial.rows[FIRST].passed is False:
                break
    if trial.report:
        for d, run, report in zip(dims, runs, trial.reports, strict=False):
            conflicts = sum(array.conflicts for array in report.shared.values())
            trial.limit(f"bank conflicts of a block at d = {d}", conflicts, at_most=0, symptom="conflicts")
            most = 4 * 32 * d + 808  # 9,000 at d = 64: no stride is told by it
            trial.limit(f"bytes of shared memory at d = {d}", run.shared_size_bytes, at_most=most, symptom="bytes")


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
        "large": (
            "`maximum` is the largest of all scores so far: of m_i and of all scores of the tile, not of some of them."
        ),
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
    """Find the race by the X-ray of several tiles: the engine's numbers are right wherever the barrier is."""
    threads, first = 64, (8, 130, 8, 1)
    sizes = first, (5, 64, 8, 1), (1, 1, 8, 1), (2, 300, 8, 1), (5, 300, 8, 300), (8, 130, 72, 1)
    for n, n_kv, d, factor in trial.sizes("N, N_kv, d, factor of Q", *sizes):
        q, k, v = trial.inputs(n, n_kv, d)
        q *= np.float32(factor)
        lse = trial.empty(n)
        trial.launch("block_lse", n, threads, q, k, lse, n_kv, d**-0.5, HEAD_DIM=d)
        tolerance = 1e-2 if factor > 1 else 1e-5
        trial.expect("LSE", lse, attention_parts(q, k, v).lse, tolerance=tolerance, large=factor > 1)
    if trial.report:
        tiles = blocks(first[1], threads)
        barriers = trial.report.barriers // first[0] - 1  # the one after the loop
        trial.limit(f"barriers of a block in {tiles} tiles", barriers, at_most=2 * tiles, symptom="barriers")
