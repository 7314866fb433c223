"""Typical answers to the exercises of notebook 02."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

ONE_TILE = ("K_smem[2]", "K_smem[1]"), ("K_smem[first / BLOCK_N % 2]", "K_smem[0]")

TABLE = {
    "02_one_barrier": (
        Wrong("one tile, one barrier", ONE_TILE, "X-ray", "race: ", "race"),
        Wrong(
            "one tile, two barriers",
            (*ONE_TILE, ("    for (int i = threadIdx.x", "    __syncthreads();\n    for (int i = threadIdx.x")),
            "limit",
            "barriers in a block of 3 tiles: 6 (the limit: at most 3)",
            "barriers",
        ),
        Wrong(
            "keys from global memory",
            (("q[c] * tile[j][c]", "q[c] * K[(first + j) * HEAD_DIM + c]"),),
            "limit",
            "bytes read from shared memory: 0 (the limit: at least",
            "reads",
        ),
        Wrong("no barrier", (("__syncthreads();  // hazard", "// hazard"),), "X-ray", "race: ", "race"),
        Wrong("no maximum", (("const float m_new = fmaxf(m_i, s);", "const float m_new = 0.0f;"),), "awkward", "large"),
        Wrong("the sum is not rescaled", (("l_i *= expf(m_i - m_new);", ""),), "first", "LSE", "wrong"),
        Wrong(
            "rescaled after the term",
            (("l_i *= expf(m_i - m_new);", ""), ("m_i = m_new;", "l_i *= expf(m_i - m_new); m_i = m_new;")),
            "first",
        ),
        Wrong("m_i stays", (("      m_i = m_new;\n", ""),), "first", "LSE"),
        Wrong("second tile forgotten", (("K_smem[2]", "K_smem[1]"),), "first", ""),
        Right("a flag that flips", (("K_smem[first / BLOCK_N % 2]", "K_smem[(first / BLOCK_N) & 1]"),)),
        Right("three tiles", (("K_smem[2]", "K_smem[3]"), ("BLOCK_N % 2", "BLOCK_N % 3"))),
        Right(
            "one exponential",
            (
                ("l_i *= expf(m_i - m_new);", ""),
                (
                    "l_i += expf(s - m_new);",
                    "l_i = m_new > m_i ? l_i * expf(m_i - m_new) + 1.0f : l_i + expf(s - m_i);",
                ),
            ),
        ),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
