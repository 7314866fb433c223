"""Typical answers to the exercises of notebook 07: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SWIZZLE = "16 * (chunk ^ row % 8)"
XOR_1, XOR_2 = "__shfl_xor_sync(0xffffffff, a, 1)", "__shfl_xor_sync(0xffffffff, a, 2)"
REDUCE = f"  a = fmaxf(a, {XOR_1});\n  return fmaxf(a, {XOR_2});\n"
WAIT, BARRIER = "    cp_async_wait<0>();\n", "    __syncthreads();\n"
COPY = "    load_tile(V_smem[stage ^ 1], V, first + ROWS, N);\n"
TRANSPOSED = "ldmatrix_x4_trans(b, v + swizzle(lane % 16, 2 * n + lane / 16));"
A = tuple(f"pack(S[{i // 2}][{i % 2 * 2}], S[{i // 2}][{i % 2 * 2 + 1}])" for i in range(4))

TABLE = {
    "07_swizzle": (
        Wrong("chunks in their order", ((SWIZZLE, "16 * chunk"),), "limit", "bank conflicts: 112"),
        Wrong("one permutation for all rows", ((SWIZZLE, "16 * (chunk ^ 5)"),), "limit"),
        Wrong("four places for eight rows", ((SWIZZLE, "16 * (chunk ^ row % 4)"),), "limit"),
        Wrong("pairs of rows share a place", ((SWIZZLE, "16 * (chunk ^ row / 2 % 8)"),), "limit"),
        Wrong(
            "columns: loads are free of conflicts, stores are not",
            (("128 * row + " + SWIZZLE, "256 * chunk + 16 * row"),),
            "limit",
        ),
        Wrong("rows above 7 leave their row", ((SWIZZLE, "16 * (chunk ^ row)"),), "first"),
        Wrong("the chunk is forgotten", ((SWIZZLE, "16 * (row % 8)"),), "first"),
        Wrong("elements, not bytes", (("128 * row + " + SWIZZLE, "64 * row + 8 * (chunk ^ row % 8)"),), "first"),
        Right("a sum", ((SWIZZLE, "16 * ((chunk + row) % 8)"),)),
        Right("bits", (("128 * row + " + SWIZZLE, "(row << 7 | (chunk ^ (row & 7)) << 4)"),)),
        Right("the other way round", ((SWIZZLE, "16 * (chunk ^ (7 - row % 8))"),)),
    ),
    "07_row_max": (
        Wrong("no shuffle", ((REDUCE, "  return a;\n"),), "first"),
        Wrong("one shuffle", ((f"return fmaxf(a, {XOR_2})", "return a"),), "first"),
        Wrong(
            "the lanes of a column", ((XOR_1, XOR_1.replace("1)", "4)")), (XOR_2, XOR_2.replace("2)", "8)"))), "first"
        ),
        Wrong(
            "all lanes of the warp",
            ((REDUCE, "for (int i = 16; i; i /= 2) a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, i));\n  return a;\n"),),
            "first",
        ),
        Wrong("the same mask twice", ((XOR_2, XOR_1),), "first"),
        Wrong("keys four apart", (("2 * t + e % 2", "t + e % 2 * 4"),), "first"),
        Wrong("rows by t", (("row += g + 8", "row += t + 8"),), "first"),
        Wrong(
            "three shuffles", ((REDUCE, REDUCE.replace("  return", f"  a = fmaxf(a, {XOR_1});\n  return")),), "limit"
        ),
        Right("the other order", ((REDUCE, f"  a = fmaxf(a, {XOR_2});\n  return fmaxf(a, {XOR_1});\n"),)),
        Right("masks 3 and 1", ((XOR_1, XOR_1.replace("1)", "3)")), (XOR_2, XOR_2.replace("2)", "1)")))),
    ),
    "07_find_the_wait": (
        Wrong(
            "as it was",
            ((WAIT + BARRIER + COPY, COPY + "    cp_async_wait<1>();\n" + BARRIER),),
            "X-ray",
            "not waited for",
        ),
        Wrong("waits for all groups, with the copy first", ((WAIT + BARRIER + COPY, COPY + WAIT + BARRIER),), "X-ray"),
        Wrong("the barrier before the wait", ((WAIT + BARRIER, BARRIER + WAIT),), "first"),
        Wrong("no barrier", ((BARRIER, ""),), "X-ray"),
        Wrong("the barrier of a warp", ((BARRIER, "    __syncwarp();\n"),), "X-ray"),
        Wrong("no wait", ((WAIT, ""),), "first"),
        Wrong("leaves this tile in flight", ((WAIT, WAIT.replace("0", "1")),), "first"),
        Wrong(
            "a second barrier",
            ((WAIT + BARRIER + COPY, BARRIER + COPY + "    cp_async_wait<1>();\n" + BARRIER),),
            "limit",
        ),
        Wrong("the copy between wait and barrier", ((BARRIER + COPY, COPY + BARRIER),), "X-ray"),
        Right(
            "copies only what exists",
            ((COPY, "    if (first + ROWS < N) load_tile(V_smem[stage ^ 1], V, first + ROWS, N);\n"),),
        ),
    ),
    "07_two_products": (
        Wrong("ones", tuple((a, "pack(1.0f, 1.0f)") for a in A), "first"),
        Wrong("rows exchanged", ((A[0], "X"), (A[1], A[0]), ("X", A[1])), "first"),
        Wrong("a[1] and a[2] exchanged", ((A[1], "X"), (A[2], A[1]), ("X", A[2])), "first"),
        Wrong("halves exchanged", (("pack(S[0][0], S[0][1])", "pack(S[0][1], S[0][0])"),), "first"),
        Wrong("columns across the accumulators", ((A[0], "pack(S[0][0], S[1][0])"),), "first"),
        Wrong("V not transposed", ((TRANSPOSED, TRANSPOSED.replace("_trans", "")),), "first"),
        Wrong(
            "V as K is loaded",
            (
                (
                    TRANSPOSED,
                    TRANSPOSED.replace(
                        "lane % 16, 2 * n + lane / 16", "lane / 16 * 8 + lane % 8, 2 * n + lane / 8 % 2"
                    ),
                ),
            ),
            "first",
        ),
        Wrong(
            "V without the swizzle",
            ((TRANSPOSED, "ldmatrix_x4_trans(b, v + 128 * (lane % 16) + 16 * (2 * n + lane / 16));"),),
            "first",
        ),
        Wrong("a tile row by row", (("16 * (chunk ^ row % 8)", "16 * chunk"),), "limit", "bank conflicts"),
        Right(
            "in a loop",
            (
                (
                    "".join(f"    a[{i}] = {a};\n" for i, a in enumerate(A)),
                    "    for (int i = 0; i < 4; ++i) a[i] = pack(S[i / 2][i % 2 * 2], S[i / 2][i % 2 * 2 + 1]);\n",
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
