"""Typical answers to the exercises of notebook 16: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

LOOP = "while (j < 18 && sum(exp2f(-(j + 1) / 2), exp2f(-(j + 2) / 2)) != 1.0f) ++j;"
KEPT = f"  int j = 0;\n  {LOOP}\n  return j;\n"
CUTS = "return sum(1.75f * exp2f(-(bits + 1) / 2), exp2f(-(bits + 2) / 2)) == 1.0f;"
ROW = "  const float* const of_row = p + i / 2 * 8 + i % 2 * 2;\n"
FOUR = "return pack_e4m3(of_row[0], of_row[1], of_row[4], of_row[5]);"
PAIRS_EXCHANGED = "pack_e4m3(of_row[4], of_row[5], of_row[0], of_row[1])"
TWO_FACTORS = "sum(exp2f(-(j / 2)), exp2f(-(j - j / 2)))"
KEY = "return place / 16 * 16 + 2 * t + number % 2 + number / 2 * 8;"


def kept(text: str) -> tuple[tuple[str, str]]:
    """Return the edit that searches differently."""
    return ((KEPT, f"{text}\n"),)


TABLE = {
    "16_kept_bits": (
        Wrong("as it was", ((KEPT, "return 0;"), (CUTS, "return false;")), "first", "2^-1 comes out as more", "few"),
        Wrong("what is known", kept("return 13;"), "awkward", "that keeps 10 bits"),
        Wrong("what float32 has", kept("return 23;"), "first", "2^-23 comes out as 1", "many"),
        Wrong(
            "one factor",
            ((LOOP, LOOP.replace("exp2f(-(j + 1) / 2), exp2f(-(j + 2) / 2)", "exp2f(-j - 1), 1.0f")),),
            "first",
            "",
            "factors",
        ),
        Wrong("the first that is lost", ((KEPT, KEPT.replace("return j", "return j + 1")),), "first", "", "one off"),
        Wrong("one too few", ((KEPT, KEPT.replace("return j", "return j - 1")),), "first", "", "one off"),
        Wrong("2^j", ((LOOP, LOOP.replace("-(j", "(j")),), "first", "", "many"),
        Wrong(
            "all are tried",
            kept(
                f"int n = 0;\nfor (int i = 2, j = 1; i < 38; j = ++i / 2)\n  if ({TWO_FACTORS} != 1) n = j;\nreturn n;"
            ),
            "limit",
            "products: 37",
            "limit",
        ),
        Wrong("exactly half", ((CUTS, CUTS.replace("1.75f * ", "")),), "awkward", "truncates says True", "rounds"),
        Wrong(
            "the bit that is kept",
            ((CUTS, "return sum(exp2f(-bits / 2), exp2f(-(bits + 1) / 2)) == 1.0f;"),),
            "first",
            "truncates says False",
            "half",
        ),
        Wrong("always", ((CUTS, "return true;"),), "awkward", "that keeps 10 bits and rounds", "rounds"),
        Wrong("the other way round", ((CUTS, CUTS.replace("==", "!=")),), "first", "", "half"),
        Right(
            "a for loop",
            kept(f"for (int j = 1; j <= 18; ++j)\n  if ({TWO_FACTORS} == 1.0f) return j - 1;\nreturn 18;"),
        ),
        Right(
            "downwards",
            kept(f"int j = 18;\nwhile (j > 0 && {TWO_FACTORS} == 1.0f) --j;\nreturn j;"),
        ),
        Right("another number above half", ((CUTS, CUTS.replace("1.75f", "1.5f")),)),
        Right("compared with the sum", ((CUTS, CUTS.replace("== 1.0f", "< 1.0f + exp2f(-bits)")),)),
    ),
    "16_order_of_keys": (
        Wrong(
            "as it was",
            (
                (ROW, ""),
                (FOUR, "return pack_e4m3(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);"),
                (KEY, "return place;"),
            ),
            "first",
            "of row g + 8",
            "rows",
        ),
        Wrong("V^T as it comes", ((KEY, "return place;"),), "first", "key_at(2) is 2", "order"),
        Wrong(
            "four neighbours",
            ((FOUR, "return pack_e4m3(of_row[0], of_row[1], of_row[2], of_row[3]);"),),
            "first",
            "",
            "rows",
        ),
        Wrong("one register for all", ((ROW, ROW.replace("i / 2 * 8 + ", "")),), "first", "", "twice"),
        Wrong(
            "pairs exchanged, in P alone",
            ((FOUR, f"return {PAIRS_EXCHANGED};"),),
            "first",
            "",
            "order",
        ),
        Wrong(
            "other numbers of each thread",
            (
                (
                    FOUR,
                    f"if (threadIdx.x % 2) return {PAIRS_EXCHANGED}; {FOUR}",
                ),
            ),
            "first",
            "",
            "",
        ),
        Wrong(
            "a sum",
            ((FOUR, "return pack_e4m3(of_row[0] + 16, of_row[1], of_row[4], of_row[5]);"),),
            "first",
            "",
            "numbers",
        ),
        Right(
            "pairs exchanged in both",
            (
                (FOUR, f"return {PAIRS_EXCHANGED};"),
                (KEY, "return place / 16 * 16 + 2 * t + number % 2 + (1 - number / 2) * 8;"),
            ),
        ),
        Right(
            "halves exchanged in both",
            (
                (ROW, ROW.replace("i / 2 * 8", "(1 - i / 2) * 8")),
                (KEY, "return (1 - place / 16) * 16 + 2 * t + number % 2 + number / 2 * 8;"),
            ),
        ),
        Right("by bits", ((KEY, "return (place & 0x11) | (place & 0x0c) >> 1 | (place & 0x02) << 2;"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
