"""Typical answers to the exercises of notebooks 15 and 15b: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

HI, LO = "hi = (__float_as_uint(x) + 0x1000) & 0xffffe000;", "lo = __float_as_uint(x - __uint_as_float(hi));"
LO_HI, HI_LO, HI_HI = "    mma(d, a_lo, b_hi);\n", "    mma(d, a_hi, b_lo);\n", "    mma(d, a_hi, b_hi);\n"
CVT = 'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));'
EXPONENT = "exponent = 14 + 127 - (int)(__float_as_uint(largest) >> 23);"
UNDO = "s *= power_of_two(-q_exponent) * power_of_two(-k_exponent);"
MMA = "    mma_m16n8k16(__half(), d, {}, {}[0], {}[1]);\n"
A_LO, B_LO, BOTH_HI = (MMA.format(a, b, b) for a, b in (("a_lo", "b_hi"), ("a_hi", "b_lo"), ("a_hi", "b_hi")))
BOTH_LO = MMA.format("a_lo", "b_lo", "b_lo")


def exponent(text: str) -> tuple[tuple[str, str]]:
    """Return the edit that computes the exponent differently."""
    return ((EXPONENT, f"exponent = {text};"),)


E = "(int)(__float_as_uint(largest) >> 23) - 127"

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
        Wrong("12 bits cleared", ((HI, "hi = (__float_as_uint(x) + 0x800) & 0xfffff000;"),), "first", "", "bits"),
        Wrong("14 bits cleared", ((HI, "hi = (__float_as_uint(x) + 0x2000) & 0xffffc000;"),), "first", "", "hi"),
        Wrong("a whole number", ((HI, "hi = __float_as_uint(rintf(x));"),), "first", "hi is 0x", "hi"),
        Wrong("lo as a whole number", ((LO, "lo = (unsigned)(x - __uint_as_float(hi));"),), "first", "", "lo"),
        Wrong("a product twice", ((HI_LO, LO_HI),), "first", "S", "products"),
        Wrong("lo lo in place of lo hi", ((LO_HI, "    mma(d, a_lo, b_lo);\n"),), "first", "S", "products"),
        Wrong("no lo", ((LO, "lo = 0;"),), "first", "lo 0", "lo"),
        Wrong("all four", ((LO_HI, "    mma(d, a_lo, b_lo);\n" + LO_HI),), "limit", "TF32 products: 32", "limit"),
        Right("large ones first", ((HI_HI, ""), (LO_HI, HI_HI + LO_HI))),
        Right("hi by cvt.rna", ((HI, CVT),)),
        Right(
            "lo rounded, too",
            ((LO, LO + " lo = (lo + 0x1000) & 0xffffe000;"),),
        ),
    ),
    "15_scaled_tiles": (
        Wrong("as it was", ((EXPONENT, ""), (A_LO, ""), (B_LO, ""), (UNDO, "")), "first", "exponent 0", "exponent"),
        Wrong("the other sign", exponent(f"{E} - 14"), "first", "largest =", "sign"),
        Wrong("the bits as they are", exponent("14 - (int)(__float_as_uint(largest) >> 23)"), "first", "", "bias"),
        Wrong("e itself", exponent(E), "first", "", "sign"),
        Wrong("e undone, and no more", exponent(f"-({E})"), "first", "", "bias"),
        Wrong("up to 2^16", exponent(f"15 - ({E})"), "first", "", "step"),
        Wrong("up to 2^14", exponent(f"13 - ({E})"), "first", "", "step"),
        Wrong("of a sum", exponent("14 - (int)(largest * 64)"), "first", "", "exponent"),
        Wrong("never undone", ((UNDO, ""),), "first", "S", "scale"),
        Wrong("undone for Q", ((UNDO, "s *= power_of_two(-q_exponent);"),), "first", "S", "scale"),
        Wrong("one product", ((A_LO, ""), (B_LO, "")), "first", "S", "products"),
        Wrong("lo of Q dropped", ((A_LO, ""),), "first", "S", "products"),
        Wrong("hi hi twice", ((A_LO, BOTH_HI),), "first", "S"),
        Wrong("all four", ((A_LO, BOTH_LO + A_LO),), "limit", "fp16 products: 16", "limit"),
        Right("large ones first", ((BOTH_HI, ""), (A_LO, BOTH_HI + A_LO))),
        Right("by log2f", exponent("14 - (int)floorf(log2f(largest))")),
        Right("by ilogbf", exponent("14 - ilogbf(largest)")),
        Right("a negative sum", ((UNDO, "s *= power_of_two(-q_exponent - k_exponent);"),)),
        Right("by ldexpf", ((UNDO, "s = ldexpf(s, -q_exponent - k_exponent);"),)),
        Right("divided", ((UNDO, "s = s / power_of_two(q_exponent) / power_of_two(k_exponent);"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)
