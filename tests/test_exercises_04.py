"""Typical answers to the exercises of notebook 04."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

PRODUCT = "s[i][j] += q[i] * k[j];"
FLOAT4_OF_Q = "const float4 a = *reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]);"
FLOAT4_OF_K = "const float4 b = *reinterpret_cast<const float4*>(&K_smem[c][at(i, x)]);"
WORDS = "const float4 {0} = make_float4({1}[c][{2}], {1}[c][{2} + 1], {1}[c][{2} + 2], {1}[c][{2} + 3]);"
VECTOR = "if (first + 4 <= count) {"
ELSE = "} else {\n    for (int i = first; i < count; ++i) Y[i] = factor * X[i];\n  }"
PITCH = "constexpr int PITCH = D4 | 1;"

TABLE = {
    "04_register_tile": (
        Wrong(
            "no exchange of maxima",
            (("for (int bit = 1; bit < THREADS_X; bit *= 2) a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit));", ""),),
            "first",
            "M, the row maxima",
            "maximum",
        ),
        Wrong(
            "no exchange of sums",
            (("for (int bit = 1; bit < THREADS_X; bit *= 2) a += __shfl_xor_sync(0xffffffff, a, bit);", ""),),
            "first",
            "LSE",
            "sum",
        ),
        Wrong(
            "two exchanges",
            (("bit < THREADS_X; bit *= 2) a = fmaxf", "bit < 4; bit *= 2) a = fmaxf"),),
            "first",
            "",
            "maximum",
        ),
        Wrong(
            "the whole warp's sum",
            (("bit < THREADS_X; bit *= 2) a +=", "bit < 32; bit *= 2) a +="),),
            "first",
            "LSE",
            "sum",
        ),
        Wrong(
            "the whole warp's maximum",
            (("bit < THREADS_X; bit *= 2) a = fmaxf", "bit < 32; bit *= 2) a = fmaxf"),),
            "first",
            "",
            "maximum",
        ),
        Wrong("steps of 1", (("bit *= 2) a +=", "bit += 1) a +="),), "first", "LSE", "sum"),
        Wrong(
            "only the diagonal",
            (("s[i][j] += q[i] * k[j]", "if (i == j) s[i][j] += q[i] * k[j]"),),
            "first",
            "",
            "maximum",
        ),
        Wrong("the tile transposed", (("s[i][j] += q[i] * k[j]", "s[j][i] += q[i] * k[j]"),), "first", "", "maximum"),
        Wrong("the last column only", (("s[i][j] += q[i] * k[j]", "s[i][j] = q[i] * k[j]"),), "first", "", "maximum"),
        Wrong(
            "a maximum of sums",
            (("a = fmaxf(a, __shfl_xor_sync", "a = fmaxf(a, a + __shfl_xor_sync"),),
            "first",
            "",
            "maximum",
        ),
        Right(
            "three lines",
            (
                (
                    "for (int bit = 1; bit < THREADS_X; bit *= 2) a += __shfl_xor_sync(0xffffffff, a, bit);",
                    "a += __shfl_xor_sync(0xffffffff, a, 4);\n"
                    "  a += __shfl_xor_sync(0xffffffff, a, 2), a += __shfl_xor_sync(0xffffffff, a, 1);",
                ),
            ),
        ),
        Right("keys outside, rows inside", (("s[i][j] += q[i] * k[j]", "s[j][i] += q[j] * k[i]"),)),
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
            "every word for every product",
            ((PRODUCT, "s[i][j] += Q_smem[c][at(i, y)] * K_smem[c][at(j, x)];"),),
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
        Wrong("the second group is the first", (("&Q_smem[c][at(i, y)]", "&Q_smem[c][at(0, y)]"),), "first"),
        Wrong("eight neighbours", (("&Q_smem[c][at(i, y)]", "&Q_smem[c][8 * y + i]"),), "first"),
        Wrong("the diagonal only", ((PRODUCT, "if (i == j) s[i][j] += q[i] * k[j];"),), "first"),
        Wrong("overwritten", ((PRODUCT, "s[i][j] = q[i] * k[j];"),), "first"),
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
            "requests of X for 4,098 words",
            "requests",
        ),
        Wrong("no tail", ((ELSE, "}"),), "first", "Y", "empty"),
        Wrong("past the end", ((VECTOR, "if (first < count) {"),), "first", "Y", "crash"),
        Wrong("three words", ((", a.w *= factor", ""),), "first"),
        Wrong("the tail is not scaled", (("Y[i] = factor * X[i];", "Y[i] = X[i];"),), "first"),
        Wrong("the tail begins late", (("for (int i = first; i", "for (int i = first + 1; i"),), "first", "Y", "empty"),
        Wrong(
            "stores word by word",
            (
                (
                    "*reinterpret_cast<float4*>(Y + first) = a;",
                    "Y[first] = a.x, Y[first + 1] = a.y, Y[first + 2] = a.z, Y[first + 3] = a.w;",
                ),
            ),
            "limit",
            "requests of Y for 4,098 words",
            "requests",
        ),
        Right(
            "by the index of a float4",
            (("*reinterpret_cast<const float4*>(X + first)", "reinterpret_cast<const float4*>(X)[first / 4]"),),
        ),
        Right("the other comparison", ((VECTOR, "if (count - first > 3) {"),)),
    ),
    "04_pad_the_tile": (
        Wrong("unpadded", ((PITCH, "constexpr int PITCH = D4;"),), "limit", "bank conflicts: ", "conflicts"),
        Wrong("two float4", ((PITCH, "constexpr int PITCH = D4 + 2;"),), "limit", "bank conflicts: ", "conflicts"),
        Wrong("twice as long", ((PITCH, "constexpr int PITCH = 2 * D4;"),), "limit", "bank conflicts: ", "conflicts"),
        Wrong("three float4", ((PITCH, "constexpr int PITCH = D4 + 3;"),), "limit", "bytes of shared memory", "bytes"),
        Wrong("rows overlap", ((PITCH, "constexpr int PITCH = D4 - 1;"),), "first"),
        Wrong("columns of rows", (("return j * PITCH + c;", "return c * PITCH + j;"),), "X-ray", "race: ", "race"),
        Right("one more where even", ((PITCH, "constexpr int PITCH = D4 % 2 == 0 ? D4 + 1 : D4;"),)),
        Right("one more", ((PITCH, "constexpr int PITCH = D4 + 1;"),)),
        Wrong(
            "a column of rows",
            ((PITCH, "constexpr int PITCH = D4;"), ("return j * PITCH + c;", "return c * BLOCK_N + j;")),
            "limit",
            "bank conflicts: ",
            "conflicts",
        ),
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
