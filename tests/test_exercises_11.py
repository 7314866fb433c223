"""Typical answers to the exercises of notebook 11: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SCALED = "float s = dot * softmax_scale;"
CAP = "if (softcap > 0.0f) s = softcap * tanhf(s / softcap);"
ALWAYS = CAP.replace("if (softcap > 0.0f) ", "")
HIDE = "return seen ? s * LOG2_E : NEG_INF;"

SEES = "kv_idx <= q_idx && (q_idx - kv_idx) % step == 0"
NEEDED = "most >= 0 && most / step * step >= least"
LOOP = "for (int batch = 0; batch < batches; ++batch)"
STRIDE = "for (int row = y; row < N; row += GROUPS)"
WARPS = "for (int i = 1; i < GROUPS; ++i) sum += sums[i][x];"
BARRIER = "__syncthreads();  // hazard: a sum could be read before its warp has written it"
RETURN = "if (y > 0 || key >= N_kv) return;"
STORE = "dBias[head * N_kv + key] = sum;"

TREE = """for (int half = GROUPS / 2; half > 0; half /= 2) {
    if (y < half) sums[y][x] += sums[y + half][x];
    __syncthreads();
  }
  """

LOST, TOO_MANY = ("elements wrong", "lost"), ("limit", "bytes of K loaded", "too many")

TABLE = {
    "11_softcap": (
        Wrong("no cap", ((CAP, ""),), "first", "elements wrong"),
        Wrong("another scale", ((SCALED, SCALED.replace("softmax_scale", "rsqrtf((float)HEAD_DIM)")),), "first"),
        Wrong("not multiplied again", ((CAP, CAP.replace("softcap * tanhf", "tanhf")),), "first"),
        Wrong(
            "hidden, then capped",
            ((SCALED, "float s = seen ? dot * softmax_scale : NEG_INF;"), (HIDE, "return s * LOG2_E;")),
            "first",
            "elements wrong",
            "future",
        ),
        Wrong("the mask is forgotten", ((HIDE, "return s * LOG2_E;"),), "first", "", "future"),
        Wrong(
            "a hidden key is finite", ((HIDE, HIDE.replace("NEG_INF", "M_INIT")),), "awkward", "see no key", "no key"
        ),
        Wrong("no cap is not thought of", ((CAP, ALWAYS),), "awkward", "elements wrong", "no cap"),
        Wrong(
            "tanh that overflows",
            ((CAP, "if (softcap > 0.0f) { const float e = expf(2 * s / softcap); s = softcap * (e - 1) / (e + 1); }"),),
            "awkward",
            "NaN",
            "large",
        ),
        Right(
            "by an exponential",
            ((CAP, "if (softcap > 0.0f) s = softcap * (1.0f - 2.0f / (expf(2.0f * s / softcap) + 1.0f));"),),
        ),
        Right(
            "an early return",
            ((SCALED, "if (!seen) return NEG_INF;\n  float s = dot * softmax_scale;"), (HIDE, "return s * LOG2_E;")),
        ),
        Right(
            "in powers of 2",
            (
                (SCALED, "float s = dot * softmax_scale * LOG2_E;\n  softcap *= LOG2_E;"),
                (HIDE, "return seen ? s : NEG_INF;"),
            ),
        ),
        Right("a conditional", ((CAP, "s = softcap == 0 ? s : tanhf(s / softcap) * softcap;"),)),
    ),
    "11_dilated": (
        Wrong("multiples of step", ((SEES, "kv_idx <= q_idx && kv_idx % step == 0"),), "first", "elements wrong"),
        Wrong("every key", ((SEES, "kv_idx <= q_idx"),), "first", "elements wrong"),
        Wrong("no tile is skipped", ((NEEDED, "true"),), *TOO_MANY),
        Wrong("only the future is skipped", ((NEEDED, "most >= 0"),), *TOO_MANY),
        Wrong("a distance of 0 does not count", ((NEEDED, "most >= 0 && most / step > 0"),), "awkward", *LOST),
        Wrong("a tile has a whole step", ((NEEDED, "most >= 0 && most - least >= step"),), "awkward", *LOST),
        Wrong("the corners", ((NEEDED, "most >= 0 && (least % step == 0 || most % step == 0)"),), "first", *LOST),
        Wrong(
            "the first row alone", (("most = last_row - first_key", "most = first_row - first_key"),), "first", *LOST
        ),
        Right("the distance once", ((SEES, "q_idx >= kv_idx && (q_idx - kv_idx) / step * step == q_idx - kv_idx"),)),
        Right("equal rests", ((SEES, "kv_idx <= q_idx && q_idx % step == kv_idx % step"),)),
        Right("the rest", ((NEEDED, "most >= 0 && most % step <= most - least"),)),
        Right("the smallest multiple", ((NEEDED, "most >= 0 && (least + step - 1) / step * step <= most"),)),
        Right(
            "by a loop",
            ((NEEDED, "[&] { for (int e = 0; e <= most; e += step) if (e >= least) return true; return false; }()"),),
        ),
    ),
    "11_one_for_many": (
        Wrong("the first batch", ((LOOP, "for (int batch = 0; batch < 1; ++batch)"),), "first", "", "one batch"),
        Wrong("the first warp alone", ((WARPS, ""),), "first", "elements wrong", "one warp"),
        Wrong("4 for GROUPS", (("i < GROUPS", "i < 4"),), "awkward", "GROUPS = 8"),
        Wrong("all rows in each warp", ((STRIDE, "for (int row = 0; row < N; ++row)"),), "first", "elements wrong"),
        Wrong("rows in blocks", ((STRIDE, "for (int row = y * N / GROUPS; row < N; ++row)"),), "first"),
        Wrong(
            "rows of a whole share",
            ((STRIDE, "for (int row = y; row < N / GROUPS * GROUPS; row += GROUPS)"),),
            "awkward",
        ),
        Wrong("a barrier is missing", ((BARRIER, ""),), "X-ray", "", "race"),
        Wrong("keys past the end are written", ((RETURN, "if (y > 0) return;"),), "awkward"),
        Wrong(
            "by atomics",
            (
                (WARPS, ""),
                (
                    RETURN,
                    "if (key >= N_kv) return;\n  if (y == 0) dBias[head * N_kv + key] = 0.0f;\n  __syncthreads();",
                ),
                (STORE, "atomicAdd(&dBias[head * N_kv + key], sum);"),
            ),
            "limit",
            "atomic additions",
            "atomics",
        ),
        Wrong(
            "by atomics in shared memory",
            (
                (
                    "sums[y][x] = sum;",
                    "if (y == 0) sums[0][x] = 0.0f;\n  __syncthreads();\n  atomicAdd(&sums[0][x], sum);",
                ),
                (WARPS, "sum = sums[0][x];"),
            ),
            "limit",
            "atomic additions: ",
            "atomics",
        ),
        Wrong(
            "one warp adds all",
            ((STRIDE, "for (int row = 0; row < N; ++row)"), (WARPS, "")),
            "limit",
            "bytes of dS loaded",
            "twice",
        ),
        Right("the last first", ((WARPS, "for (int i = GROUPS - 1; i > 0; --i) sum += sums[i][x];"),)),
        Right(
            "a tree",
            (
                (RETURN, TREE + RETURN),
                (WARPS, "sum = sums[0][x];"),
            ),
        ),
        Right("rows outside, batches inside", ((LOOP, STRIDE), (STRIDE + "\n      if", LOOP + "\n      if"))),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
