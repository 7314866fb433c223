"""Typical answers to the exercises of notebook 05."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

POS = "const int row_pos = row + N_kv - N;"
BEGIN, END = "max(row_pos - window_left, 0)", "min(row_pos + 1, N_kv)"
INVERSE, LSE = "l_i == 0.0f ? 0.0f : 1.0f / l_i", "m_i + logf(l_i)"

LAST, TILES_END = "first_row + BLOCK_M - 1 + N_kv - N", "min(last_pos + 1, N_kv)"
HIDE = "if (first + j > row + N_kv - N) s = NEG_INF;"

EVERY_KEY = "limit", "N_kv = 77: 231 (the limit: at most 187)", "every key"

GROUP = "head / (heads / kv_heads)"
Q_AT = "(size_t)row * q_row_stride + (size_t)head * q_head_stride"
RACE = "X-ray", "Two heads write the same element of O", "race"
KV_AT = "(size_t)kv_head * kv_head_stride"

TABLE = {
    "05_sliding_window": (
        Wrong("one key short", ((END, "min(row_pos, N_kv)"),), "first", "keys visited", "visited"),
        Wrong("one key too far back", ((BEGIN, "max(row_pos - window_left - 1, 0)"),), "first", "", "visited"),
        Wrong(
            "no key before the first",
            ((BEGIN, "row_pos - window_left"),),
            "awkward",
            "begin must still be 0 or more",
            "bounds",
        ),
        Wrong("0 times infinity", ((INVERSE, "1.0f / l_i"),), "awkward", "NaN", "nan"),
        Wrong("an lse of 0", ((LSE, "l_i == 0.0f ? 0.0f : m_i + logf(l_i)"),), "awkward", "lse", "lse"),
        Wrong(
            "something small added to l_i",
            ((INVERSE, "1.0f / (l_i + 1e-6f)"),),
            "awkward",
            "to the last bit",
            "one key",
        ),
        Wrong(
            "no row of one key",
            ((INVERSE, "l_i <= 1.0f ? 0.0f : 1.0f / l_i"),),
            "awkward",
            "A row that sees one key",
            "one key",
        ),
        Wrong("multiplied by l_i", ((INVERSE, "l_i"),), "first", "wrong by the same factor", "factor"),
        Wrong(
            "no position before the first key",
            ((POS, "const int row_pos = max(row + N_kv - N, 0);"),),
            "awkward",
            "",
            "visited",
        ),
        Wrong("a positive distance", ((POS, "const int row_pos = abs(row + N_kv - N);"),), "awkward", "", "visited"),
        Wrong(
            "a row without keys leaves",
            (("  float m_i = NEG_INF", "  if (end <= begin) return;\n  float m_i = NEG_INF"),),
            "awkward",
            "never written",
            "empty",
        ),
        Right("at least something", ((INVERSE, "1.0f / fmaxf(l_i, 1e-30f)"),)),
        Right("end is not limited to N_kv", ((END, "row_pos + 1"),)),
        Right("the maximum tells", ((INVERSE, "m_i == NEG_INF ? 0.0f : 1.0f / l_i"),)),
    ),
    "05_causal_tiles": (
        Wrong("every tile", ((TILES_END, "N_kv"),), "limit", "N_kv = 80: 240 (the limit: at most 176)", "every key"),
        Wrong("every key where they are more", ((TILES_END, f"N == N_kv ? {TILES_END} : N_kv"),), *EVERY_KEY),
        Wrong("32 for BLOCK_M", (("first_row + BLOCK_M - 1", "first_row + 31"),), "awkward", "BLOCK_M = 64", "block"),
        Wrong("a tile too many", ((TILES_END, "min(last_pos + 1 + BLOCK_N, N_kv)"),), "limit", "", "tiles"),
        Wrong(
            "rounded up to a tile",
            ((TILES_END, "min((last_pos + BLOCK_N) / BLOCK_N * BLOCK_N, N_kv)"),),
            "limit",
            "N_kv = 77: 202 (the limit: at most 187)",
            "tiles",
        ),
        Wrong(
            "rounded up beyond the last key",
            ((TILES_END, "max(0, (last_pos + BLOCK_N) / BLOCK_N * BLOCK_N)"),),
            "first",
            "limit end to N_kv",
            "crash",
        ),
        Wrong("one key short", ((TILES_END, "min(last_pos, N_kv)"),), "first", "Some block ends too early", "short"),
        Wrong("the first row's keys", ((LAST, "first_row + N_kv - N"),), "first", "", "short"),
        Wrong(
            "a row does not see its own key",
            ((HIDE, HIDE.replace(">", ">=")),),
            "first",
            "hidden in the loop",
            "hidden",
        ),
        Wrong("one key of the future", ((HIDE, HIDE.replace("- N)", "- N + 1)")),), "first", "", "future"),
        Wrong("nothing is hidden", ((HIDE, ""),), "first", "", "future"),
        Wrong(
            "the diagonal from the top left",
            ((LAST, "first_row + BLOCK_M - 1"), (HIDE, HIDE.replace(" + N_kv - N", ""))),
            "awkward",
            "",
            "short",
        ),
        Wrong("the end from the top left", ((LAST, "first_row + BLOCK_M - 1"),), "awkward", "", "short"),
        Wrong("the mask from the top left", ((HIDE, HIDE.replace(" + N_kv - N", "")),), "awkward", "", "hidden"),
        Wrong("beyond the last key", ((TILES_END, "last_pos + 1"),), "X-ray", "out of bounds", "crash"),
        Wrong(
            "m_i starts at minus infinity", (("float m_i = M_INIT", "float m_i = NEG_INF"),), "awkward", "NaN", "nan"
        ),
        Wrong(
            "a block without keys leaves",
            ((TILES_END + ";", TILES_END + ";\n  if (end <= 0) return;"),),
            "awkward",
            "never",
            "empty",
        ),
        Wrong(
            "a score of 0 for none",
            ((HIDE, HIDE.replace(") s", " || s == 0.0f) s")),),
            "first",
            "all zeros in Q",
            "zero score",
        ),
        Wrong(
            "a hidden score of the start",
            ((HIDE, HIDE.replace("NEG_INF", "M_INIT")),),
            "awkward",
            "A row that sees none",
            "no key",
        ),
        Wrong(
            "the thread for the row", ((HIDE, HIDE.replace("row + N", "(int)threadIdx.x + N")),), "first", "", "hidden"
        ),
        Wrong("each thread's own end", ((LAST, "row + N_kv - N"),), "first", "", "deadlock"),
        Right("leaves the tile at the first hidden key", ((HIDE, HIDE.replace("s = NEG_INF", "break")),)),
        Right("the last row that exists", ((LAST, "min(first_row + BLOCK_M, N) - 1 + N_kv - N"),)),
        Right(
            "in other words",
            (
                (HIDE, "s = row + N_kv - N >= first + j ? s : NEG_INF;"),
                (TILES_END, "N_kv < last_pos + 1 ? N_kv : last_pos + 1"),
            ),
        ),
    ),
    "05_group_of_heads": (
        Wrong("modulo", ((GROUP, "head % kv_heads"),), "first", "", "modulo"),
        Wrong(
            "by the number of groups", ((GROUP, "head / kv_heads"),), "awkward", "puts kv_heads heads of Q", "quotient"
        ),
        Wrong("the head of Q", ((GROUP, "head"),), "first", "K and V have only kv_heads", "crash"),
        Wrong("always head 0", ((GROUP, "0"),), "first", "Every head of Q reads head 0", "zero"),
        Wrong("Q without its head", ((Q_AT, "(size_t)row * q_row_stride"),), *RACE),
        Wrong("strides exchanged", ((Q_AT, "(size_t)row * q_head_stride + (size_t)head * q_row_stride"),), *RACE),
        Wrong("heads first", ((Q_AT, "((size_t)head * N + row) * HEAD_DIM"),), "first"),
        Wrong("one layout of Q", ((Q_AT, "((size_t)row * heads + head) * HEAD_DIM"),), "awkward", "", "tail"),
        Wrong("one layout of K", ((KV_AT, "(size_t)kv_head * HEAD_DIM"),), "awkward", "", "tail"),
        Wrong(
            "the stride of Q for K", ((KV_AT, "(size_t)kv_head * q_head_stride"),), "awkward", "of their own", "bounds"
        ),
        Right("multiplied first", ((GROUP, "head * kv_heads / heads"),)),
        Wrong(
            "products of 32 bits",
            ((Q_AT, "row * q_row_stride + head * q_head_stride"),),
            "awkward",
            "beyond 32 bits",
            "overflow",
        ),
        Wrong(
            "widened too late",
            ((Q_AT, "(size_t)(head * q_head_stride + row * q_row_stride)"),),
            "awkward",
            "in which type",
            "overflow",
        ),
        Wrong(
            "heads of K first",
            ((KV_AT, "(size_t)kv_head * N_kv * HEAD_DIM"),),
            "first",
            "strides of their own",
            "crash",
        ),
        Wrong("groups of two", ((GROUP, "head / 2"),), "awkward", "How many neighbouring heads", "other head"),
        Wrong(
            "heads from the end",
            ((GROUP, "kv_heads - 1 - head / (heads / kv_heads)"),),
            "first",
            "reads one head",
            "other head",
        ),
        Right("the sum the other way round", ((Q_AT, "(size_t)head * q_head_stride + (size_t)row * q_row_stride"),)),
        Right("another type of 64 bits", ((Q_AT, "row * (long long)q_row_stride + head * (long long)q_head_stride"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
