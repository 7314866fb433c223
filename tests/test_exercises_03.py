"""Typical answers to the exercises of notebook 03."""

from __future__ import annotations

import numpy as np
import pytest
from exercise_table import Answer, Right, Wrong, cases, check

from helpers.attention import reference
from helpers.attention.check import make_inputs

RESCALE_ACC = "    for (int c = 0; c < HEAD_DIM; ++c) acc[c] *= rescale;\n"
ALL_AGAIN = """    for (int c = 0; c < HEAD_DIM; ++c) acc[c] = 0.0f;
    for (int j = 0; j < first; ++j) {
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c) dot += Q[row * HEAD_DIM + c] * K[j * HEAD_DIM + c];
      const float p = expf(softmax_scale * dot - m_new);
      l_i += p;
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * V[j * HEAD_DIM + c];
    }
"""

ACC = "c < HEAD_DIM; ++c) acc[c] *= rescale"

M = "m_new == NEG_INF ? 0.0f : m_new;"
KEPT = "m_i = m_new;", "m_i = m;"
INVERSE = "l_i > 0.0f ? 1.0f / l_i : 0.0f;"

BARRIER, LOAD, WEIGHTS, USE = "    __syncthreads();\n", "    for (int i", "    if (half == 0)", "    for (int c"
WRITTEN = "      l_smem[r] = l_i;\n"
USED = "V_smem[j][half * (HEAD_DIM / 2) + c];\n    }\n"
NOT_THIRD = (BARRIER + USE, USE)

PARTS = "acc_1[i] * rescale_1 + acc_2[i] * rescale_2"
MAXIMUM = "fmaxf(m_1[row], m_2[row])"

TABLE = {
    "03_rescale": (
        Wrong("acc is not rescaled", ((RESCALE_ACC, ""),), "first", "O"),
        Wrong("one element of acc", ((RESCALE_ACC, "    acc[0] *= rescale;\n"),), "first"),
        Wrong("the wrong way round", (("expf(m_i - m_new)", "expf(m_new - m_i)"),), "first", "", "nan"),
        Wrong("two exponentials", (("expf(m_i - m_new)", "expf(m_i) / expf(m_new)"),), "awkward", "large", "large"),
        Wrong(
            "sums the keys so far again",
            (("    l_i *= rescale;\n", "    l_i = 0.0f;\n"), (RESCALE_ACC, ALL_AGAIN)),
            "limit",
            "bytes of K read",
            "limit",
        ),
        Wrong(
            "BLOCK_N elements of acc",
            ((ACC, ACC.replace("HEAD_DIM", "BLOCK_N")),),
            "first",
            "columns 0-15 are right",
            "columns",
        ),
        Wrong(
            "BLOCK_M elements of acc",
            ((ACC, ACC.replace("HEAD_DIM", "BLOCK_M")),),
            "first",
            "columns 0-63 are right",
            "columns",
        ),
        Wrong(
            "128 elements of acc",
            ((ACC, ACC.replace("HEAD_DIM", "128")),),
            "X-ray",
            "How far does your loop over acc go?",
        ),
        Wrong(
            "l_i in the loop over acc",
            (("    l_i *= rescale;\n", ""), ("acc[c] *= rescale", "acc[c] *= rescale, l_i *= rescale")),
            "first",
            "",
            "factor",
        ),
        Wrong(
            "something small added to l_i",
            (("acc[c] / l_i", "acc[c] / (l_i + 1e-6f)"),),
            "awkward",
            "to the last bit",
            "one key",
        ),
        Right("only where the maximum grows", (("l_i *= rescale;", "if (rescale < 1.0f) l_i *= rescale;"),)),
        Right("by exp2", (("expf(m_i - m_new)", "exp2f(1.44269504f * (m_i - m_new))"),)),
        Right("without a variable", (("l_i *= rescale", "l_i *= expf(m_i - m_new)"),)),
    ),
    "03_no_key": (
        Wrong("only the division", ((M, "m_new;"),), "first", "NaN", "nan"),
        Wrong("never a negative maximum", ((M, "fmaxf(m_new, 0.0f);"), KEPT), "awkward", "large scores", "large"),
        Wrong("subtracts nothing", ((M, "0.0f;"), KEPT), "awkward", "large scores", "large"),
        Wrong(
            "returns before the stores",
            (("  float m_i = NEG_INF", "  if (last < 0) return;\n  float m_i = NEG_INF"),),
            "first",
            "",
            "empty",
        ),
        Wrong("l_i is changed", ((INVERSE, "1.0f / (l_i += l_i == 0.0f); l_i += 0.5f;"),), "first", "lse", "lse"),
        Wrong(
            "something small added to l_i",
            ((INVERSE, "1.0f / (l_i + 1e-6f);"),),
            "awkward",
            "to the last bit",
            "one key",
        ),
        Wrong(
            "something smaller added to l_i",
            ((INVERSE, "1.0f / (l_i + 1e-7f);"),),
            "awkward",
            "to the last bit",
            "one key",
        ),
        Wrong(
            "no row of one key",
            ((INVERSE, "l_i > 1.0f ? 1.0f / l_i : 0.0f;"),),
            "first",
            "A row that sees one key",
            "one key",
        ),
        Wrong("asks the old maximum", ((M, "m_i == NEG_INF ? 0.0f : m_new;"),), "first", "Follow one row by hand"),
        Wrong("asks the row", ((M, "last < 0 ? 0.0f : m_new;"),), "awkward", "Where is it computed?", "nan"),
        Wrong("asks the tile", ((M, "first == 0 ? 0.0f : m_new;"),), "first", "Where is it computed?", "nan"),
        Wrong("no weight at all", ((INVERSE, "0.0f;"),), "first", "O"),
        Right("something that rounds to nothing", ((INVERSE, "1.0f / (l_i + 1e-30f);"),)),
        Right("at least something", ((INVERSE, "1.0f / fmaxf(l_i, 1e-20f);"),)),
        Right("a large negative number", ((M, "fmaxf(m_new, -1e30f);"),)),
        Right("asks l_i", ((INVERSE, "l_i == 0.0f ? 0.0f : 1.0f / l_i;"),)),
        Right("asks m_i", ((INVERSE, "m_i == NEG_INF ? 0.0f : 1.0f / l_i;"),)),
    ),
    "03_find_the_race": (
        Wrong("as it was", (NOT_THIRD,), "X-ray", "race: ", "race"),
        Wrong("one too many elsewhere", (NOT_THIRD, (LOAD, BARRIER + LOAD)), "X-ray", "race: ", "race"),
        Wrong("inside the if", (NOT_THIRD, (WRITTEN, WRITTEN + BARRIER)), "X-ray", "", "deadlock"),
        Wrong("in every iteration", (("acc[c] *=", "__syncthreads(); acc[c] *="),), "limit", "3 tiles", "barriers"),
        Wrong(
            "between the weights",
            (NOT_THIRD, ("        P_smem[j][r] =", "        __syncthreads();\n        P_smem[j][r] =")),
            "first",
            "The odd threads never enter the if",
            "deadlock",
        ),
        Wrong(
            "one for each half",
            (NOT_THIRD, (WEIGHTS, "    if (half == 1) __syncthreads();\n" + WEIGHTS), (WRITTEN, WRITTEN + BARRIER)),
            "first",
            "must be reached by all threads",
            "deadlock",
        ),
        Wrong(
            "threads without a row leave",
            (("  const float* q", "  if (row >= N) return;\n  const float* q"),),
            "X-ray",
            "Does one of them leave too early?",
            "unset",
        ),
        Right("a barrier of the warp", ((BARRIER + USE, "    __syncwarp();\n" + USE),)),
        Right("the first at the end", ((BARRIER + LOAD, LOAD), (USED, USED + BARRIER))),
    ),
    "03_merge_halves": (
        Wrong("added as they are", ((PARTS, "acc_1[i] + acc_2[i]"),), "first", "O"),
        Wrong("l of one part", ((" + l_2[row] * rescale_2", ""),), "first"),
        Wrong("the smaller maximum", ((MAXIMUM, "fminf(m_1[row], m_2[row])"),), "awkward", "", "nan"),
        Wrong("no maximum", ((MAXIMUM, "0.0f"),), "awkward", "large scores"),
        Wrong("lse of the first part", (("m + logf(l)", "m_1[row] + logf(l_1[row])"),), "first", "lse", "lse"),
        Wrong(
            "a maximum for each element",
            ((MAXIMUM, "fmaxf(m_1[i], m_2[i])"),),
            "first",
            "Which index has each?",
            "crash",
        ),
        Wrong("a sum for each element", (("l_1[row]", "l_1[i]"),), "first", "Which index has each?", "crash"),
        Wrong(
            "a row's first element",
            ((PARTS, PARTS.replace("[i]", "[row]")),),
            "first",
            "Which index chooses the column",
            "flat",
        ),
        Wrong(
            "l is not rescaled",
            (("l_1[row] * rescale_1 + l_2[row] * rescale_2", "l_1[row] + l_2[row]"),),
            "first",
            "What is l then?",
            "factor",
        ),
        Wrong("never divided", ((f"({PARTS}) / l", PARTS),), "first", "What is l then?", "factor"),
        Wrong(
            "the sum of the maxima", ((MAXIMUM, "m_1[row] + m_2[row]"),), "awkward", "Where a part has no keys", "nan"
        ),
        Wrong(
            "quotients of exponentials",
            (("expf(m_1[row] - m)", "expf(m_1[row]) / expf(m)"), ("expf(m_2[row] - m)", "expf(m_2[row]) / expf(m)")),
            "awkward",
            "Large scores",
            "large",
        ),
        Wrong("something small added to l", ((") / l;", ") / (l + 1e-6f);"),), "awkward", "to the last bit", "one key"),
        Right("no exponential of 0", (("expf(m_2[row] - m)", "m == m_2[row] ? 1.0f : expf(m_2[row] - m)"),)),
        Right("divided one by one", ((f"({PARTS}) / l", "acc_1[i] * (rescale_1 / l) + acc_2[i] * (rescale_2 / l)"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)


def test_the_reference_agrees_about_a_row_without_a_key() -> None:
    """O = 0 and lse = -inf, which the exercise 03_no_key asks for."""
    q, k, v = make_inputs(5, 3, 4)
    o, lse = reference.attention(q, k, v, window=(1, 0), return_lse=True)
    assert (o[:2] == 0).all() and (lse[:2] == -np.inf).all() and np.isfinite(lse[2:]).all()
