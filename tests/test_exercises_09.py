"""Typical answers to the exercises of notebook 09."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SHIFT, END = "top_left ? 0 : N_kv - N", "max(0, min(row + 1 + shift, N_kv))"

FIRST, LAST, FOR = "cu_seqlens[blockIdx.x]", "cu_seqlens[blockIdx.x + 1]", "for (int row"
GUARD, COLUMN = "if (threadIdx.x + 128 * i < WIDTH) sum[i]", "+ threadIdx.x + 128 * i];"
SHUFFLE = "for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffff, squares, mask);"
IN_STEP, BARRIER = SHUFFLE.replace("squares +=", "__syncthreads(), squares +="), "__syncthreads();"
TOTAL = "total = of_warp[0] + of_warp[1] + of_warp[2] + of_warp[3];"

TURNS = "i < COLUMNS"
SQUARES, STORE = "float squares = 0.0f;", "if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;"

TABLE = {
    "09_two_corners": (
        Wrong("always PyTorch's", ((SHIFT, "0"),), "first", "bottom-right", "bottom-right"),
        Wrong("always FlashAttention's", ((SHIFT, "N_kv - N"),), "first", "top-left", "top-left"),
        Wrong("exchanged", ((SHIFT, "top_left ? N_kv - N : 0"),), "first", "under the other's number", "exchanged"),
        Wrong("no sign", ((SHIFT, "top_left ? 0 : abs(N_kv - N)"),), "awkward", "", "bottom-right"),
        Wrong("only more keys than rows", ((SHIFT, "top_left ? 0 : max(N_kv - N, 0)"),), "awkward", "", "bottom-right"),
        Wrong("bounded by the rows", ((END, "max(0, min(row + 1 + shift, N))"),), "first", "", "bottom-right"),
        Wrong("the thread's row", ((END, END.replace("row", "(int)threadIdx.x")),), "awkward", "Both rules", "both"),
        Wrong(
            "without a sign",
            (("const int end", "const unsigned end"), (END, "min(row + 1 + shift, N_kv)")),
            "awkward",
            "for which rows is your end more than N_kv",
        ),
        Wrong("one key short", ((END, "max(0, min(row + shift, N_kv))"),), "first", "Both rules", "both"),
        Wrong("one key too many", ((END, "max(0, min(row + 2 + shift, N_kv))"),), "first"),
        Wrong("past the last key", ((END, "max(0, row + 1 + shift)"),), "awkward"),
        Wrong(
            "keys are read, then dropped",
            (
                (END, "N_kv"),
                ("float s = 0.0f;", "float s = 0.0f; const bool hidden = j > row + shift;"),
                ("const float m_new", "if (hidden) continue;\n    const float m_new"),
            ),
            "limit",
            "keys read",
        ),
        Right("no lower bound", ((END, "min(row + 1 + shift, N_kv)"),)),
        Right("by an if", ((END, "top_left ? min(row + 1, N_kv) : max(row + 1 + N_kv - N, 0)"),)),
    ),
    "09_mean_pool": (
        Wrong("no barrier", ((BARRIER, ""),), "X-ray", "race: ", "race"),
        Wrong(
            "divided by the number of rows",
            ((SQUARES, f"for (int i = 0; i < COLUMNS; ++i) sum[i] /= {LAST} - {FIRST};\n  {SQUARES}"),),
            "awkward",
            "Only the sentence without rows",
            "empty sentence",
        ),
        Wrong(
            "rows counted from the sentence", (("(size_t)row", f"(size_t)(row - {FIRST})"),), "first", "", "other rows"
        ),
        Wrong("lengths for ends", ((LAST, LAST + f" - {FIRST}"),), "first"),
        Wrong("its own sum", ((TOTAL, "total = squares;"),), "first", "", "length"),
        Wrong("for four threads", ((TOTAL, f"if (threadIdx.x < 4) {TOTAL}"),), "first", "in each of them", "length"),
        Wrong(
            "a barrier for those that store",
            ((STORE + "\n  " + BARRIER, STORE.replace(") of", ") {\n    of") + "\n    " + BARRIER + "\n  }"),),
            "X-ray",
            "do all threads have to pass",
            "race",
        ),
        Wrong("added to what nobody wrote", (("= squares;\n  __s", "+= squares;\n  __s"),), "X-ray", "", "unset"),
        Wrong("a barrier for each shuffle", ((SHUFFLE, IN_STEP),), "limit", "barriers"),
        Wrong(
            "the first sentence for all", ((FIRST, "cu_seqlens[0]"), (LAST, "cu_seqlens[1]")), "first", "", "other rows"
        ),
        Wrong("one row more", (("row < ", "row <= "),), "first", "one of this block's sentence"),
        Wrong("three columns a thread", ((TURNS, "i < 3"),), "awkward", "How many are these", "missing"),
        Wrong("columns that do not exist", ((GUARD, "sum[i]"),), "awkward"),
        Wrong(
            "neighbouring columns", ((COLUMN, "+ 3 * threadIdx.x + i];"),), "first", "of other columns", "neighbours"
        ),
        Wrong("twice the loads", ((GUARD, f"if (X[(size_t)row * WIDTH] < 1e30f) {GUARD}"),), "limit", "elements of X"),
        Right("down, then a broadcast", ((SHUFFLE, SHUFFLE.replace("_xor_", "_down_")),)),
        Right("the end is read once", ((FOR, f"const int end = {LAST};\n  {FOR}"), (f"< {LAST}", "< end"))),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
