"""Typical answers to the exercises of notebook 02."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

ONE_TILE = ("K_smem[2]", "K_smem[1]"), ("K_smem[first / BLOCK_N % 2]", "K_smem[0]")

TURN = "K_smem[first / BLOCK_N % 2]"
FOR_WORDS = "  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) {"
SHARE = "BLOCK_N * HEAD_DIM / BLOCK_M"
WHICH = "    const int j = i / HEAD_DIM, c = i % HEAD_DIM;\n"
A_ROW_EACH = "  for (int c = 0, j = threadIdx.x; j < BLOCK_N && c < HEAD_DIM; ++c) {"
STRIDE, PLACE = "HEAD_DIM + 4;", "return r * STRIDE + c;"
AFTER_MAXIMUM = "    }\n    __syncthreads();\n"
END_OF_LOOP = ("    m_i = m_new;\n", "    m_i = m_new;\n    __syncthreads();\n")
LATE = "    const float m_new = maximum;\n    __syncthreads();"

TABLE = {
    "02_load_tile": (
        Wrong("forgets the tail", (("first + j < N_kv ? ", "true ? "),), "awkward", "illegal read of K", "bounds"),
        Wrong(
            "lets one row too many in", (("first + j < N_kv ? ", "first + j <= N_kv ? "),), "awkward", "SUM", "bounds"
        ),
        Wrong(
            "skips missing rows, which keep old words",
            (("    tile[j][c] = first + j < N_kv ? ", "    if (first + j < N_kv) tile[j][c] = true ? "),),
            "awkward",
            "SUM",
        ),
        Wrong(
            "a column for each thread",
            (
                (FOR_WORDS, "  const int c = threadIdx.x;\n  for (int j = 0; j < BLOCK_N && c < HEAD_DIM; ++j) {"),
                (WHICH, ""),
            ),
            "awkward",
            "Which thread copies column 70",
        ),
        Wrong(
            "eight lanes",
            (
                (
                    "int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M",
                    "int i = threadIdx.x; threadIdx.x < 8 && i < BLOCK_N * HEAD_DIM; i += 8",
                ),
            ),
            "limit",
            "requests of K: 32 (the limit: at most 8)",
            "few",
        ),
        Wrong("64 threads, whatever BLOCK_M is", (("i += BLOCK_M", "i += 64"),), "awkward", "wrong with 32", "threads"),
        Wrong(
            "an index of 32 bits", (("(size_t)(first + j)", "(first + j)"),), "awkward", "beyond 32 bits", "overflow"
        ),
        Wrong(
            "rows of 8 words",
            (("i / HEAD_DIM, c = i % HEAD_DIM", "i / 8, c = i % 8"),),
            "awkward",
            "where rows are longer",
            "width",
        ),
        Wrong(
            "rows of BLOCK_N words",
            (("i / HEAD_DIM, c = i % HEAD_DIM", "i / BLOCK_N, c = i % BLOCK_N"),),
            "X-ray",
            "Several threads write the same word",
            "race",
        ),
        Wrong(
            "the last row again",
            (("first + j < N_kv ? ", "true ? "), ("(first + j)", "min(first + j, N_kv - 1)")),
            "awkward",
            "rows that K does not have",
            "tail",
        ),
        Wrong(
            "one word too many",
            (("i < BLOCK_N", "i <= BLOCK_N"),),
            "X-ray",
            "Which array does the line above name?",
            "crash",
        ),
        Wrong(
            "stops where K ends",
            (("    tile[j][c] = first", "    if (first + j >= N_kv) break;\n    tile[j][c] = first"),),
            "awkward",
            "rows that K does not have",
            "tail",
        ),
        Wrong("a word for each thread", ((FOR_WORDS, "  { const int i = threadIdx.x;"),), "first", "", "unset"),
        Wrong("steps of the warp", (("i += BLOCK_M", "i += 32"),), "X-ray", "", ""),
        Wrong(
            "every thread copies all", ((FOR_WORDS, "  for (int i = 0; i < BLOCK_N * HEAD_DIM; ++i) {"),), "X-ray", ""
        ),
        Wrong(
            "the tile's rows for those of K", (("source[(size_t)(first + j)", "source[(size_t)(j)"),), "first", "SUM"
        ),
        Wrong(
            "rows and columns exchanged", (("[(size_t)(first + j) * HEAD_DIM + c]", "[first + j + c * N_kv]"),), "first"
        ),
        Wrong(
            "a row for each thread",
            ((FOR_WORDS, A_ROW_EACH), ("    const int j = i / HEAD_DIM, c = i % HEAD_DIM;\n", "")),
            "limit",
            "sectors of K: ",
            "sectors",
        ),
        Wrong(
            "a run of words for each thread",
            ((FOR_WORDS, f"  for (int n = 0, i; n < {SHARE}; ++n) {{\n    i = {SHARE} * threadIdx.x + n;"),),
            "limit",
            "sectors of K: ",
            "sectors",
        ),
        Right(
            "a while loop",
            ((FOR_WORDS, "  int i = threadIdx.x - BLOCK_M;\n  while ((i += BLOCK_M) < BLOCK_N * HEAD_DIM) {"),),
        ),
        Right("by blockDim", (("i += BLOCK_M", "i += blockDim.x"),)),
        Right(
            "zeros, then words",
            (
                (
                    "    tile[j][c] = first + j < N_kv ? ",
                    "    tile[j][c] = 0.0f;\n    if (first + j < N_kv) tile[j][c] = true ? ",
                ),
            ),
        ),
    ),
    "02_no_conflicts": (
        Wrong("stride 64", ((STRIDE, "HEAD_DIM;"),), "limit", "bank conflicts of a block at d = 64: ", "conflicts"),
        Wrong("stride 65", ((STRIDE, "HEAD_DIM + 1;"),), "limit", "bank conflicts of a block at", "conflicts"),
        Wrong(
            "stride 100", ((STRIDE, "HEAD_DIM + 36;"),), "limit", "bytes of shared memory at d = 64: 12,800", "bytes"
        ),
        Wrong("stride 76", ((STRIDE, "HEAD_DIM + 12;"),), "limit", "bytes of shared memory at d = 64: 9,728", "bytes"),
        Wrong("two rows in one place", ((PLACE, "return r / 2 * STRIDE + c;"),), "first", "PART"),
        Wrong("rows too short", ((STRIDE, "4;"),), "first", "illegal write to ", "crash"),
        Wrong("writer and reader differ", (("x = tile[place(r, c)]", "x = tile[r * HEAD_DIM + c]"),), "first", "PART"),
        Wrong("outside the tile", ((PLACE, "return r * (STRIDE + 1) + c;"),), "X-ray", "out of bounds", "crash"),
        Wrong("stride 68 as a number", ((STRIDE, "68;"),), "first", "STRIDE holds a whole row", "crash"),
        Right(
            "words permuted, nothing padded", ((STRIDE, "HEAD_DIM;"), (PLACE, "return r * STRIDE + (c ^ 4 * (r % 8));"))
        ),
        Right("words turned round", ((STRIDE, "HEAD_DIM;"), (PLACE, "return r * STRIDE + (c + 4 * r) % HEAD_DIM;"))),
    ),
    "02_which_barrier": (
        Wrong("as it was", ((AFTER_MAXIMUM, "    }\n"), END_OF_LOOP), "X-ray", "race: ", "race"),
        Wrong("the second one left out", ((AFTER_MAXIMUM, "    }\n"),), "X-ray", "race: ", "race"),
        Wrong(
            "a third one",
            (END_OF_LOOP,),
            "limit",
            "barriers of a block in 3 tiles: 9 (the limit: at most 6)",
            "barriers",
        ),
        Wrong("inside the if", ((AFTER_MAXIMUM, "      __syncthreads();\n    }\n"),), "first", "", "deadlock"),
        Right(
            "every thread finds the maximum",
            (
                ("if (threadIdx.x == 0) {\n      float m = m_i;", "float m_new = m_i; {"),
                ("m = fmaxf(m, scores[k]);\n      maximum = m;", "m_new = fmaxf(m_new, scores[k]);"),
                ("    const float m_new = maximum;\n", ""),
            ),
        ),
        Wrong(
            "a second one in an else",
            ((AFTER_MAXIMUM, "    } else {\n      __syncthreads();\n    }\n"),),
            "first",
            "",
            "deadlock",
        ),
        Wrong(
            "a score of its own",
            (("m = fmaxf(m, scores[k])", "m = fmaxf(m, scores[0])"),),
            "awkward",
            "not of some of them",
            "large",
        ),
        Wrong(
            "one behind the maximum is read as well",
            (("    const float m_new = maximum;\n", LATE + "\n"),),
            "limit",
            "",
            "barriers",
        ),
        Wrong(
            "the new maximum too early",
            (("    l_i = l_i * expf(m_i - m_new)", "    m_i = m_new;\n    l_i = l_i * expf(m_i - m_new)"),),
            "first",
            "statements are right as they are",
            "wrong",
        ),
        Right("the last thread finds it", (("threadIdx.x == 0", "threadIdx.x == THREADS - 1"),)),
    ),
    "02_one_barrier": (
        Wrong("one tile, one barrier", ONE_TILE, "X-ray", "race: ", "race"),
        Wrong(
            "one tile, two barriers",
            (*ONE_TILE, ("    for (int i = threadIdx.x", "    __syncthreads();\n    for (int i = threadIdx.x")),
            "limit",
            "barriers in a block of 3 tiles: 6 (the limit: at most 3)",
            "barriers",
        ),
        Wrong(
            "keys from global memory",
            (("q[c] * tile[j][c]", "q[c] * K[(first + j) * HEAD_DIM + c]"),),
            "limit",
            "bytes read from shared memory: 0 (the limit: at least",
            "reads",
        ),
        Wrong("no barrier", (("__syncthreads();  // hazard", "// hazard"),), "X-ray", "race: ", "race"),
        Wrong("second tile forgotten", (("K_smem[2]", "K_smem[1]"),), "first", ""),
        Wrong("16 for BLOCK_N", ((TURN, "K_smem[first / 16 % 2]"),), "X-ray", "", "race"),
        Wrong(
            "no remainder",
            ((TURN, "K_smem[first / BLOCK_N]"),),
            "first",
            "Which tile does the third iteration use?",
            "crash",
        ),
        Right("a flag that flips", (("K_smem[first / BLOCK_N % 2]", "K_smem[(first / BLOCK_N) & 1]"),)),
        Right("three tiles", (("K_smem[2]", "K_smem[3]"), ("BLOCK_N % 2", "BLOCK_N % 3"))),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
