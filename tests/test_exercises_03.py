"""Typical answers to the exercises of notebook 03."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "03_merge_halves": (
        Wrong(
            "l is not rescaled",
            (("l_1[row] * rescale_1 + l_2[row] * rescale_2", "l_1[row] + l_2[row]"),),
            "first",
            "O at",
        ),
        Wrong(
            "acc is not rescaled",
            (("acc_1[i] * rescale_1 + acc_2[i] * rescale_2", "acc_1[i] + acc_2[i]"),),
            "first",
            "O at",
            "wrong",
        ),
        Wrong(
            "factors exchanged",
            (
                ("expf(m_1[row] - m)", "expf(m_2[row] - m)"),
                ("rescale_2 = expf(m_2[row] - m)", "rescale_2 = expf(m_1[row] - m)"),
            ),
            "first",
            "O at",
            "wrong",
        ),
        Wrong("the sign turned round", (("expf(m_1[row] - m)", "expf(m - m_1[row])"),), "first", "O at"),
        Wrong("no maximum subtracted", (("fmaxf(m_1[row], m_2[row])", "0.0f"),), "awkward", "large scores", "large"),
        Wrong("the sum of both maxima", (("fmaxf(m_1[row], m_2[row])", "m_1[row] + m_2[row]"),), "awkward", ""),
        Wrong("the first part's maximum", (("fmaxf(m_1[row], m_2[row])", "m_1[row]"),), "awkward", ""),
        Wrong(
            "the second part's maximum", (("fmaxf(m_1[row], m_2[row])", "m_2[row]"),), "awkward", "NaN at row", "nan"
        ),
        Wrong("not divided", (("acc_2[i] * rescale_2) / l", "acc_2[i] * rescale_2)"),), "first", "O at", "wrong"),
        Wrong(
            "m of i, not of row",
            (("fmaxf(m_1[row], m_2[row])", "fmaxf(m_1[i], m_2[i])"),),
            "first",
            "illegal read of m_",
            "crash",
        ),
        Wrong(
            "lse of the smaller maximum",
            (("m + logf(l)", "fminf(m_1[row], m_2[row]) + logf(l)"),),
            "first",
            "lse = m + log(l)",
            "lse",
        ),
        Right("with an if", (("fmaxf(m_1[row], m_2[row])", "m_1[row] > m_2[row] ? m_1[row] : m_2[row]"),)),
        Right(
            "divided first",
            (
                (
                    "(acc_1[i] * rescale_1 + acc_2[i] * rescale_2) / l",
                    "acc_1[i] * (rescale_1 / l) + acc_2[i] * (rescale_2 / l)",
                ),
            ),
        ),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
