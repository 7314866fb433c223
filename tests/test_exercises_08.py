"""Typical answers to the exercises of notebook 08: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

SHARE = "for (int c = lane; c < HEAD_DIM; c += 32) sum += dO[c] * O[c];"
REDUCE = "for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);"
P = "expf(softmax_scale * s - lse[row])"
DS = "p * (dp - D[row])"
DQ = "atomicAdd(&dQ[row * d + c], softmax_scale * ds * k[c]);"
SUM = "for (int j = first; j < end; ++j) sum += dS[row * N_kv + j] * K[j * 64 + c];"
STORE = "if (lane == 0) D[row] = sum;"
BY_SHARED = """__shared__ float sums[128];
  sums[threadIdx.x] = sum;
  __syncwarp();
  sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += sums[threadIdx.x / 32 * 32 + i];"""
TWO_WORDS = "for (int i = 0, c = lane; i < 2 && c < HEAD_DIM; ++i, c += 32) sum += dO[c] * O[c];"
ADD = "atomicAdd(&dQ[row * 64 + c], sum);"

PLACE = "128 * f + 32 * i + threadIdx.x"
ROWS_OF = "dQ[first + element(f, i)] = accum[first + place(f, i)];"

TABLE = {
    "08_dq_order": (
        Wrong(
            "as it was",
            ((PLACE, "element(f, i)"), (ROWS_OF, ROWS_OF.replace("place", "element"))),
            "limit",
            "sectors a request of add: 8",
            "sectors",
        ),
        Wrong(
            "four floats of a lane side by side", ((PLACE, "128 * f + 4 * threadIdx.x + i"),), "limit", "", "sectors"
        ),
        Wrong("rows as before", ((ROWS_OF, ROWS_OF.replace("place", "element")),), "first", "", "rows"),
        Wrong("the places are exchanged", ((ROWS_OF, ROWS_OF.replace("element", "place")),), "first", "", "rows"),
        Wrong("all fragments in one place", ((PLACE, "32 * i + threadIdx.x"),), "first", "", "twice"),
        Wrong("fragments overlap", ((PLACE, "32 * f + 32 * i + threadIdx.x"),), "first", "", "twice"),
        Wrong(
            "beyond the 16 rows",
            ((PLACE, "256 * f + 32 * i + threadIdx.x"),),
            "first",
            "What is the largest place",
            "crash",
        ),
        Wrong(
            "without atomics",
            (("atomicAdd(&accum[first + place(f, i)], ", "accum[first + place(f, i)] += ("),),
            "X-ray",
            "race",
            "race",
        ),
        Right("elements first", ((PLACE, "32 * (FRAGMENTS * i + f) + threadIdx.x"),)),
        Right("lanes from the last", ((PLACE, "128 * f + 32 * i + 31 - threadIdx.x"),)),
        Right("a rotation", ((PLACE, "128 * f + 32 * i + (threadIdx.x + 8) % 32"),)),
    ),
    "08_delta": (
        Wrong("8 columns", (("c < HEAD_DIM", "c < 8"),), "first", "", "share"),
        Wrong(
            "every lane reads the whole row",
            ((SHARE, SHARE.replace("lane;", "0;").replace("+= 32", "++")), (REDUCE, "")),
            "limit",
            "sectors of O: 4,608",
            "reads",
        ),
        Wrong(
            "neighbouring words to one lane",
            ((SHARE, "for (int c = lane * HEAD_DIM / 32; c < (lane + 1) * HEAD_DIM / 32; ++c) sum += dO[c] * O[c];"),),
            "limit",
            "sectors of O",
            "reads",
        ),
        Wrong("no reduction", ((REDUCE, ""),), "first", "", "lanes"),
        Wrong(
            "all lanes add to D",
            ((REDUCE, "if (lane == 0) D[row] = 0.0f;\n  __syncwarp();\n  atomicAdd(&D[row], sum);"), (STORE, "")),
            "limit",
            "atomics on D: 2,304",
            "atomics",
        ),
        Wrong("through shared memory", ((REDUCE, BY_SHARED),), "limit", "requests of shared memory", "shared"),
        Wrong("the thread, not the lane", ((SHARE, SHARE.replace("lane", "threadIdx.x")),), "first", "", "share"),
        Wrong("two words at most", ((SHARE, TWO_WORDS),), "awkward"),
        Wrong("a turn for each block", ((SHARE, SHARE.replace("+= 32", "+= 128")),), "first", "", "share"),
        Wrong(
            "fewer lanes at each step",
            ((REDUCE, REDUCE.replace("sum +=", "if (lane < mask) sum +=").replace("_xor_", "_down_")),),
            "first",
            "all 32 lanes must call",
            "mask",
        ),
        Wrong("half of the mask", ((REDUCE, REDUCE.replace("0xffffffff", "0xffff")),), "first", "", "mask"),
        Wrong("up, not down", ((REDUCE, REDUCE.replace("_xor_", "_up_")),), "first", "", "lanes"),
        Wrong("both", ((SHARE, SHARE.replace("lane;", "0;").replace("+= 32", "++")),), "first", "", "32 times"),
        Wrong("one lane too many at the end", ((SHARE, SHARE.replace("c < HEAD_DIM", "c < 64")),), "awkward"),
        Wrong(
            "one exchange too many",
            ((REDUCE, REDUCE + " __shfl_xor_sync(0xffffffff, sum, 1);"),),
            "limit",
            "shuffles",
            "shuffles",
        ),
        Right("a barrier of the warp", ((REDUCE, f"__syncwarp();\n  {REDUCE}"),)),
        Right("down", ((REDUCE, REDUCE.replace("_xor_", "_down_")),)),
        Right(
            "the smallest mask first", ((REDUCE, REDUCE.replace("16; mask > 0; mask /= 2", "1; mask < 32; mask *= 2")),)
        ),
        Right(
            "two words at a time",
            (
                (
                    SHARE,
                    "const float2 *a = (const float2*)O, *b = (const float2*)dO;\n"
                    "for (int c = lane; c < HEAD_DIM / 2; c += 32) {\n"
                    "  const float2 x = a[c], y = b[c];\n  sum += x.x * y.x + x.y * y.y;\n}",
                ),
            ),
        ),
    ),
    "08_ds": (
        Wrong("the sum of the exponentials is forgotten", ((P, "expf(softmax_scale * s)"),), "first", "dV", "P"),
        Wrong(
            "the second hole as it was",
            (("dv[c] += p * d_o[c]", "dv[c] += p"), ("dk[c] += softmax_scale * ds * q[c]", "dk[c] += ds"), (DQ, "")),
            "first",
            "dV",
            "second hole",
        ),
        Wrong("no scale in P", ((P, "expf(s - lse[row])"),), "first", "dV", "P"),
        Wrong("another scale", ((P, "expf(0.25f * s - lse[row])"),), "first", "dV", "P"),
        Wrong("P from exp / exp", ((P, "expf(softmax_scale * s) / expf(lse[row])"),), "awkward", "NaN", "large"),
        Wrong("D is left out", ((DS, "p * dp"),), "first", "dK", "dS"),
        Wrong("D is added", ((DS, "p * (dp + D[row])"),), "first", "dK", "dS"),
        Wrong("dK not scaled", (("dk[c] += softmax_scale * ds", "dk[c] += ds"),), "first", "is 4 in each", "no scale"),
        Wrong(
            "neither scaled",
            (("softmax_scale * ds", "ds"), ("softmax_scale * ds", "ds")),
            "first",
            "is 4 in each",
            "no scale",
        ),
        Wrong("scaled in ds too", ((DS, f"softmax_scale * {DS}"),), "first", "is 1/4 in each", "scale twice"),
        Wrong("dV by Q", (("p * d_o[c]", "p * q[c]"),), "first", "dV", "dV"),
        Wrong("dV by dS", (("p * d_o[c]", "ds * d_o[c]"),), "first", "dV", "dV"),
        Wrong("dK by dO", (("ds * q[c]", "ds * d_o[c]"),), "first", "dK", "dK"),
        Wrong(
            "dQ is stored", ((DQ, DQ.replace("atomicAdd(&", "*(&").replace("c], ", "c]) = (")),), "first", "dQ", "race"
        ),
        Wrong(
            "dQ without atomics", ((DQ, DQ.replace("atomicAdd(&", "*(&").replace("c], ", "c]) += (")),), "X-ray", "race"
        ),
        Wrong(
            "q and k exchanged",
            (("ds * q[c]", "ds * k[c]"), ("ds * k[c]);", "ds * q[c]);")),
            "first",
            "q and k are exchanged",
            "exchanged",
        ),
        Wrong("D by the key", ((DS, "p * (dp - D[key])"),), "first", "Which number does an index count", "bounds"),
        Wrong("dQ by the key", ((DQ, DQ.replace("row * d", "key * d")),), "first", "", "crash"),
        Wrong("dQ by P", ((DQ, DQ.replace("* ds", "* p")),), "first", "dQ", "dQ"),
        Wrong("dQ by Q", ((DQ, DQ.replace("* k[c]", "* q[c]")),), "first", "dQ", "dQ"),
        Wrong(
            "dQ twice",
            ((DQ, (DQ + "\n").replace("softmax_scale", "0.5f * softmax_scale") * 2),),
            "limit",
            "atomic",
            "limit",
        ),
        Right("exp2", ((P, "exp2f(1.4426950408889634f * (softmax_scale * s - lse[row]))"),)),
        Right(
            "the scale in ds",
            (
                ("(dp - D[row])", "(dp - D[row]) * softmax_scale"),
                ("softmax_scale * ds", "ds"),
                ("softmax_scale * ds", "ds"),
            ),
        ),
    ),
    "08_find_the_race": (
        Wrong(
            "as it was",
            ((SUM, SUM.replace("sum +=", "dQ[row * 64 + c] +=")), (ADD, "")),
            "X-ray",
            "races with write by block",
        ),
        Wrong("in a register, and still no atomics", ((ADD, "dQ[row * 64 + c] += sum;"),), "X-ray", "race", "race"),
        Wrong(
            "an atomic addition for each key",
            (
                (
                    SUM,
                    "for (int j = first; j < end; ++j)\n"
                    "      atomicAdd(&dQ[row * 64 + c], dS[row * N_kv + j] * K[j * 64 + c]);",
                ),
                (ADD, ""),
            ),
            "limit",
            "atomic additions: 131,072",
        ),
        Wrong("begins with what is there", (("float sum = 0.0f;", "float sum = dQ[row * 64 + c];"),), "first"),
        Wrong("stored as well", ((ADD, "dQ[row * 64 + c] = sum + " + ADD),), "X-ray", "race"),
        Wrong("the turn's row", ((ADD, ADD.replace("row", "i")),), "first"),
        Right("all blocks begin at row 0", (("(i + blockIdx.x * N / gridDim.x) % N", "i"),)),
        Right(
            "atomics of a block's sum, the keys from the last",
            ((SUM, SUM.replace("j = first; j < end; ++j", "j = end - 1; j >= first; --j")),),
        ),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)


def test_a_mask_that_stays_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.5")
    endless = Wrong(
        "a loop without end", ((REDUCE, REDUCE.replace("mask > 0", "mask >= 0")),), "first", "", "never ends"
    )
    check("08_delta", endless)
