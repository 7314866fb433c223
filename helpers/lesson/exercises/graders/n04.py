"""Graders of notebooks 04 and 04b."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises import hints
from helpers.lesson.exercises.graders.expected import attention_parts, blocks, product
from helpers.lesson.exercises.trial import FIRST, XRAY, Trial, exercise

# What a row's threads exchange, each function by itself: which of the holes is wrong?
PROBES = """
extern "C" __global__ void probe_max(const float* a, float* result) { result[threadIdx.x] = row_max(a[threadIdx.x]); }
extern "C" __global__ void probe_sum(const float* a, float* result) { result[threadIdx.x] = row_sum(a[threadIdx.x]); }
"""


@exercise(
    "04_register_tile",
    minutes=15,
    hints={
        "maximum": (
            "row_max is wrong: each of a row's 8 threads calls it with a value of its own, and all 8 need the largest.",
            "The lanes of a row differ in bits 0, 1 and 2: exchange with lane ^ 1, lane ^ 2 and lane ^ 4.",
            "a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit)) for bit = 1, 2, 4.",
        ),
        "sum": (
            "row_max is right, row_sum is not: the row's sum is that of its 8 threads, each of them once.",
            "The same three exchanges as for the maximum, with += instead of fmaxf.",
        ),
        "products": (
            "row_max and row_sum are right, the scores are not. Are all 16 products in s, each added to what is there?",
            "s[i][j] is row i against key j of this thread's tile: q[i] times k[j], summed over all columns c.",
            "s[i][j] += q[i] * k[j] in two unrolled loops, over i and over j.",
        ),
        "exchanges": (
            "The result is right, with too many shuffles: three reach all 8 lanes. What does a hold after the first?",
            "After the exchange with lane ^ 1, a is that of two lanes; ^ 2 makes it that of four, ^ 4 that of eight.",
        ),
        "mask": (
            "The first argument names the lanes that call the shuffle, a bit for each. Which lanes of a warp do?",
            "All 32 do, not one row's 8: 0xffffffff. Which lane is read follows from the third argument alone.",
        ),
        "deadlock": "All lanes that the mask names must call the shuffle: is yours inside an if that some lanes skip?",
    },
)
def register_tile(trial: Trial) -> None:
    """Test the two functions by themselves; then maxima, to which sums are relative, the sums, and the exchanges."""
    a = trial.rng.standard_normal(128).astype(np.float32)
    shuffles = {}
    for name, reduce, symptom in (("max", np.max, "maximum"), ("sum", np.sum, "sum")):
        result = trial.empty(128)
        trial.launch(f"probe_{name}", 1, 128, a, result, extra=PROBES, HEAD_DIM=8)
        of_rows = np.repeat(reduce(a.reshape(-1, 8), axis=1), 8)
        every = 1 if name == "max" else 8  # the kernel uses the sum of the row's first thread alone
        trial.expect(f"row_{name} of 128 numbers", trial.xp.asnumpy(result)[::every], of_rows[::every], symptom=symptom)
        # Of one warp; where that is more, of one row: the four rows of a warp may shuffle each by itself.
        for threads in (32, 8) if trial.report and trial.rows[FIRST].passed is not False else ():
            if shuffles.get(name, 4) > 3:
                trial.launch(f"probe_{name}", 1, threads, a, result, extra=PROBES, HEAD_DIM=8)
                shuffles[name] = trial.report.collectives
    for n, n_kv, d in trial.sizes("N, N_kv, d", (64, 64, 8), (33, 65, 8), (1, 1, 8), (130, 31, 8), (64, 64, 72)):
        q, k, v = trial.inputs(n, n_kv, d)
        m, lse = trial.empty(n), trial.empty(n)
        trial.launch("tile_lse", blocks(n, 64), 128, q, k, m, lse, n, n_kv, d**-0.5, extra=PROBES, HEAD_DIM=d)
        parts = attention_parts(q, k, v)
        trial.expect("M, the row maxima", m, parts.m, symptom="products")
        trial.expect("LSE", lse, parts.lse, symptom="products")
    for name, count in shuffles.items() if trial.report else ():
        trial.limit(f"shuffles of row_{name}", count, at_most=3, symptom="exchanges")


@exercise(
    "04_outer_product",
    minutes=15,
    hints={
        "requests": (
            "The scores are right. Does every word that a thread needs of a column pass from shared memory once?",
            "8 words of Q are two groups of four neighbours, and so are 8 words of K: four float4 in all.",
            "*reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]) for i = 0 and 4; the same for K_smem and x.",
        ),
        "reads": "The scores are right, but they do not come from shared memory: read Q_smem and K_smem.",
        "unset": "A thread has 8 words of Q and 8 words of K for each column. Are all 16 registers given a value?",
        **dict.fromkeys(
            ("crash", "bounds"),
            (
                "Q_smem[c] and K_smem[c] have 64 words, and a float4 begins at a multiple of 4 of them. Does your "
                "index count words or float4?",
                "*reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]) for i = 0 and 4; the same for K_smem and x.",
            ),
        ),
        "": (
            "s[i][j] is the sum over all columns c of a row's word times a key's word. Which 16 words are a thread's?",
            "Row i is at(i, y) of Q_smem[c], key j is at(j, x) of K_smem[c].",
            "Two arrays of 8 registers, q and k, then s[i][j] += q[i] * k[j] in two unrolled loops.",
        ),
    },
)
def outer_product(trial: Trial) -> None:
    """Test the output, then that each word comes from shared memory once, four to a request."""
    first = 64, 128, 8
    for n, n_kv, d in trial.sizes("N, N_kv, d", first, (33, 65, 8), (1, 1, 8), (70, 31, 8), (64, 128, 72)):
        q, k, _ = trial.inputs(n, n_kv, d)
        s = trial.empty(n, n_kv)
        trial.launch("outer_products", (blocks(n, 64), blocks(n_kv, 64)), 64, q, k, s, n, n_kv, HEAD_DIM=d)
        trial.expect("S", s, product(q, k.T), tolerance=1e-4)  # sums of up to 72 products, not scaled
    if trial.report:
        tiles = [trial.figures("Q_smem"), trial.figures("K_smem")]
        columns = 2 * first[2] * 2  # 2 blocks of 2 warps
        stores = 2 * columns
        loads = (sum(tile.requests for tile in tiles) - stores) / columns
        read = sum(tile.read for tile in tiles)
        trial.limit("bytes read from shared memory", read, at_least=4 * 16 * 32 * columns, symptom="reads")
        trial.limit("requests of shared memory for a column and warp", loads, at_most=4, symptom="requests")


@exercise(
    "04_float4_rows",
    minutes=8,
    notebook="04b",
    hints={
        "requests": (
            "The result is right. How many loads and stores does a thread execute for its four words?",
            "A float4 is loaded by one instruction: *reinterpret_cast<const float4*>(X + first).",
        ),
        "race": (
            "Several threads scale the same word. At which word does each thread's own tail begin?",
            "A thread's words are first, first + 1, first + 2 and first + 3, as far as they are below count.",
        ),
        "whole array": (
            "Few requests where count is a multiple of 4, many where it is not. Which threads have less than four "
            "words then, and which of them should still load a float4?",
            "Each thread decides for its own four words: first + 4 <= count.",
        ),
        **dict.fromkeys(
            ("crash", "place"),
            (
                "A float4 is not at the thread's word `first`, where it should be. What does its index count?",
                "X + first counts words; reinterpret_cast<const float4*>(X)[i] counts float4, so there i is first / 4.",
            ),
        ),
        **dict.fromkeys(
            ("bounds", "past"),
            (
                "The array ends within the last thread's four words. Which of them exist?",
                "Take the float4 only where first + 4 <= count; after that, word by word.",
            ),
        ),
        "empty": (
            "Some words are never scaled: those of the last thread, which has one to three?",
            "Where first + 4 > count: a loop from first to count, word by word.",
        ),
        "": "Y[i] = factor * X[i] for each i below count; multiply all four words of the float4.",
    },
)
def float4_rows(trial: Trial) -> None:
    """Test whole float4 first, without a tail. Then Y is longer, so that a write past its end shows."""
    first, second = 4096, 4602
    for count in trial.sizes("count", first, second, 1, 3, 33 * 33):
        x, _, _ = trial.inputs(1, 1, count)
        y, factor = trial.empty(count + 4 * (count % 4 > 0)), 0.125
        trial.launch("scale_all", blocks(count, 512), 128, x.ravel(), y, count, factor)
        if count == first and trial.rows[XRAY].passed is False:
            trial.rows[XRAY].symptoms = ("place",)
        written = trial.xp.asnumpy(y)
        past = np.count_nonzero(~hints.untouched(written[count:]))
        trial.expect("words of Y past the last one", np.array([past]), np.array([0]), symptom="past")
        trial.expect("Y", written[:count], factor * x.ravel())
    if trial.report:
        for count, awkward in ((first, False), (second, True)):
            at_most = count // 128 + 4  # whoever scales the last four words one by one takes four
            for array in ("X", "Y"):
                requests = trial.figures(array, awkward=awkward).requests
                what, symptom = f"requests of {array} for {count:,} words", "whole array" if awkward else "requests"
                trial.limit(what, requests, at_most=at_most, symptom=symptom)


@exercise(
    "04_pad_the_tile",
    minutes=10,
    notebook="04b",
    hints={
        "conflicts": (
            "8 lanes are served together. In which banks do their float4 begin? Row j begins j * PITCH * 4 words on.",
            "With PITCH = 16, rows begin at banks 0, 0, 0, ...; with 17 at 0, 4, 8, ... Which PITCHes give 8 places?",
            "Any odd one: 8 rows then begin at 8 different multiples of 4. Make D4 odd where it is even: D4 | 1.",
        ),
        "odd": (
            "No conflicts at d = 64, where a row has 16 float4. At d = 20 it has 5: what are PITCH and place() then?",
            "With PITCH = 5, 8 rows begin at banks 0, 20, 8, 28, 16, 4, 24 and 12. With 6, at 0, 24, 16, 8, 0, ...",
            "PITCH is D4 where D4 is odd, and one more where it is even: D4 | 1.",
        ),
        "bytes": (
            "Too many bytes of shared memory. How much longer must a row be for the next one to begin at other banks?",
            "One float4 a row is enough, at any HEAD_DIM.",
        ),
        "unset": "A place is read before it is written. Do the writer and the reader both take it from place(j, c)?",
        "shared memory": (
            "The tile does not fit in shared memory. PITCH counts float4: a row of HEAD_DIM words has D4 of them."
        ),
        "race": "Two threads write one place. Which j and c do they have, and what does place(j, c) make of them?",
        "bounds": (
            "place(j, c) must stay below BLOCK_N * PITCH for all 32 rows and all D4 float4.",
            "A row has D4 float4: PITCH may not be less, and c must stay within 0 .. D4 - 1 of its row.",
        ),
        "": "Each (j, c) needs a place of its own: no two of them may share one.",
    },
)
def pad_the_tile(trial: Trial) -> None:
    """Count conflicts and bytes for an even and for an odd number of float4 a row."""
    dims, runs = (64, 20, 96), []
    for n_kv in trial.sizes("N_kv", 64, 33, 1, 31):
        for d in dims:
            q, k, _ = trial.inputs(1, n_kv, d)
            s = trial.empty(n_kv)
            runs += [trial.launch("scores_of_a_query", blocks(n_kv, 32), 32, q.ravel(), k, s, n_kv, HEAD_DIM=d)]
            trial.expect("s", s, product(k, q.ravel()), at=f"N_kv = {n_kv}, d = {d}", tolerance=1e-4)
    if trial.report:
        for d, run, report, symptom in zip(dims, runs, trial.reports, ("conflicts", "odd", "conflicts"), strict=False):
            conflicts, size, most = report.shared["K_smem"].conflicts, run.shared_size_bytes, 32 * (d // 4 + 1) * 16
            limits = [(f"bank conflicts at d = {d}", conflicts, 0, symptom)]
            limits.insert(d == dims[0], (f"bytes of shared memory at d = {d}", size, most, "bytes"))
            for what, got, at_most, reason in limits:
                trial.limit(what, got, at_most=at_most, symptom=reason)
