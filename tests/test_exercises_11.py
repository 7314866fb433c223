"""Typical answers to the exercises of notebook 11: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SCALED = "float s = dot * softmax_scale;"
CAP = "if (softcap > 0.0f) s = softcap * tanhf(s / softcap);"
ALWAYS = CAP.replace("if (softcap > 0.0f) ", "")
HIDE = "return seen ? s * LOG2_E : NEG_INF;"

SEES = "kv_idx <= q_idx && (q_idx - kv_idx) % step == 0"
LEAST = "max(first_row - last_key, 0)"
NEEDED = "most >= 0 && most / step * step >= least"
LOST, TOO_MANY = ("elements wrong", "lost"), ("limit", "bytes of K loaded", "too many")

TABLE = {
    "11_softcap": (
        Wrong("no cap", ((CAP, ""),), "first", "elements wrong"),
        Wrong("not multiplied again", ((CAP, CAP.replace("softcap * tanhf", "tanhf")),), "first"),
        Wrong("not divided before", ((CAP, CAP.replace("s / softcap", "s")),), "first"),
        Wrong(
            "capped before the scale",
            ((SCALED, "float s = dot;"), (HIDE, HIDE.replace("s *", "s * softmax_scale *"))),
            "first",
        ),
        Wrong(
            "LOG2_E inside tanh",
            ((SCALED, "float s = dot * softmax_scale * LOG2_E;"), (HIDE, "return seen ? s : NEG_INF;")),
            "first",
        ),
        Wrong("LOG2_E forgotten", ((HIDE, "return seen ? s : NEG_INF;"),), "first"),
        Wrong("a hard limit", ((CAP, "if (softcap > 0.0f) s = fminf(fmaxf(s, -softcap), softcap);"),), "first"),
        Wrong(
            "hidden, then capped",
            ((SCALED, "float s = seen ? dot * softmax_scale : NEG_INF;"), (HIDE, "return s * LOG2_E;")),
            "first",
            "elements wrong",
            "future",
        ),
        Wrong("the mask is forgotten", ((HIDE, "return s * LOG2_E;"),), "first", "", "future"),
        Wrong(
            "only from above", ((CAP, "if (softcap > 0.0f && s > 0.0f) s = softcap * tanhf(s / softcap);"),), "first"
        ),
        Wrong("divided again", ((CAP, CAP.replace("tanhf(s / softcap)", "tanhf(s) / softcap")),), "first"),
        Wrong("a hidden key scores 0", ((HIDE, HIDE.replace("NEG_INF", "0.0f")),), "first", "still hidden", "future"),
        Wrong("a hidden key scores -softcap", ((HIDE, HIDE.replace("NEG_INF", "-softcap")),), "first", "", "future"),
        Wrong(
            "a hidden key is finite", ((HIDE, HIDE.replace("NEG_INF", "M_INIT")),), "awkward", "see no key", "no key"
        ),
        Wrong("another curve", ((CAP, "if (softcap > 0.0f) s = s / (1.0f + fabsf(s) / softcap);"),), "first"),
        Wrong("divided by LOG2_E", ((HIDE, HIDE.replace("s *", "s /")),), "first"),
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
        Wrong("the future too", ((SEES, "(q_idx - kv_idx) % step == 0"),), "first", "elements wrong"),
        Wrong("not its own key", ((SEES, SEES.replace("<=", "<")),), "first", "elements wrong"),
        Wrong("within one step", ((SEES, "kv_idx <= q_idx && q_idx - kv_idx < step"),), "first", "elements wrong"),
        Wrong("no tile is skipped", ((NEEDED, "true"),), *TOO_MANY),
        Wrong("only the future is skipped", ((NEEDED, "most >= 0"),), *TOO_MANY),
        Wrong("the future is not skipped", ((NEEDED, NEEDED.replace("most >= 0 && ", "")),), *TOO_MANY),
        Wrong("a distance of 0 does not count", ((NEEDED, "most >= 0 && most / step > 0"),), "awkward", *LOST),
        Wrong("a tile has a whole step", ((NEEDED, "most >= 0 && most - least >= step"),), "awkward", *LOST),
        Wrong("the corners", ((NEEDED, "most >= 0 && (least % step == 0 || most % step == 0)"),), "first", *LOST),
        Wrong(
            "the first row alone", (("most = last_row - first_key", "most = first_row - first_key"),), "first", *LOST
        ),
        Wrong("a step too far", ((NEEDED, NEEDED.replace("step >= least", "step > least")),), "awkward", *LOST),
        Wrong("distances from the first key", ((LEAST, "first_row - first_key"),), "awkward", *LOST),
        Wrong("a distance of 0 is none", ((LEAST, LEAST.replace("0", "1")),), "awkward", *LOST),
        Wrong(
            "the first key of the tile alone",
            ((NEEDED, "most >= 0 && (first_row - first_key) % step == 0"),),
            "first",
            *LOST,
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
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
