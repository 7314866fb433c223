"""Typical answers to the exercise of notebook 17: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SOURCE = "source = (rank - step + ranks) % ranks;"
OWN, BEFORE, BEHIND = "end = row + 1;", "end = half;", "end = row < half ? 0 : n;"
LOOP = "for (int key = 0; key < end; ++key) sum += V[key * 64 + c];"
BY_POSITION = """for (int key = 0; key < n; ++key) {
    const int row_at = row < half ? rank * half + row : (2 * ranks - 1 - rank) * half + row - half;
    const int key_at = key < half ? source * half + key : (2 * ranks - 1 - source) * half + key - half;
    if (key_at <= row_at) sum += V[key * 64 + c];
  }"""

TABLE = {
    "17_zigzag": (
        Wrong("always its own keys", ((SOURCE, "source = rank;"),), "first", "asked", "source"),
        Wrong("the other way round", ((SOURCE, "source = (rank + step) % ranks;"),), "first", "asked", "source"),
        Wrong("a rest for powers of two", ((SOURCE, "source = (rank - step) & (ranks - 1);"),), "awkward", "asked"),
        Wrong("no mask at all", ((OWN, "end = n;"), (BEFORE, "end = n;"), (BEHIND, "end = n;")), "first", "O at"),
        Wrong("not itself", ((OWN, "end = row;"),), "first", "step 0", "own"),
        Wrong("the back chunk does not see the front", ((OWN, "end = row % half + 1;"),), "first", "step 0", "own"),
        Wrong("the plain ring's rules", ((BEFORE, "end = n;"), (BEHIND, "end = 0;")), "first", "O at", "behind"),
        Wrong("all keys of ranks before", ((BEFORE, "end = n;"),), "first", "O at", "before"),
        Wrong("the back chunk sees half", ((BEHIND, "end = row < half ? 0 : half;"),), "first", "O at", "behind"),
        Wrong(
            "the front chunk sees less", ((BEFORE, "end = row < half ? row + 1 : half;"),), "first", "O at", "before"
        ),
        Wrong("before and behind exchanged", (("source < rank", "source > rank"),), "first", "O at"),
        Wrong("a row too far", ((OWN, "end = row + 2;"),), "X-ray", "V"),
        Wrong(
            "all rows, times 0 or 1",
            ((LOOP, "for (int key = 0; key < n; ++key) sum += (key < end) * V[key * 64 + c];"),),
            "limit",
            "bytes of V read",
            "limit",
        ),
        Right("in one line", ((SOURCE, "source = rank >= step ? rank - step : rank - step + ranks;"),)),
        Right("by positions", ((LOOP, BY_POSITION),)),
        Right("by the step", (("source < rank", "step <= rank"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
