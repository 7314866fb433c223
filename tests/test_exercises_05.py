"""Typical answers to the exercises of notebook 05."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "05_sliding_window": (
        Wrong("rows begin at key 0", (("row + N_kv - N", "row"),), "first", "keys visited by each row", "visited"),
        Wrong(
            "not the key itself",
            (("min(row_pos + 1, N_kv)", "min(row_pos, N_kv)"),),
            "first",
            "keys visited",
            "visited",
        ),
        Wrong(
            "one key too few",
            (("row_pos - window_left", "row_pos - window_left + 1"),),
            "first",
            "keys visited",
            "visited",
        ),
        Wrong("no window", (("max(row_pos - window_left, 0)", "0"),), "first", "keys visited", "visited"),
        Wrong(
            "before key 0",
            (("max(row_pos - window_left, 0)", "row_pos - window_left"),),
            "awkward",
            "illegal read of K[",
            "crash",
        ),
        Wrong("1 / 0", (("l_i == 0.0f ? 0.0f : 1.0f / l_i", "1.0f / l_i"),), "awkward", "NaN at row", "nan"),
        Wrong(
            "lse of no key is 0",
            (("l_i == 0.0f ? NEG_INF : m_i", "l_i == 0.0f ? 0.0f : m_i"),),
            "awkward",
            "lse at",
            "lse",
        ),
        Wrong("all later keys too", (("min(row_pos + 1, N_kv)", "N_kv"),), "first", "keys visited", "visited"),
        Wrong("not divided", (("l_i == 0.0f ? 0.0f : 1.0f / l_i", "1.0f"),), "first", "O at", "wrong"),
        Right("without the upper bound, which cannot be reached", (("min(row_pos + 1, N_kv)", "row_pos + 1"),)),
        Right(
            "keys asked, not the sum",
            (
                ("l_i == 0.0f ? 0.0f : 1.0f / l_i", "keys == 0 ? 0.0f : 1.0f / l_i"),
                ("l_i == 0.0f ? NEG_INF : m_i + logf(l_i)", "keys == 0 ? NEG_INF : m_i + logf(l_i)"),
            ),
        ),
        Right("logf(0) is minus infinity", (("l_i == 0.0f ? NEG_INF : m_i + logf(l_i)", "m_i + logf(l_i)"),)),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
