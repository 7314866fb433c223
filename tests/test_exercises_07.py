"""Typical answers to the exercises of notebooks 07 and 07b: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import re

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

from helpers.lesson.exercises import exercise

SWIZZLE = "16 * (chunk ^ row % 8)"
XOR_1, XOR_2 = "__shfl_xor_sync(0xffffffff, a, 1)", "__shfl_xor_sync(0xffffffff, a, 2)"
REDUCE = f"  a = fmaxf(a, {XOR_1});\n  return fmaxf(a, {XOR_2});\n"
ROW, X = "8 * (e / 2)", "the first"
BY_SHARED = """  __shared__ float all[32];
  __syncwarp();
  all[threadIdx.x] = a;
  __syncwarp();
  for (int i = 0; i < 4; ++i) a = fmaxf(a, all[threadIdx.x / 4 * 4 + i]);
  return a;
"""
WAIT, BARRIER = "    cp_async_wait<0>();\n", "    __syncthreads();\n"
SUM = "    for (int r = 0; r < ROWS; ++r) sum += V_smem[stage][r][threadIdx.x];\n"
COPY = "    load_tile(V_smem[stage ^ 1], V, first + ROWS, N);\n"
V_ROW = "&V_smem[lane % 16][16 * n + lane / 16 * 8]"
TRANSPOSED = f"ldmatrix_x4_trans(b, smem_address({V_ROW}));"
A = tuple(f"pack(S[{i // 2}][{i % 2 * 2}], S[{i // 2}][{i % 2 * 2 + 1}])" for i in range(4))

TABLE = {
    "07_swizzle": (
        Wrong("chunks in their order", ((SWIZZLE, "16 * chunk"),), "limit", "bank conflicts: 112", symptom="limit"),
        Wrong("one permutation for all rows", ((SWIZZLE, "16 * (chunk ^ 5)"),), "limit", symptom="limit"),
        Wrong("rows above 7 leave their row", ((SWIZZLE, "16 * (chunk ^ row)"),), "first", symptom="bounds"),
        Wrong(
            "an exclusive or of a chunk's bytes with a row",
            (("128 * row + " + SWIZZLE, "128 * row + 16 * chunk ^ row % 8"),),
            "first",
            "no multiple of 16",
            symptom="aligned",
        ),
        Wrong("rows of 144 bytes", (("128 * row + " + SWIZZLE, "144 * row + 16 * chunk"),), "first", symptom="bounds"),
        Wrong("rows change places", (("128 * row + " + SWIZZLE, "128 * (row ^ chunk) + 16 * chunk"),), "limit"),
        Wrong("an or", ((SWIZZLE, "16 * (chunk | row % 8)"),), "first", symptom="shared"),
        Wrong("rows modulo 8 twice", (("128 * row", "128 * (row % 8)"),), "first", symptom="shared"),
        Wrong(
            "elements, not bytes",
            (("128 * row + " + SWIZZLE, "64 * row + 8 * (chunk ^ row % 8)"),),
            "first",
            symptom="aligned",
        ),
        Right("a sum", ((SWIZZLE, "16 * ((chunk + row) % 8)"),)),
        Right("bits", (("128 * row + " + SWIZZLE, "(row << 7 | (chunk ^ (row & 7)) << 4)"),)),
        Right("bytes", (("128 * row + " + SWIZZLE, "128 * row + 16 * chunk ^ 16 * (row % 8)"),)),
        Right("the other way round", ((SWIZZLE, "16 * (chunk ^ (7 - row % 8))"),)),
    ),
    "07_row_max": (
        Wrong("no shuffle", ((REDUCE, "  return a;\n"),), "first", symptom="reduce"),
        Wrong("one shuffle", ((f"return fmaxf(a, {XOR_2})", "return a"),), "first", symptom="reduce"),
        Wrong(
            "in the last lane alone",
            ((XOR_1, XOR_1.replace("xor", "up")), (XOR_2, XOR_2.replace("xor", "up"))),
            "first",
            "row_allreduce",
            "reduce",
        ),
        Wrong("keys four apart", (("2 * t + e % 2", "t + e % 2 * 4"),), "first", symptom="elements"),
        Wrong(
            "rows and keys of e exchanged", ((ROW, "8 * (e % 2)"), ("e % 2;", "e / 2;")), "first", symptom="elements"
        ),
        Wrong(
            "through shared memory",
            ((REDUCE, BY_SHARED),),
            "limit",
            "requests of shared memory",
            symptom="shared",
        ),
        Wrong(
            "three shuffles",
            ((REDUCE, REDUCE.replace("  return", f"  a = fmaxf(a, {XOR_1});\n  return")),),
            "limit",
            symptom="limit",
        ),
        Right("the other order", ((REDUCE, f"  a = fmaxf(a, {XOR_2});\n  return fmaxf(a, {XOR_1});\n"),)),
        Right("a barrier of the warp", ((REDUCE, "  __syncwarp();\n" + REDUCE),)),
        Right("masks 3 and 1", ((XOR_1, XOR_1.replace("1)", "3)")), (XOR_2, XOR_2.replace("2)", "1)")))),
    ),
    "07_find_the_wait": (
        Wrong(
            "as it was",
            ((WAIT + BARRIER + COPY, COPY + "    cp_async_wait<1>();\n" + BARRIER),),
            "X-ray",
            "not waited for",
            symptom="order",
        ),
        Wrong(
            "waits for all groups, with the copy first",
            ((WAIT + BARRIER + COPY, COPY + WAIT + BARRIER),),
            "X-ray",
            symptom="order",
        ),
        Wrong("the barrier before the wait", ((WAIT + BARRIER, BARRIER + WAIT),), "first", symptom="others' copies"),
        Wrong("no barrier", ((BARRIER, ""),), "X-ray", symptom="barrier"),
        Wrong("the barrier of a warp", ((BARRIER, "    __syncwarp();\n"),), "X-ray", symptom="barrier"),
        Wrong("no wait", ((WAIT, ""),), "first", symptom="own copies"),
        Wrong("leaves this tile in flight", ((WAIT, WAIT.replace("0", "1")),), "first", symptom="own copies"),
        Wrong(
            "a second barrier",
            ((WAIT + BARRIER + COPY, BARRIER + COPY + "    cp_async_wait<1>();\n" + BARRIER),),
            "limit",
            symptom="limit",
        ),
        Wrong(
            "the barrier, the copy, then a wait",
            ((WAIT + BARRIER + COPY, BARRIER + COPY + "    cp_async_wait<1>();\n"),),
            "X-ray",
            symptom="others' copies",
        ),
        Wrong("into the tile that is summed", ((COPY, COPY.replace("stage ^ 1", "stage")),), "first", symptom="target"),
        Wrong("the barrier behind the sum", ((BARRIER, ""), (SUM, SUM + BARRIER)), "X-ray", symptom="others' copies"),
        Wrong("one thread waits", ((WAIT, "    if (threadIdx.x == 0) cp_async_wait<0>();\n"),), "first"),
        Wrong(
            "a barrier at either side of the sum",
            ((COPY, ""), (SUM, SUM + BARRIER + COPY)),
            "limit",
            symptom="limit",
        ),
        Wrong("the copy behind the sum", ((COPY, ""), (SUM, SUM + COPY)), "limit", "is copied: 0", symptom="overlap"),
        Wrong("waits for the next tile, too", ((COPY, COPY + WAIT),), "limit", "is copied: 0", symptom="overlap"),
        Right(
            "the sum from the last row on", ((SUM, SUM.replace("int r = 0; r < ROWS; ++r", "int r = ROWS; r-- > 0;")),)
        ),
        Right(
            "copies only what exists",
            ((COPY, "    if (first + ROWS < N) load_tile(V_smem[stage ^ 1], V, first + ROWS, N);\n"),),
        ),
    ),
    "07_two_products": (
        Wrong("ones", tuple((a, "pack(1.0f, 1.0f)") for a in A), "first", symptom="a"),
        Wrong("rows exchanged", ((A[0], "X"), (A[1], A[0]), ("X", A[1])), "first", symptom="a"),
        Wrong("V not transposed", ((TRANSPOSED, TRANSPOSED.replace("_trans", "")),), "first", symptom="transposed"),
        Wrong(
            "V as K is loaded",
            ((V_ROW, "&V_smem[lane / 16 * 8 + lane % 8][16 * n + lane / 8 % 2 * 8]"),),
            "first",
            symptom="b",
        ),
        Wrong(
            "V without the padding",
            ((V_ROW, "&V_smem[0][64 * (lane % 16) + 16 * n + lane / 16 * 8]"),),
            "first",
            symptom="unset",
        ),
        Wrong("every column twice", ((V_ROW, V_ROW.replace("16 * n", "8 * n")),), "first", symptom="b"),
        Wrong(
            "no tile",
            ((f"smem_address({V_ROW})", "2 * (STRIDE * (lane % 16) + 16 * n + lane / 16 * 8)"),),
            "first",
            "the address of a row",
        ),
        Wrong("all lanes in a row", ((V_ROW, V_ROW.replace("lane % 16", "lane")),), "first", "row below 16"),
        Wrong(
            "bits of floats",
            tuple((a, f"__float_as_uint(S[{i // 2}][{i % 2}])") for i, a in enumerate(A)),
            "first",
            symptom="not packed",
        ),
        Wrong(
            "floats as they are",
            tuple((a, f"S[{i // 2}][{i % 2}]") for i, a in enumerate(A)),
            "first",
            "",
            "not packed",
        ),
        Wrong(
            "keys of V exchanged",
            ((V_ROW, V_ROW.replace("lane % 16", "(lane + 8) % 16")),),
            "first",
            symptom="halves",
        ),
        Wrong(
            "keys of S exchanged",
            tuple((A[i], f"a{i}") for i in range(4)) + tuple((f"a{i}", A[i ^ 2]) for i in range(4)),
            "first",
            symptom="halves",
        ),
        Wrong("rows without padding", (("STRIDE = 72", "STRIDE = 64"),), "limit", "bank conflicts", symptom="limit"),
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


@pytest.mark.parametrize("name", TABLE)
def test_first_hint_is_not_the_answer(name: str) -> None:
    """A line's expression may be in the last hint for a symptom, not in the first of several."""
    lines = set(exercise.ours(name).splitlines()) - set(exercise.skeleton(name).splitlines())
    answers = [re.sub(r"\s|.*?=|;|return", "", line) for line in lines]
    for hints in exercise.GRADERS[name].hints.values():
        first = re.sub(r"\s", "", hints[0])
        assert not [answer for answer in answers if answer in first], first
