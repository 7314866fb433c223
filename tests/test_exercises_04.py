"""Typical answers to the exercises of notebook 04."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

PRODUCT = "s[i][j] += q[i] * k[j];"
FLOAT4_OF_Q = "const float4 a = *reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]);"
FLOAT4_OF_K = "const float4 b = *reinterpret_cast<const float4*>(&K_smem[c][at(i, x)]);"
WORDS = "const float4 {0} = make_float4({1}[c][{2}], {1}[c][{2} + 1], {1}[c][{2} + 2], {1}[c][{2} + 3]);"
FLOAT2_OF_Q = (
    "const float2 a0 = *reinterpret_cast<const float2*>(&Q_smem[c][at(i, y)]);\n"
    "      const float2 a1 = *reinterpret_cast<const float2*>(&Q_smem[c][at(i + 2, y)]);\n"
    "      const float4 a = make_float4(a0.x, a0.y, a1.x, a1.y);"
)
LOAD, LOAD_AT = "*reinterpret_cast<const float4*>(X + first)", "reinterpret_cast<const float4*>(X)[{0}]"
STORE, STORE_AT = "*reinterpret_cast<float4*>(Y + first)", "reinterpret_cast<float4*>(Y)[{0}]"
VECTOR = "if (first + 4 <= count) {"
ELSE = "} else {\n    for (int i = first; i < count; ++i) Y[i] = factor * X[i];\n  }"
TAIL = "for (int i = count / 4 * 4; i < count; ++i) Y[i] = factor * X[i];"
PITCH = "constexpr int PITCH = D4 | 1;"

MAX = "for (int bit = 1; bit < THREADS_X; bit *= 2) a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit));"
SUM = "for (int bit = 1; bit < THREADS_X; bit *= 2) a += __shfl_xor_sync(0xffffffff, a, bit);"
ROWS_TILE = (
    "const auto row = cooperative_groups::tiled_partition<8>(cooperative_groups::this_thread_block());\n"
    "  a = cooperative_groups::reduce(row, a, cooperative_groups::{0}<float>());"
)
GROUPS = "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\n"


def of_max(name: str, new: str, symptom: str = "maximum", words: str = "row_max is wrong") -> Wrong:
    """Replace the body of row_max by another, which fails at the first size."""
    return Wrong(name, ((MAX, new),), "first", words, symptom)


def of_sum(name: str, new: str, symptom: str = "sum", words: str = "row_max is right, row_sum is not") -> Wrong:
    return Wrong(name, ((SUM, new),), "first", words, symptom)


def of_products(name: str, new: str) -> Wrong:
    """Replace the multiply-adds, with both functions right."""
    words = "row_max and row_sum are right, the scores are not"
    return Wrong(name, (("s[i][j] += q[i] * k[j]", new),), "first", words, "products")


def padded(name: str, pitch: str, row: str, words: str, symptom: str) -> Wrong:
    return Wrong(name, ((PITCH, f"constexpr int PITCH = {pitch};"),), row, words, symptom)


TABLE = {
    "04_register_tile": (
        of_max("the whole warp's maximum", MAX.replace("THREADS_X", "32")),
        of_max("no exchange of maxima", ""),
        of_max("two exchanges", MAX.replace("THREADS_X", "4")),
        of_max("mask of the first row", MAX.replace("0xffffffff", "0xff"), "mask", "names the lanes that call"),
        of_max("half of the lanes call", f"if (threadIdx.x % 2 == 0) {MAX}", "deadlock", "inside an if"),
        of_sum("own value at every exchange", SUM.replace("a += ", "a += a + ")),
        of_sum("up, so that the last lane has it", SUM.replace("xor", "up")),
        of_sum("mask of the first row, in the sum", SUM.replace("0xffffffff", "0xff"), "mask", "names the lanes"),
        of_products("only the diagonal", "if (i == j) s[i][j] += q[i] * k[j]"),
        of_products("the tile transposed", "s[j][i] += q[i] * k[j]"),
        Wrong("all three exchanges twice", ((MAX, f"{MAX}\n  {MAX}"),), "limit", "shuffles of row_max: 6", "exchanges"),
        Wrong(
            "the sum handed out again",
            ((SUM, f"{SUM}\n  a = __shfl_sync(0xffffffff, a, threadIdx.x / 8 * 8 % 32);"),),
            "limit",
            "shuffles of row_sum: 4",
            "exchanges",
        ),
        Right(
            "three lines",
            (
                (
                    SUM,
                    "a += __shfl_xor_sync(0xffffffff, a, 4);\n"
                    "  a += __shfl_xor_sync(0xffffffff, a, 2), a += __shfl_xor_sync(0xffffffff, a, 1);",
                ),
            ),
        ),
        Right("keys outside, rows inside", (("s[i][j] += q[i] * k[j]", "s[j][i] += q[j] * k[i]"),)),
        Right("the sum of the row's first lane only", ((SUM, SUM.replace("xor", "down")),)),
        Right("a mask of the row's lanes", ((MAX, MAX.replace("0xffffffff", "0xff << threadIdx.x % 32 / 8 * 8")),)),
        Right("cooperative groups", ((MAX, ROWS_TILE.format("greater")), ("#define NEG", f"{GROUPS}#define NEG"))),
    ),
    "04_outer_product": (
        Wrong(
            "word by word",
            ((FLOAT4_OF_Q, WORDS.format("a", "Q_smem", "at(i, y)")),),
            "limit",
            "requests of shared memory for a column and warp",
            "requests",
        ),
        Wrong(
            "from global memory",
            (
                (FLOAT4_OF_Q, "const float4 a = {};"),
                (FLOAT4_OF_K, "const float4 b = {};"),
                (
                    PRODUCT,
                    "if (first_row + at(i, y) < N && first_key + at(j, x) < N_kv) s[i][j] += "
                    "Q[(first_row + at(i, y)) * HEAD_DIM + c] * K[(first_key + at(j, x)) * HEAD_DIM + c];",
                ),
            ),
            "limit",
            "bytes read from shared memory",
            "reads",
        ),
        Wrong(
            "x and y exchanged",
            (("[at(i, y)]", "[at(i, x)]"), ("&K_smem[c][at(i, x)]", "&K_smem[c][at(i, y)]")),
            "first",
        ),
        Wrong("one float4 of each", (("i < TILE; i += 4", "i < 4; i += 4"),), "X-ray", "Are all 16 registers", "unset"),
        Wrong("the first column alone", (("&Q_smem[c]", "&Q_smem[0]"),), "first", "S at"),
        Wrong(
            "a float4 at each word",
            ((FLOAT4_OF_Q, FLOAT4_OF_Q.replace("at(i, y)", "at(i, y) + 1")),),
            "X-ray",
            "Does your index count words or float4?",  # as a crash, where the compiler's load needs 16 aligned bytes
        ),
        Wrong(
            "words counted as float4",
            ((FLOAT4_OF_Q, "const float4 a = reinterpret_cast<const float4*>(Q_smem[c])[at(i, y)];"),),
            "X-ray",
            "Does your index count words or float4?",
            "bounds",
        ),
        Wrong("the scores transposed", ((PRODUCT, "s[j][i] += q[i] * k[j];"),), "first", "belongs to", "index"),
        Wrong(
            "float2",
            ((FLOAT4_OF_Q, FLOAT2_OF_Q),),
            "limit",
            "requests of shared memory for a column and warp: 6",
            "requests",
        ),
        Right(
            "by the index of a float4",
            ((FLOAT4_OF_Q, "const float4 a = reinterpret_cast<const float4*>(Q_smem[c])[at(i, y) / 4];"),),
        ),
        Right("columns outside", ((PRODUCT, "s[j][i] += q[j] * k[i];"),)),
        Right(
            "a fused multiply-add by name",
            ((PRODUCT, "s[i][j] = fmaf(q[i], k[j], s[i][j]);"),),
        ),
    ),
    "04_float4_rows": (
        Wrong(
            "word by word",
            ((VECTOR, "if (false) {"), ("i < count", "i < first + 4 && i < count")),
            "limit",
            "requests of X for 4,096 words",
            "requests",
        ),
        Wrong("a factor of the first size", (("a.x *= factor", "a.x *= 0.125f"),), "awkward", "Y at count = 4602"),
        Wrong("no tail", ((ELSE, "}"),), "awkward", "never scaled", "empty"),
        Wrong("past the end", ((VECTOR, "if (first < count) {"),), "awkward", "Which of them exist?", "bounds"),
        Wrong("one past the end", ((VECTOR, "if (first + 3 <= count) {"),), "awkward", "Which of them exist?", "past"),
        Wrong(
            "a float4 for each word", ((LOAD, LOAD_AT.format("first")),), "first", "What does its index count?", "crash"
        ),
        Wrong(
            "stored four times as far", ((STORE, STORE_AT.format("first")),), "first", "What does its index", "crash"
        ),
        Wrong(
            "misaligned",
            ((LOAD, LOAD.replace("first", "(first ? first - 1 : 0)")),),
            "X-ray",
            "What does its index",
            "place",
        ),
        Wrong("three words", ((", a.w *= factor", ""),), "first"),
        Wrong("the tail is not scaled", (("Y[i] = factor * X[i];", "Y[i] = X[i];"),), "awkward"),
        Wrong(
            "the tail begins late", (("for (int i = first; i", "for (int i = first + 1; i"),), "awkward", "", "empty"
        ),
        Wrong(
            "stores word by word",
            (
                (
                    f"{STORE} = a;",
                    "Y[first] = a.x, Y[first + 1] = a.y, Y[first + 2] = a.z, Y[first + 3] = a.w;",
                ),
            ),
            "limit",
            "requests of Y for 4,096 words",
            "requests",
        ),
        Wrong(
            "float4 only where the whole array has them",
            ((VECTOR, "if (count % 4 == 0) {"), ("i < count", "i < first + 4 && i < count")),
            "limit",
            "requests of X for 4,602 words: 144 (the limit: at most 39)",
            "whole array",
        ),
        Wrong(
            "float4 only where the whole block has them",
            ((VECTOR, "if (4 * (blockIdx.x + 1) * THREADS <= count) {"), ("i < count", "i < first + 4 && i < count")),
            "limit",
            "Which threads have less than four words",
            "whole array",
        ),
        Wrong("no guard", ((VECTOR, "if (true) {"),), "awkward", "Which of them exist?", "bounds"),
        Wrong(
            "every thread does the tail",
            ((ELSE, f"}}\n  {TAIL}"),),
            "X-ray",
            "At which word does each thread's own",
            "race",
        ),
        Wrong(
            "one word scaled twice",
            (("a.x *= factor,", "a.x *= factor * factor,"),),
            "first",
            "multiply all four",
            "wrong",
        ),
        Right(
            "by the index of a float4",
            ((LOAD, LOAD_AT.format("first / 4")),),
        ),
        Right("the other comparison", ((VECTOR, "if (count - first > 3) {"),)),
    ),
    "04_pad_the_tile": (
        padded("unpadded", "D4", "limit", "8 lanes are served together", "conflicts"),
        padded("two float4", "D4 + 2", "limit", "bank conflicts at d = 64", "conflicts"),
        padded("one more, even where that is even", "D4 + 1", "limit", "At d = 20 it has 5", "odd"),
        padded("three float4", "D4 + 3", "limit", "bytes of shared memory at d = 64", "bytes"),
        padded("17 at any size", "17", "first", "must stay below", "crash"),
        padded("25 at any size", "25", "limit", "bytes of shared memory at d = 64", "bytes"),
        padded("a row of words", "HEAD_DIM + 1", "compiles", "PITCH counts float4", "shared memory"),
        Wrong(
            "the reader's own place",
            (("K_smem[place(threadIdx.x, c)]", "K_smem[threadIdx.x * D4 + c]"),),
            "X-ray",
            "both take it from place(j, c)",
            "unset",
        ),
        Wrong("moved by one", (("j * PITCH + c;", "j * PITCH + c + 1;"),), "X-ray", "must stay below", "crash"),
        Wrong("columns of rows", (("return j * PITCH + c;", "return c * PITCH + j;"),), "X-ray", "race: ", "race"),
        Wrong(
            "the row swizzles too far", (("j * PITCH + c;", "j * PITCH + (c ^ j);"),), "first", "stay below", "crash"
        ),
        Right("one more where even", ((PITCH, "constexpr int PITCH = D4 % 2 == 0 ? D4 + 1 : D4;"),)),
        Right(
            "a swizzle in place of padding",
            (
                (PITCH, "constexpr int PITCH = D4;"),
                ("return j * PITCH + c;", "return j * PITCH + (D4 % 8 == 0 ? c ^ j % 8 : c);"),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
