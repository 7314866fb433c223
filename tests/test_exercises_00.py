"""Typical answers to the exercises of notebook 00."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "00_first_kernel": (
        Wrong("no block", (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x"),), "first", "Z"),
        Wrong("no guard", (("if (i < n) ", ""),), "first", "illegal", "crash"),
        Wrong("one too many", (("i < n", "i <= n"),), "first", "illegal read of ", "crash"),
        Wrong("one too few", (("i < n", "i < n - 1"),), "first", "Z", "empty"),
        Wrong("the block's number alone", (("blockIdx.x * BLOCK + threadIdx.x", "blockIdx.x"),), "first", "Z"),
        Wrong(
            "threads and blocks exchanged",
            (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x * gridDim.x + blockIdx.x * BLOCK"),),
            "first",
        ),
        Wrong("no factor", (("a * X[i]", "X[i]"),), "first", "Z", "wrong"),
        Wrong("a misspelt name", (("threadIdx.x", "threadidx.x"),), "compiles", "threadidx"),
        Right("by blockDim", (("blockIdx.x * BLOCK", "blockIdx.x * blockDim.x"),)),
        Right("an early return", (("if (i < n) Z[i]", "if (i >= n) return;\n  Z[i]"),)),
        Right(
            "another assignment of elements",
            (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x * gridDim.x + blockIdx.x"),),
        ),
    ),
    "00_safe_softmax": (
        Wrong(
            "nothing subtracted", (("expf(s[j] - m_i)", "expf(s[j])"),), "first", "scores near -1000 or 1000", "large"
        ),
        Wrong("a maximum that starts at 0", (("float m_i = s[0];", "float m_i = 0.0f;"),), "first", "", "large"),
        Wrong("the last key is left out", (("j < N_kv; ++j) m_i", "j < N_kv - 1; ++j) m_i"),), "first", "", "large"),
        Wrong("the minimum", (("fmaxf(m_i", "fminf(m_i"),), "first", "", "large"),
        Wrong(
            "only the first score",
            (("  for (int j = 1; j < N_kv; ++j) m_i = fmaxf(m_i, s[j]);\n", ""),),
            "first",
            "",
            "large",
        ),
        Wrong(
            "the neighbour's score",
            (("expf(s[j] - m_i)", "expf(s[j / 2] - m_i)"),),
            "first",
            "of ordinary scores",
            "wrong",
        ),
        Wrong("one key too many", (("j < N_kv; ++j) m_i", "j <= N_kv; ++j) m_i"),), "X-ray", "out of bounds"),
        Wrong("no guard", (("if (row >= N) return;", ""),), "first", "illegal read of S[", "crash"),
        Wrong("no semicolon", (("float m_i = s[0];", "float m_i = s[0]"),), "compiles", "cell:", "compile"),
        Right(
            "minus infinity at first",
            (("float m_i = s[0];", "float m_i = __int_as_float(0xff800000);"), ("int j = 1", "int j = 0")),
        ),
        Right("with an if", (("m_i = fmaxf(m_i, s[j]);", "if (s[j] > m_i) m_i = s[j];"),)),
        Right("with exp2f", (("expf(s[j] - m_i)", "exp2f((s[j] - m_i) * 1.44269504f)"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
