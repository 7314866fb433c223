"""The exercise of notebook 15: a float in two parts for tensor cores, and the three products that are needed."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise

# Asks the learner's function for the parts of every number.
PARTS = """
extern "C" __global__ void parts(const float* x, unsigned* bits) {
  split(x[threadIdx.x], bits[2 * threadIdx.x], bits[2 * threadIdx.x + 1]);
}
"""
SEEN = np.uint32(0xFFFFE000)  # the bits of a float at which a tensor core looks


@exercise(
    "15_split",
    minutes=10,
    hints={
        "bits": (
            "hi still has bits that the tensor core ignores, so lo leaves them out, too. How are the last 13 cleared?",
            "An and with a mask whose last 13 bits are 0: 0xffffe000. For the nearest number, what comes before it?",
        ),
        "truncated": (
            "hi is cut off, not rounded: it can be a whole step of 2^13 in the bits below x.",
            "To round to the nearest, add half a step before the last bits are cleared.",
            "Half a step is 0x1000: hi = (__float_as_uint(x) + 0x1000) & 0xffffe000.",
        ),
        "hi": (
            "hi is not the nearest number whose last 13 bits are 0. Which operations on its bits make it?",
            "Add half of the last step that stays, 0x1000, then clear 13 bits: & 0xffffe000.",
        ),
        "lo": (
            "hi is right. hi and lo, both as floats, have to add up to x.",
            "lo = __float_as_uint(x - __uint_as_float(hi)): a difference of floats, then its bits.",
        ),
        "products": (
            "The parts are right. Of (hi + lo) (hi + lo), one product of four may be left out: which is the smallest?",
            "a_lo b_hi and a_hi b_lo are both needed: leaving one out loses the lower half of Q, or of K.",
            "mma(d, a_lo, b_hi); mma(d, a_hi, b_lo); mma(d, a_hi, b_hi);",
        ),
        "limit": "lo lo is at most 2^-22 of hi hi: a float32 hardly holds it. Leave it out.",
    },
)
def split(trial: Trial) -> None:
    """Test the function alone first, whose hi and lo show what is wrong; then the whole kernel."""
    first, keys = 16, 8
    numbers = _numbers()
    bits = trial.empty(len(numbers), 2, dtype=np.uint32)
    for n, n_kv in trial.sizes("N, N_kv", (first, keys), (33, 13), (1, 1)):
        if n == first:
            trial.launch("parts", 1, len(numbers), numbers, bits, extra=PARTS)
            symptom, reason = _wrong_part(numbers, trial.xp.asnumpy(bits))
            if symptom:
                trial.rows[FIRST].fail([reason], symptom)
                continue
        q, k, _ = trial.inputs(n, n_kv, 64)
        s, expected = trial.empty(n, n_kv), product(q, k.T)
        trial.launch("scores", (blocks(n, 16), blocks(n_kv, 8)), 32, q, k, s, n, n_kv)
        # Three products, exactly summed, miss by 2^-23 of this sum; summed in float32, by 2^-20. Two miss by 2^-15.
        tolerance = 2.0**-19 * float((np.abs(q) @ np.abs(k.T)).max())
        trial.expect("S", s, expected, tolerance=tolerance, symptom="products")
    if trial.report:
        trial.limit("TF32 products", trial.report.tensor_flop // (2 * 16 * 8 * 8), exactly=3 * 64 // 8)


def _numbers() -> np.ndarray:
    """Make numbers of both signs and many magnitudes."""
    rng = np.random.default_rng(15)
    return (rng.standard_normal(64) * 4.0 ** rng.integers(-8, 8, 64)).astype(np.float32)


def _wrong_part(x: np.ndarray, bits: np.ndarray) -> tuple[str, str]:
    """Return the symptom and the reason of the first number with wrong parts; two times "" if all are right."""
    hi, lo = np.ascontiguousarray(bits.T)
    nearest = (x.view(np.uint32) + np.uint32(0x1000)) & SEEN
    for i, number in enumerate(x):
        if hi[i] != nearest[i]:
            what = "bits" if hi[i] & ~SEEN else "truncated" if hi[i] == x.view(np.uint32)[i] & SEEN else "hi"
            seen = f"of x = {float(number)!r} = {_hex(x.view(np.uint32)[i])}, hi is {_hex(hi[i])}"
            return what, f"{seen}; the nearest with 13 zeros at its end: {_hex(nearest[i])}"
        rest, got = (np.float64(a.view(np.float32)[i]) for a in (hi, np.ascontiguousarray(lo & SEEN)))
        if not abs(np.float64(number) - rest - got) <= 2.0**-22 * abs(np.float64(number)):
            at = f"of x = {float(number)!r}, hi is {rest:.9g}"
            return "lo", f"{at}, lo {float(lo.view(np.float32)[i]):.9g}, not {np.float64(number) - rest:.9g}"
    return "", ""


def _hex(bits: np.uint32) -> str:
    return f"0x{int(bits):08x}"
