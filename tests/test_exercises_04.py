"""Typical answers to the exercises of notebook 04."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

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
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
