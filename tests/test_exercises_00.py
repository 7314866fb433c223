"""Typical answers to the exercises of notebook 00."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

INDEX = "blockIdx.x * BLOCK + threadIdx.x"
MINE = f"const int i = {INDEX};"

TABLE = {
    "00_first_kernel": (
        Wrong("no block", (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x"),), "first", "Z"),
        Wrong("no guard", (("if (i < n) ", ""),), "first", "illegal", "crash"),
        Wrong("one too many", (("i < n", "i <= n"),), "first", "illegal read of ", "crash"),
        Wrong("128 for BLOCK", (("blockIdx.x * BLOCK", "blockIdx.x * 128"),), "awkward", "BLOCK = 64", "empty"),
        Wrong("one too few", (("i < n", "i < n - 1"),), "first", "Z", "empty"),
        Wrong(
            "threads and blocks exchanged",
            (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x * gridDim.x + blockIdx.x * BLOCK"),),
            "first",
        ),
        Wrong("no factor", (("a * X[i]", "X[i]"),), "first", "Z", "wrong"),
        Wrong(
            "one thread computes all",
            ((f"{MINE}\n  if (i < n) Z", "if (blockIdx.x + threadIdx.x == 0)\n    for (int i = 0; i < n; ++i) Z"),),
            "limit",
            "requests of Z, one for a warp: 192 (the limit: at most 8)",
            "alone",
        ),
        Wrong(
            "each block's first thread computes its elements",
            (
                (
                    f"{MINE}\n  if (i < n) Z",
                    "const int end = min(n, (int)(blockIdx.x + 1) * BLOCK);\n"
                    "  if (threadIdx.x == 0) for (int i = blockIdx.x * BLOCK; i < end; ++i) Z",
                ),
            ),
            "limit",
            "",
            "alone",
        ),
        Wrong(
            "every thread computes all",
            ((f"{MINE}\n  if (i < n) Z", "for (int i = 0; i < n; ++i) Z"),),
            "X-ray",
            "256 threads made 49,152 stores, to 192 of Z's 192 elements",
            "race",
        ),
        Wrong(
            "blocks of another size", (("blockIdx.x * BLOCK", "blockIdx.x * 64"),), "X-ray", "to 192 of Z's 192", "race"
        ),
        Wrong(
            "counted from 1",
            (("threadIdx.x;", "threadIdx.x + 1;"),),
            "first",
            "the first element that is never",
            "empty",
        ),
        Wrong("the factor of both", (("a * X[i] + Y[i]", "a * (X[i] + Y[i])"),), "first", "Z[i] is a times", "wrong"),
        Wrong("a misspelt name", (("threadIdx.x", "threadidx.x"),), "compiles", "threadidx", "undeclared"),
        Wrong("Python's if", (("if (i < n) ", "if i < n: "),), "compiles", "in parentheses", "python"),
        Wrong("Python's for", (("if (i < n) ", "for j in range(n): "),), "compiles", "++j", "python"),
        Wrong("Python's choice", (("a * X[i]", "a if i < n else 0"),), "compiles", "", "python"),
        Wrong("Python's word", (("i < n", "True"),), "compiles", "", "python"),
        Wrong("Python's comment", (("  if", "  # my element\n  if"),), "compiles", "begins with //", "comment"),
        Wrong("no type", (("const int i", "i"),), "compiles", "with its type", "undeclared"),
        Wrong("no .x", (("threadIdx.x", "threadIdx"),), "compiles", ".x, .y or .z", "part"),
        Wrong("stored in an input", (("Z[i] =", "X[i] ="),), "compiles", "an input", "read only"),
        Wrong("a value returned", (("Z[i] = a", "return a"),), "compiles", "Each stores", "no value"),
        Wrong("an array of n", (("if (i < n)", "float t[n]; if (i < n)"),), "compiles", "fixed when", "length"),
        Wrong("an array's maximum", (("a * X[i]", "max(X)"),), "compiles", "two numbers", "arguments"),
        Wrong("two indices", (("X[i]", "X[0][i]"),), "compiles", "one index", "one index"),
        Wrong("another parameter", (("float a", "int a"),), "compiles", "in their order", "signature"),
        Wrong("a semicolon too many", (("if (i < n) ", "if (i < n); "),), "first", "the whole body", "empty body"),
        Wrong("a chain", (("i < n", "0 <= i < n"),), "first", "a <= i && i < b", "chain"),
        Wrong("one equals sign", ((MINE, MINE[6:]), ("i < n", "i = n")), "first", "write ==", "assignment"),
        Wrong("two equals signs", (("Z[i] =", "Z[i] =="),), "first", "throws it away", "no effect"),
        Right(
            "a loop with the grid's stride",
            ((f"{MINE}\n  if (i < n) Z", f"for (int i = {INDEX}; i < n; i += gridDim.x * BLOCK) Z"),),
        ),
        Right("by blockDim", (("blockIdx.x * BLOCK", "blockIdx.x * blockDim.x"),)),
        Right("an early return", (("if (i < n) Z[i]", "if (i >= n) return;\n  Z[i]"),)),
        Right(
            "another assignment of elements",
            (("blockIdx.x * BLOCK + threadIdx.x", "threadIdx.x * gridDim.x + blockIdx.x"),),
        ),
    ),
    "00_safe_softmax": (
        Wrong("nothing subtracted", (("expf(s[j] - m_i)", "expf(s[j])"),), "first", "scores near -100,000", "large"),
        Wrong("a maximum that starts at 0", (("float m_i = s[0];", "float m_i = 0.0f;"),), "first", "", "maximum"),
        Wrong("a maximum that starts at -1e6", (("float m_i = s[0];", "float m_i = -1e6f;"),), "first", "", "maximum"),
        Wrong("the minimum", (("fmaxf(m_i", "fminf(m_i"),), "first", ""),
        Wrong("all but the second score", (("int j = 1", "int j = 2"),), "first", "", "maximum"),
        Wrong(
            "minus infinity by its name",
            (("float m_i = s[0];", "float m_i = -INFINITY;"),),
            "compiles",
            "it has no INFINITY",
            "infinity",
        ),
        Wrong("a maximum by std", (("fmaxf(m_i", "std::max(m_i"),), "compiles", "has no std::max", "std"),
        Wrong("a limit by its name", (("= s[0];", "= -FLT_MAX;"),), "compiles", "includes no header", "no header"),
        Wrong("the place of the maximum", (("m_i = fmaxf(m_i, s[j])", "if (s[j] > m_i) m_i = j"),), "first"),
        Wrong("the sign", (("s[j] - m_i", "m_i - s[j]"),), "first", "What stands inside your expf?", "wrong"),
        Wrong(
            "after the exponential", (("expf(s[j] - m_i)", "expf(s[j]) - m_i"),), "first", "inside your expf", "wrong"
        ),
        Wrong("divided by an exponential", (("expf(s[j] - m_i)", "expf(s[j]) / expf(m_i)"),), "first", "", "large"),
        Wrong("one key too many", (("j < N_kv; ++j) m_i", "j <= N_kv; ++j) m_i"),), "X-ray", "out of bounds"),
        Wrong("no guard", (("if (row >= N) return;", ""),), "first", "illegal read of S[", "crash"),
        Wrong("no semicolon", (("float m_i = s[0];", "float m_i = s[0]"),), "compiles", "cell:", "semicolon"),
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
