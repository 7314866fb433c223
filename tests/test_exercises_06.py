"""Typical answers to the exercises of notebook 06."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

STORE = "    if (lane < 16) factors[lane] = rescale;\n"
LOAD = "tc::load_matrix_sync(factor, factors, 0, tc::mem_col_major);"
MULTIPLY = """    for (int n = 0; n < HEAD_DIM / 16; ++n)
      for (int e = 0; e < factor.num_elements; ++e) acc[n].x[e] *= factor.x[e];
"""
TRIP = """    __shared__ __align__(128) float trip[16 * 16];
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      __syncwarp();
      tc::store_matrix_sync(trip, acc[n], 16, tc::mem_row_major);
      __syncwarp();
      for (int j = 0; lane < 16 && j < 16; ++j) trip[lane * 16 + j] *= rescale;
      __syncwarp();
      tc::load_matrix_sync(acc[n], trip, 16, tc::mem_row_major);
    }
"""
STORE_AND_WAIT = f"    __syncwarp();\n{STORE}    __syncwarp();\n"
FULL = """    __shared__ __align__(128) float full[16 * 16];
    __syncwarp();
    for (int j = 0; lane < 16 && j < 16; ++j) full[lane * 16 + j] = rescale;
    __syncwarp();
"""
LAYOUT = (  # on the GPUs that we know
    ("    Accumulator factor;\n", ""),
    (LOAD, ""),
    ("e < factor.num_elements", "e < 8"),
    ("factor.x[e]", "factors[lane / 4 + e / 2 % 2 * 8]"),
)
LOAD_Q, LOAD_K = "q_frag, Q_smem + k, STRIDE", "k_frag, K_smem + k, STRIDE"
STORE_S = "tc::store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major);\n"
MMA = "tc::mma_sync(S, q_frag, k_frag, S);"
ELEMENT, EXISTS = "S_smem[lane * S_STRIDE + j]", "first + j < N_kv"
SCALED = f"const float s = softmax_scale * {ELEMENT};"
SCORE = f"const float s = {EXISTS} ? softmax_scale * {ELEMENT} : NEG_INF;"
ZERO_SKIPPED = f"if ({ELEMENT} == 0.0f) continue;\n      {SCALED}"
ZERO_HIDDEN = f"{SCALED.replace('const ', '')}\n      if (s == 0.0f) s = NEG_INF;"
FMA = """    for (int e = lane; e < 256; e += 32) {
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c)
        dot += __half2float(Q_smem[e / 16 * STRIDE + c]) * __half2float(K_smem[e % 16 * STRIDE + c]);
      S_smem[e / 16 * S_STRIDE + e % 16] = dot;
    }
"""
READ = "for (int j = 0; j < 16; ++j) s[j] = S_smem[lane % 16 * S_STRIDE + j];\n"
PADDING = "X-ray", "how far apart are two rows of the tile?", "stride of Q and K"
P_STORE = "P_smem[lane * P_STRIDE + j] = __float2half(exp2f(s[j]));\n"
LAST = P_STORE + "    __syncwarp();\n"
MISSING = "    __syncwarp();\n    for (int j = 0; lane < 16"
NOT_THERE = (MISSING, "    for (int j = 0; lane < 16")

TABLE = {
    "06_row_of_scores": (
        Wrong(
            "no wait after the store",
            (("S_STRIDE, tc::mem_row_major);\n    __syncwarp();", "S_STRIDE, tc::mem_row_major);"),),
            "X-ray",
            "race: ",
            "race",
        ),
        Wrong("-10,000 for a key past the end", ((": NEG_INF;", ": -1e4f;"),), "awkward", "lse at N = 1", "tail"),
        Wrong("another scale", (("softmax_scale * S", "rsqrtf((float)HEAD_DIM) * S"),), "first", "lse at"),
        Wrong(
            "zeros count", (("first + j < N_kv ? softmax_scale", "true ? softmax_scale"),), "awkward", "lse at", "tail"
        ),
        Wrong(
            "loops of multiply-adds",
            (("      tc::mma_sync(S, q_frag, k_frag, S);\n", ""), (f"    {STORE_S}", FMA)),
            "limit",
            "CUDA cores computed it",
            "no product",
        ),
        Wrong("the stride of Q", ((LOAD_Q, LOAD_Q.replace("STRIDE", "HEAD_DIM")),), *PADDING),
        Wrong("the stride of K", ((LOAD_K, LOAD_K.replace("STRIDE", "HEAD_DIM")),), *PADDING),
        Wrong("K is not transposed", (("tc::col_major", "tc::row_major"),), "first", "not Q K^T", "layout of K"),
        Wrong("K from the first column on", (("K_smem + k", "K_smem"),), "awkward", "d = 48", "steps"),
        Wrong(
            "stored by columns",
            (("tc::mem_row_major", "tc::mem_col_major"),),
            "first",
            "store or read by columns",
            "by columns",
        ),
        Wrong(
            "another stride",
            (("S_smem, S, S_STRIDE", "S_smem, S, 16"),),
            "X-ray",
            "how far apart are two rows of S_smem?",
            "stride of S",
        ),
        Wrong(
            "not added up",
            (
                (
                    "tc::mma_sync(S, q_frag, k_frag, S);",
                    "tc::fill_fragment(S, 0.0f);\n      tc::mma_sync(S, q_frag, k_frag, S);",
                ),
            ),
            "awkward",
            "d = 48",
            "steps",
        ),
        Wrong(
            "nothing stored",
            (("tc::store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major);", ""),),
            "X-ray",
            "S never reaches S_smem",
            "not stored",
        ),
        Wrong(
            "the last key left out",
            (("first + j < N_kv ? softmax_scale", "first + j < N_kv - 1 ? softmax_scale"),),
            "first",
            "The last key counts for no row",
            "keys",
        ),
        Wrong("a score of 0 is no key", ((SCORE, ZERO_SKIPPED),), "first", "happens to be 0", "zero"),
        Wrong("a score of 0 becomes -inf", ((SCORE, ZERO_HIDDEN),), "first", "happens to be 0", "zero"),
        Wrong(
            "a product that is never reached",
            ((MMA, f"if (k < 0) {MMA}"), (f"    {STORE_S}", FMA)),
            "limit",
            "CUDA cores computed it",
            "no product",
        ),
        Wrong("the key in the tile", ((EXISTS, "j < N_kv"),), "awkward", "Which keys of the last tile", "tail"),
        Wrong("no scale", (("softmax_scale * S_smem", "S_smem"),), "first", "not scaled", "scale"),
        Wrong("a column of S", ((ELEMENT, "S_smem[j * S_STRIDE + lane]"),), "first", "read by columns", "by columns"),
        Wrong("Q is transposed", (("tc::row_major", "tc::col_major"),), "first", "Q's fragment", "layout of Q"),
        Wrong("half of the lanes store", ((STORE_S, f"if (lane < 16) {STORE_S}"),), "first", "", "deadlock"),
        Wrong("Q twice", (("k_frag, K_smem + k", "k_frag, Q_smem + k"),), "first", "lse at", "wrong"),
        Right(
            "a block's barrier",
            (
                (
                    "S_STRIDE, tc::mem_row_major);\n    __syncwarp();",
                    "S_STRIDE, tc::mem_row_major);\n    __syncthreads();",
                ),
            ),
        ),
        Right("a missing key is left out", ((SCORE, f"if (first + j >= N_kv) continue;\n      {SCALED}"),)),
        Right(
            "the loop ends at the last key",
            (
                ("lane < 16 && j < 16", "lane < 16 && j < 16 && first + j < N_kv"),
                (
                    "first + j < N_kv ? softmax_scale * S_smem[lane * S_STRIDE + j] : NEG_INF",
                    "softmax_scale * S_smem[lane * S_STRIDE + j]",
                ),
            ),
        ),
    ),
    "06_factor_fragment": (
        Wrong("no rescaling", ((MULTIPLY, ""),), "first", "O at"),
        Wrong("by columns", (("0, tc::mem_col_major", "0, tc::mem_row_major"),), "first", "not rows", "by columns"),
        Wrong("by the layout", LAYOUT, "awkward", "accumulators in another layout", "layout"),
        Wrong("all lanes store", ((STORE, "    factors[lane % 16] = rescale;\n"),), "limit", "stored twice", "twice"),
        Wrong(
            "32 factors", ((STORE, "    factors[lane] = rescale;\n"),), "X-ray", "past the end of factors", "outside"
        ),
        Wrong(
            "an array of 16 x 16",
            ((STORE_AND_WAIT, FULL), (LOAD, "tc::load_matrix_sync(factor, full, 16, tc::mem_row_major);")),
            "limit",
            "stored 16 times",
            "array",
        ),
        Wrong("one of the accumulators", (("acc[n].x[e] *=", "if (n == 0) acc[n].x[e] *="),), "first"),
        Wrong("its own factor", ((LOAD, ""), ("*= factor.x[e]", "*= rescale")), "first", "row lane % 16", "own row"),
        Wrong(
            "two accumulators",
            ((MULTIPLY, MULTIPLY.replace("n < HEAD_DIM / 16", "n < 2")),),
            "awkward",
            "which of the accumulators",
            "some",
        ),
        Wrong("stored at the row", (("factors[lane]", "factors[row]"),), "X-ray", "which has 16 floats", "outside"),
        Wrong("one lane stores", (("lane < 16", "lane == 0"),), "X-ray", "Which lanes store", "unset"),
        Wrong(
            "a barrier for the lanes that store",
            ((STORE + "    __syncwarp();\n", "    if (lane < 16) {\n" + STORE + "    __syncwarp();\n    }\n"),),
            "first",
            "only the store belongs",
            "deadlock",
        ),
        Wrong("a stride of 16", ((LOAD, LOAD.replace("0,", "16,")),), "X-ray", "how far apart are two columns?"),
        Wrong("no barrier after the store", ((STORE + "    __syncwarp();\n", STORE),), "X-ray", "race", "race"),
        Wrong("no barrier before the store", (("    __syncwarp();\n" + STORE, STORE),), "X-ray", "race", "race"),
        Wrong("a factor for each two lanes", ((STORE, STORE.replace("factors[lane]", "factors[lane / 2]")),), "X-ray"),
        Wrong("acc makes the trip", ((MULTIPLY, TRIP),), "limit", "for a tile: ", "trip"),
        Right("barriers of the block", (("    __syncwarp();\n" + STORE, "    __syncthreads();\n" + STORE),)),
        Right("all lanes store", (("if (lane < 16) factors[lane]", "if (lane >= 16) factors[lane - 16]"),)),
        Right(
            "elements first",
            ((MULTIPLY, MULTIPLY.replace("acc[n].x[e] *= factor.x[e]", "acc[n].x[e] = factor.x[e] * acc[n].x[e]")),),
        ),
    ),
    "06_find_the_race": (
        Wrong("the bug", (NOT_THERE,), "X-ray", "race", "race"),
        Wrong(
            "before the row is read",
            (NOT_THERE, ("    float s[16];\n", "    float s[16];\n    __syncwarp();\n")),
            "X-ray",
            "race",
        ),
        Wrong(
            "for half of the lanes",
            ((MISSING, "    if (lane < 16) __syncwarp(0xffff);\n    for (int j = 0; lane < 16"),),
            "X-ray",
        ),
        Wrong(
            "in the loop that reads",
            (NOT_THERE, (READ, READ.replace("s[j] = ", "{ s[j] = ").replace(";\n", "; __syncwarp(); }\n"))),
            "limit",
            "reached 16 times",
            "barriers in a loop",
        ),
        Wrong("after P is stored", (NOT_THERE, (LAST, LAST + "    __syncwarp();\n")), "X-ray", "race", "race"),
        Wrong(
            "everywhere",
            (("    float s[16];\n", "    __syncwarp();\n    float s[16];\n"),),
            "limit",
            "barriers for a tile: 5",
            "barriers",
        ),
        Wrong(
            "P elsewhere",
            (
                NOT_THERE,
                (
                    "__half* P_smem = reinterpret_cast<__half*>(S_smem);",
                    "__shared__ __align__(128) __half P_smem[16 * P_STRIDE];",
                ),
            ),
            "limit",
            "bytes of shared memory: ",
            "bytes",
        ),
        Right("a block's barrier", ((MISSING, MISSING.replace("__syncwarp", "__syncthreads")),)),
        Right("with its mask", ((MISSING, MISSING.replace("__syncwarp()", "__syncwarp(0xffffffff)")),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
