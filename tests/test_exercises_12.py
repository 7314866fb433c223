"""Typical answers to the exercise of notebook 12: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

from helpers.engine import nvrtc

has_cute = pytest.mark.skipif(nvrtc.why_no_cute() is not None, reason=nvrtc.why_no_cute() or "")
pytestmark = [pytest.mark.exhaustive, has_cute]  # compiling CuTe takes seconds for each test

HALF, FLOAT = "Swizzle<2, 3, 3>", "Swizzle<5, 0, 5>"
ROWS, FLOAT_BY_ROWS = "Stride<_32, _1>", f"{FLOAT}{{}}, ByRows{{}}"

TABLE = {
    "12_swizzle_layout": (
        Wrong("no swizzle", ((HALF, "Swizzle<0, 3, 3>"),), "limit", "bank conflicts of K_smem: 48", "half tile"),
        Wrong("row bits 0 and 1", ((HALF, "Swizzle<2, 3, 2>"),), "limit", "K_smem", "half tile"),
        Wrong("half a chunk", ((HALF, "Swizzle<2, 2, 3>"),), "first", "must stay together", "chunk"),
        Wrong("the floats' swizzle for chunks", ((HALF, FLOAT),), "first", "must stay together", "chunk"),
        Wrong("words in bytes", ((FLOAT, "Swizzle<5, 2, 5>"),), "limit", "F_smem", "float tile"),
        Wrong("columns", ((ROWS, "Stride<_1, _32>"),), "first"),
        Wrong("16 banks", ((FLOAT, "Swizzle<4, 0, 5>"),), "limit", "bank conflicts of F_smem: 32", "float tile"),
        Wrong("the row is permuted, not the column", ((FLOAT, "Swizzle<5, 0, -5>"),), "limit", "F_smem"),
        Wrong("bits that overlap", ((FLOAT, "Swizzle<5, 0, 4>"),), "compiles", "", "compile"),
        Wrong(
            "padding",
            ((FLOAT_BY_ROWS, "Swizzle<0, 0, 5>{}, Layout<Shape<_32, _32>, Stride<Int<33>, _1>>{}"),),
            "X-ray",
            "F_smem",
        ),
        Right("three bits, as in 07", ((HALF, "Swizzle<3, 3, 3>"),)),
        Right(
            "floats by columns",
            ((FLOAT_BY_ROWS, f"{FLOAT}{{}}, Layout<Shape<_32, _32>, Stride<_1, _32>>{{}}"),),
        ),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
