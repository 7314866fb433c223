"""Graders of notebook 04."""

from __future__ import annotations

from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "04_register_tile",
    minutes=8,
    hints={
        "maximum": (
            "A thread has 4 of a tile's 32 keys. Are all 16 products in s, and are all 8 threads of the row asked?",
            "The lanes of a row differ in bits 0, 1 and 2: exchange with lane ^ 1, lane ^ 2 and lane ^ 4.",
            "a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit)) for bit = 1, 2, 4.",
        ),
        "sum": (
            "The maxima are right. l_i is the sum over one thread's keys; the row's sum is that of its 8 threads.",
            "The same three exchanges as for the maximum, with += instead of fmaxf.",
        ),
        "deadlock": (
            "All 32 lanes that the mask names must call the shuffle: is yours inside an if that some lanes skip?",
            "A lane must read from a lane of its own row: ^ 1, ^ 2 and ^ 4 stay within the eight.",
        ),
        "": "s[i][j] += q[i] * k[j] for all 16 pairs; the maximum and the sum then go over the 8 threads of a row.",
    },
)
def register_tile(trial: Trial) -> None:
    """Maxima first, since sums are relative to them."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (64, 64, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8)):
        q, k, v = trial.inputs(n, n_kv, d)
        m, lse = trial.empty(n), trial.empty(n)
        trial.launch("tile_lse", blocks(n, 64), 128, q, k, m, lse, n, n_kv, d**-0.5, HEAD_DIM=d)
        parts = attention_parts(q, k, v)
        trial.expect("M, the row maxima", m, parts.m, symptom="maximum")
        trial.expect("LSE", lse, parts.lse, symptom="sum")


@exercise(
    "04_outer_product",
    minutes=8,
    hints={
        "requests": (
            "The scores are right. Does every word that a thread needs of a column pass from shared memory once?",
            "8 words of Q are two groups of four neighbours, and so are 8 words of K: four float4 in all.",
            "*reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]) for i = 0 and 4; the same for K_smem and x.",
        ),
        "reads": "The scores are right, but they do not come from shared memory: read Q_smem and K_smem.",
        "": (
            "s[i][j] is the sum over all columns c of a row's word times a key's word. Which 16 are they?",
            "Row i is at(i, y) of Q_smem[c], key j is at(j, x) of K_smem[c].",
            "Two arrays of 8 registers, q and k, then s[i][j] += q[i] * k[j] in two unrolled loops.",
        ),
    },
)
def outer_product(trial: Trial) -> None:
    """Right, then with each word from shared memory once, four to a request."""
    for n, n_kv, d in trial.sizes("N, N_kv, d", (64, 128, 8), (33, 65, 8), (1, 1, 8), (70, 31, 8)):
        q, k, _ = trial.inputs(n, n_kv, d)
        s = trial.empty(n, n_kv)
        trial.launch("outer_products", (blocks(n, 64), blocks(n_kv, 64)), 64, q, k, s, n, n_kv, HEAD_DIM=d)
        trial.expect("S", s, product(q, k.T))
    if trial.report:
        tiles = [trial.figures("Q_smem"), trial.figures("K_smem")]
        columns = 2 * d * 2  # 2 blocks of 2 warps
        stores = 2 * columns
        loads = (sum(tile.requests for tile in tiles) - stores) / columns
        read = sum(tile.read for tile in tiles)
        trial.limit("bytes read from shared memory", read, at_least=4 * 16 * 32 * columns, symptom="reads")
        trial.limit("requests of shared memory for a column and warp", loads, at_most=4, symptom="requests")


@exercise(
    "04_float4_rows",
    minutes=6,
    hints={
        "requests": (
            "The result is right. How many loads and stores does a thread execute for its four words?",
            "A float4 is loaded by one instruction: *reinterpret_cast<const float4*>(X + first).",
        ),
        "bounds": (
            "The array ends within the last thread's four words. Which of them exist?",
            "Take the float4 only where first + 4 <= count; after that, word by word.",
        ),
        "empty": (
            "The last thread has one to three words. Who scales them?",
            "Where first + 4 > count: a loop from first to count, word by word.",
        ),
        "": "Y[i] = factor * X[i] for each i below count; multiply all four words of the float4.",
    },
)
def float4_rows(trial: Trial) -> None:
    """The first size ends within a float4, so that the X-ray sees what happens there."""
    first = 4098
    for count in trial.sizes("count", first, 1, 3, 1024, 33 * 33):
        x, _, _ = trial.inputs(1, 1, count)
        y, factor = trial.empty(count), 0.125
        trial.launch("scale_all", blocks(count, 512), 128, x.ravel(), y, count, factor)
        trial.expect("Y", y, factor * x.ravel())
    if trial.report:
        at_most = first // 128 + 3  # of the last four words, one by one
        for array in ("X", "Y"):
            requests = trial.figures(array).requests
            trial.limit(f"requests of {array} for {first:,} words", requests, at_most=at_most, symptom="requests")


@exercise(
    "04_pad_the_tile",
    minutes=5,
    hints={
        "conflicts": (
            "8 lanes are served together. In which banks do their float4 begin? Row j begins j * PITCH * 4 words on.",
            "8 float4 fill the 32 banks exactly once if PITCH is odd: 0, 4, 12, ... become all different.",
            "PITCH is D4 where D4 is odd, and one more where it is even: D4 | 1.",
        ),
        "bytes": (
            "No conflicts, and too many bytes. How much must a row be longer for the next one to begin at other banks?",
            "One float4 a row is enough.",
        ),
        "race": "Two threads write one place. Which j and c do they have, and what does place(j, c) make of them?",
        "bounds": "place(j, c) must stay below BLOCK_N * PITCH for all 32 rows and all D4 float4.",
        "": "Each (j, c) needs a place of its own: no two of them may share one.",
    },
)
def pad_the_tile(trial: Trial) -> None:
    """Conflicts and bytes at 16 float4 a row; right at an odd number of them as well."""
    runs = []
    for n_kv, d in trial.sizes("N_kv, d", (64, 64), (33, 20), (1, 20), (31, 20)):
        q, k, _ = trial.inputs(1, n_kv, d)
        s = trial.empty(n_kv)
        runs += [trial.launch("scores_of_a_query", blocks(n_kv, 32), 32, q.ravel(), k, s, n_kv, HEAD_DIM=d)]
        trial.expect("s", s, product(k, q.ravel()))
    if trial.report:
        trial.limit("bank conflicts", trial.figures("K_smem").conflicts, at_most=0, symptom="conflicts")
        trial.limit("bytes of shared memory", runs[0].shared_size_bytes, at_most=32 * 17 * 16, symptom="bytes")
