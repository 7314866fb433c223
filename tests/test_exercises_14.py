"""Typical answers to the exercises of notebook 14: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

from helpers.lesson.exercises import exercise, hints
from helpers.lesson.exercises.trial import EXERCISES

SKIP = "    if (lse_i == NEG_INF) continue;\n"
WEIGHT = "expf(lse_i - m)"
LSE = "m + logf(sum)"
NO_KEY = "  if (sum == 0.0f) o_row = 0.0f;\n"
ADD = f"{SKIP}    const float weight = {WEIGHT};\n    sum += weight;\n    acc += weight * *o;\n"
ADD_ALL_SO_FAR = """    sum = acc = 0.0f;
    for (int j = 0; j <= i; ++j) {
      if (lse_part[j * N + row] == NEG_INF) continue;
      const float weight = expf(lse_part[j * N + row] - m);
      sum += weight;
      acc += weight * O_part[(j * N + row) * 64 + c];
    }
"""

FENCE = "  __threadfence();   // the ticket is not seen before what this thread has written\n"
WRITTEN = "  __syncthreads();   // nor drawn before all threads have written\n"
DRAW = "if (c == 0) is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;\n"
KNOWN = "  __syncthreads();\n"
RESET_BY_ALL = """if (c == 0) {
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
    *ticket = 0;
  }
"""
NUMBER = "== gridDim.x - 1;\n"

SEEN = "key < length"
TABLE_ROW = "sequence * table_row + "
ENTRY = "key / page_size"
PLACE = "page * page_size + key % page_size"
LOOK_UP = "        const int page = block_table[sequence * table_row + key / page_size];\n"

TABLE = {
    "14_block_table": (
        Wrong(
            "pages in order",
            ((LOOK_UP, "        const int page = sequence * table_row + key / page_size;\n"),),
            "first",
            "O at",
            "order",
        ),
        Wrong("the first sequence's row", ((TABLE_ROW, ""),), "first", "O at", "first row"),
        Wrong("NaN past the end", ((SEEN, "true"),), "first", "NaN", "past the end"),
        Wrong("no 0 past the end", (("      v[i] = 0.0f;\n", ""),), "X-ray", "What is 0 * v[i]", "unset"),
        Wrong("NaN is left out", ((SEEN, "true"), ("* v[i];", "* (isnan(v[i]) ? 0.0f : v[i]);")), "limit"),
        Wrong("one key too many", ((SEEN, "key <= length"),), "first", "NaN", "past the end"),
        Wrong("pages of 16", ((ENTRY, "key / 16"), ("key % page_size", "key % 16")), "awkward", "", "page size"),
        Wrong("the page of the first key", ((ENTRY, "first / page_size"),), "awkward", "", "page size"),
        Wrong("a page is a row", ((PLACE, "page + key % page_size"),), "first", "O at"),
        Wrong("the key's place in V", ((PLACE, "page * page_size + key"),), "first"),
        Right("by a bound of the loop", ((f"if ({SEEN})", "if (i < length - first)"),)),
        Right("by a choice", ((LOOK_UP, ""), ("V[(page", f"V[(block_table[{TABLE_ROW}{ENTRY}]"))),
    ),
    "14_merge": (
        Wrong("the mean of the parts", ((WEIGHT, "1.0f"), (LSE, "m")), "first", "O at"),
        Wrong("the weight is the lse", ((WEIGHT, "lse_i - m"),), "first", "O at"),
        Wrong("no maximum", ((WEIGHT, "expf(lse_i)"), (LSE, "logf(sum)")), "awkward", "large scores", "large"),
        Wrong(
            "a little more than the sum",
            ((NO_KEY, ""), ("acc / sum", "acc / (sum + 1e-6f)")),
            "awkward",
            "",
            "one part",
        ),
        Wrong("a quotient of exponentials", ((WEIGHT, "expf(lse_i) / expf(m)"),), "awkward", "large scores", "large"),
        Wrong("lse is a sum", ((LSE, "m + sum"),), "first", "lse at", "lse"),
        Wrong("NaN is left out", ((SKIP, ""), ("acc +=", "if (!isnan(*o)) acc +=")), "awkward", "NaN", "empty part"),
        Wrong("an empty part ends the row", ((SKIP, SKIP.replace("continue", "break")),), "awkward", "", "empty part"),
        Wrong("lse is the maximum", ((LSE, "m"),), "first", "lse at", "lse"),
        Wrong("a row without keys is divided", ((NO_KEY, ""),), "awkward", "NaN", "empty row"),
        Wrong("a row without keys has lse 0", ((NO_KEY, NO_KEY + "  if (sum == 0.0f) lse_row = 0.0f;\n"),), "awkward"),
        Wrong("adds up the parts so far again", ((ADD, ADD_ALL_SO_FAR),), "limit", "bytes of O_part read", "limit"),
        Right("weights of all lse", ((WEIGHT, "exp2f(1.44269504f * (lse_i - m))"),)),
        Right(
            "an element by choice",
            (
                (SKIP, ""),
                ("acc += weight * *o", "if (weight > 0.0f) acc += weight * *o"),
                (WEIGHT, "lse_i == NEG_INF ? 0.0f : expf(lse_i - m)"),
            ),
        ),
        Right(
            "a maximum of its own",
            (
                (
                    ADD,
                    f"{SKIP}    const float m_new = i == 0 || sum == 0.0f ? lse_i : fmaxf(top, lse_i);\n"
                    "    const float old = sum == 0.0f ? 0.0f : expf(top - m_new), weight = expf(lse_i - m_new);\n"
                    "    sum = sum * old + weight, acc = acc * old + weight * *o, top = m_new;\n",
                ),
                ("float sum = 0.0f,", "float top = NEG_INF, sum = 0.0f,"),
                (LSE, "top + logf(sum)"),
            ),
        ),
        Right("asks m", ((NO_KEY, "  if (m == NEG_INF) o_row = 0.0f;\n"),)),
    ),
    "14_ticket": (
        Wrong(
            "the last number",
            ((DRAW, "if (c == 0) is_last = blockIdx.x == gridDim.x - 1;\n"),),
            "X-ray",
            "race",
            "no draw",
        ),
        Wrong("no fence", ((FENCE, ""),), "X-ray", "race", "race"),
        Wrong("a fence of the block", (("__threadfence()", "__threadfence_block()"),), "X-ray", "race", "race"),
        Wrong("no barrier after it", ((DRAW + KNOWN, DRAW),), "X-ray", "is_last", "is_last"),
        Wrong("the first draw", ((NUMBER, "== 0;\n"),), "X-ray", "race", "early"),
        Wrong("one draw too many", ((NUMBER, "== gridDim.x;\n"),), "first", "never written", "empty"),
        Wrong(
            "never reset", (("atomicInc(ticket, gridDim.x - 1)", "atomicAdd(ticket, 1)"),), "first", "again", "empty"
        ),
        Wrong(
            "back to 0 one too late", (("atomicInc(ticket, gridDim.x - 1)", "atomicInc(ticket, gridDim.x)"),), "first"
        ),
        Wrong("reset by every block", ((DRAW, RESET_BY_ALL),), "X-ray", "", "reset by all"),
        Wrong("the block's own number", ((NUMBER, "== blockIdx.x;\n"),), "X-ray", "", "early"),
        Wrong("a number of threads", ((DRAW, DRAW.replace("gridDim.x", "blockDim.x")),), "first"),
        Wrong("each thread draws", (("if (c == 0) is_last", "is_last"),), "X-ray", "is_last", "is_last"),
        Wrong(
            "as many draws as threads",
            ((DRAW, "is_last = atomicInc(ticket, 64 * gridDim.x - 1) >= 64 * (gridDim.x - 1);\n"),),
            "limit",
            "atomics: 256",
        ),
        Right("the last thread draws", (("c == 0) is_last", "c == 63) is_last"),)),
        Right("one fence for the block", ((FENCE, ""), (WRITTEN, WRITTEN + "  if (c == 0) __threadfence();\n"))),
        Right(
            "reset by hand",
            (
                (
                    DRAW,
                    "if (c == 0) {\n    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;\n"
                    "    if (is_last) *ticket = 0;\n  }\n",
                ),
            ),
        ),
        Right(
            "thread 0 alone has a fence behind the barrier",
            ((FENCE, ""), (DRAW, "if (c == 0) __threadfence();\n  " + DRAW)),
        ),
    ),
}

# The hint of each symptom mentions this.
SPEAKS_OF = {
    "order": "if pages were in order",
    "first row": "The first sequence is right",
    "past the end": "ends within 16 keys",
    "unset": "ends within 16 keys",
    "page size": "should be page_size",
    "empty part": "a part has no keys",
    "empty row": "a row without keys",
    "one part": "With one part",
    "reset by all": "Every block",
    "large": "Large scores",
    "lse": "lse is not",
    "limit": "",
    "race": "before it sees the part",
    "no draw": "need not come last",
    "early": "have not written yet",
    "is_last": "Threads of a block meet",
    "empty": "Nobody wrote O",
    "reset": "the second is not",
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)


def test_first_hints_name_what_is_wrong() -> None:
    for name, answers in TABLE.items():
        for answer in answers:
            if isinstance(answer, Wrong) and answer.symptom:
                assert SPEAKS_OF[answer.symptom] in EXERCISES[name].hints[answer.symptom][0], answer
    hints.forget()
    assert "share of all exponentials" in exercise.grade("14_merge", exercise.skeleton("14_merge")).text
