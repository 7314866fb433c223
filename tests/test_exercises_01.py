"""Typical answers to the exercises of notebook 01."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "01_coalesced_scores": (
        Wrong(
            "32 bits",
            (("(size_t)j * N + row", "j * N + row"),),
            "awkward",
            "the index at() at row = 99,998",
            "overflow",
        ),
        Wrong("widened too late", (("(size_t)j * N + row", "(size_t)(j * N + row)"),), "awkward", "", "overflow"),
        Wrong(
            "as before",
            (("(size_t)j * N + row", "(size_t)row * N_kv + j"),),
            "first",
            "S, stored as (N_kv, N)",
            "index",
        ),
        Wrong("the other length", (("(size_t)j * N + row", "(size_t)j * N_kv + row"),), "X-ray", "races with", "race"),
        Wrong(
            "row and key exchanged", (("(size_t)j * N + row", "(size_t)row * N + j"),), "first", "illegal write to S["
        ),
        Wrong("no row", (("(size_t)j * N + row", "(size_t)j * N"),), "X-ray", "race: "),
        Wrong("one too far", (("(size_t)j * N + row", "(size_t)j * N + row + 1"),), "first", ""),
        Wrong("from 1 on", (("(size_t)j * N + row", "(size_t)(j + 1) * N + row"),), "first", "", "crash"),
        Wrong(
            "no return",
            (("return (size_t)j * N + row", "(size_t)j * N + row"),),
            "compiles",
            "ends without a return",
            "return",
        ),
        Right("the sum turned round", (("(size_t)j * N + row", "row + N * (size_t)j"),)),
        Right("another type", (("(size_t)j * N + row", "j * (unsigned long long)N + row"),)),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
