"""Typical answers to the exercises of notebook 07."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "07_two_products": (
        Wrong("no swizzle", (("(chunk ^ row % 8)", "chunk"),), "limit", "bank conflicts: ", "limit"),
        Wrong("swizzled by row / 8", (("chunk ^ row % 8", "chunk ^ row / 8"),), "limit", "bank conflicts: ", "limit"),
        Wrong("four offsets only", (("chunk ^ row % 8", "chunk ^ row % 4"),), "limit", "bank conflicts: ", "limit"),
        Wrong("not within the row", (("chunk ^ row % 8", "chunk ^ row"),), "X-ray", ""),
        Wrong(
            "middle two exchanged",
            (
                ("a[1] = pack(S[0][2], S[0][3])", "a[2] = pack(S[0][2], S[0][3])"),
                ("a[2] = pack(S[1][0], S[1][1])", "a[1] = pack(S[1][0], S[1][1])"),
            ),
            "first",
            "O at",
            "wrong",
        ),
        Wrong("halves exchanged", (("pack(S[0][0], S[0][1])", "pack(S[0][1], S[0][0])"),), "first", "O at", "wrong"),
        Wrong(
            "the first half twice", (("pack(S[1][0], S[1][1])", "pack(S[0][0], S[0][1])"),), "first", "O at", "wrong"
        ),
        Wrong(
            "rows exchanged",
            (
                ("a[0] = pack(S[0][0], S[0][1])", "a[0] = pack(S[0][2], S[0][3])"),
                ("a[1] = pack(S[0][2], S[0][3])", "a[1] = pack(S[0][0], S[0][1])"),
            ),
            "first",
            "O at",
        ),
        Wrong("one is missing", (("    a[3] = pack(S[1][2], S[1][3]);\n", ""),), "first", "O at"),
        Right("with a mask", (("chunk ^ row % 8", "chunk ^ (row & 7)"),)),
        Right("a rotation", (("(chunk ^ row % 8)", "((chunk + row) % 8)"),)),
        Right(
            "in a loop",
            (
                (
                    "    a[0] = pack(S[0][0], S[0][1]);\n    a[1] = pack(S[0][2], S[0][3]);\n"
                    "    a[2] = pack(S[1][0], S[1][1]);\n    a[3] = pack(S[1][2], S[1][3]);\n",
                    "    for (int i = 0; i < 4; ++i) a[i] = pack(S[i / 2][i % 2 * 2], S[i / 2][i % 2 * 2 + 1]);\n",
                ),
            ),
        ),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
