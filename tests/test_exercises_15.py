"""Typical answers to the exercise of notebook 15: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

HI, LO = "hi = (__float_as_uint(x) + 0x1000) & 0xffffe000;", "lo = __float_as_uint(x - __uint_as_float(hi));"
LO_HI, HI_LO, HI_HI = "    mma(d, a_lo, b_hi);\n", "    mma(d, a_hi, b_lo);\n", "    mma(d, a_hi, b_hi);\n"
CVT = 'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));'

TABLE = {
    "15_split": (
        Wrong(
            "as it was",
            ((HI, "hi = __float_as_uint(x);"), (LO, "lo = 0;"), (LO_HI, ""), (HI_LO, "")),
            "first",
            "hi is 0x",
            "bits",
        ),
        Wrong("truncated hi", ((HI, "hi = __float_as_uint(x) & 0xffffe000;"),), "first", "hi is 0x", "truncated"),
        Wrong("half a step, and all bits", ((HI, "hi = __float_as_uint(x) + 0x1000;"),), "first", "hi is 0x", "bits"),
        Wrong("12 bits cleared", ((HI, "hi = (__float_as_uint(x) + 0x800) & 0xfffff000;"),), "first", "", "bits"),
        Wrong("14 bits cleared", ((HI, "hi = (__float_as_uint(x) + 0x2000) & 0xffffc000;"),), "first", "", "hi"),
        Wrong("a whole step added", ((HI, "hi = (__float_as_uint(x) + 0x2000) & 0xffffe000;"),), "first", "", "hi"),
        Wrong(
            "cleared, then rounded", ((HI, "hi = (__float_as_uint(x) & 0xffffe000) + 0x1000;"),), "first", "", "bits"
        ),
        Wrong("a whole number", ((HI, "hi = __float_as_uint(rintf(x));"),), "first", "hi is 0x", "hi"),
        Wrong(
            "one bit cleared", ((HI, "hi = (__float_as_uint(x) + 0x1000) & ~0x2000u;"),), "first", "hi is 0x", "bits"
        ),
        Wrong("lo as a whole number", ((LO, "lo = (unsigned)(x - __uint_as_float(hi));"),), "first", "", "lo"),
        Wrong("the bits that were cleared", ((LO, "lo = __float_as_uint(x) & 0x1fff;"),), "first", "", "lo"),
        Wrong("the rest of a whole number", ((LO, "lo = __float_as_uint(x - (float)hi);"),), "first", "", "lo"),
        Wrong("a product twice", ((HI_LO, LO_HI),), "first", "S", "products"),
        Wrong("lo lo in place of lo hi", ((LO_HI, "    mma(d, a_lo, b_lo);\n"),), "first", "S", "products"),
        Wrong("no lo", ((LO, "lo = 0;"),), "first", "lo 0", "lo"),
        Wrong("lo is hi", ((LO, "lo = hi;"),), "first", "", "lo"),
        Wrong("a difference of bits", ((LO, "lo = __float_as_uint(x) - hi;"),), "first", "", "lo"),
        Wrong("the other sign", ((LO, "lo = __float_as_uint(__uint_as_float(hi) - x);"),), "first", "", "lo"),
        Wrong("one product", ((LO_HI, ""), (HI_LO, "")), "first", "S", "products"),
        Wrong("lo of Q dropped", ((LO_HI, ""),), "first", "S", "products"),
        Wrong("lo of K dropped", ((HI_LO, ""),), "first", "S", "products"),
        Wrong("hi used twice", ((LO_HI, HI_HI),), "first", "S", "products"),
        Wrong("all four", ((LO_HI, "    mma(d, a_lo, b_lo);\n" + LO_HI),), "limit", "TF32 products: 32", "limit"),
        Right("large ones first", ((HI_HI, ""), (LO_HI, HI_HI + LO_HI))),
        Right("hi by cvt.rna", ((HI, CVT),)),
        Right(
            "lo rounded, too",
            ((LO, LO + " lo = (lo + 0x1000) & 0xffffe000;"),),
        ),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
