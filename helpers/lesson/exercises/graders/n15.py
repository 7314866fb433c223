"""Graders of notebooks 15 and 15b: a float in two parts for tensor cores, a tile's scale, three products."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import FIRST, Trial, exercise

# Calls the learner's function for the parts of every number.
PARTS = """
extern "C" __global__ void parts(const float* x, unsigned* bits) {
  split(x[threadIdx.x], bits[2 * threadIdx.x], bits[2 * threadIdx.x + 1]);
}
"""
EXPONENTS = """
extern "C" __global__ void exponents(const float* largest, int* exponent) {
  exponent[threadIdx.x] = tile_exponent(largest[threadIdx.x]);
}
"""
SEEN = np.uint32(0xFFFFE000)  # the bits of a float that a tensor core reads


@exercise("15_split", minutes=10)
def split(trial: Trial) -> None:
    """Test the function alone first, because its hi and lo show what is wrong; then the whole kernel."""
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
        # Three products, exactly summed, have an error of 2^-23 of this sum; summed in float32, of 2^-20. Two have
        # 2^-15.
        tolerance = 2.0**-19 * float((np.abs(q) @ np.abs(k.T)).max())
        trial.expect("S", s, expected, tolerance=tolerance, symptom="products")
    if trial.report:
        trial.limit("TF32 products", trial.report.tensor_flop // (2 * 16 * 8 * 8), exactly=3 * 64 // 8)


@exercise("15_scaled_tiles", minutes=10, notebook="15b")
def scaled_tiles(trial: Trial) -> None:
    """Test the exponents alone first, then products of tiles that fp16 cannot represent without scaling."""
    largest = np.array([1.0, 1.9, 0.75, 3e-12, 5e9, 1e-30, 65504.0, 2.0**-14], dtype=np.float32)
    exponent = trial.empty(len(largest), dtype=np.int32)
    sizes = (16, 8, 2.0**-30, 2.0**20), (33, 13, 2.0**24, 2.0**-40), (1, 1, 1.0, 1.0)
    for n, n_kv, q_size, k_size in trial.sizes("N, N_kv, size of Q, of K", *sizes):
        if n == 16:
            trial.launch("exponents", 1, len(largest), largest, exponent, extra=EXPONENTS)
            symptom, reason = _wrong_exponent(largest, trial.xp.asnumpy(exponent))
            if symptom:
                trial.rows[FIRST].fail([reason], symptom)
                continue
        q, k, _ = trial.inputs(n, n_kv, 64)
        q, k = q * np.float32(q_size), k * np.float32(k_size)
        s, expected = trial.empty(n, n_kv), product(q, k.T)
        trial.launch("scores", (blocks(n, 16), blocks(n_kv, 8)), 32, q, k, s, n, n_kv)
        tolerance = 2.0**-19 * float((np.abs(q) @ np.abs(k.T)).max())  # as with TF32
        with np.errstate(all="ignore"):  # unwritten elements are poisoned; a single score may be 0
            off = np.abs(trial.xp.asnumpy(s).astype(np.float64)).sum() / np.abs(expected).sum()
        symptom = "products" if 0.5 < off < 2 else "scale"
        trial.expect("S", s, expected, tolerance=tolerance, symptom=symptom)
    if trial.report:
        trial.limit("fp16 products", trial.report.tensor_flop // (2 * 16 * 8 * 16), exactly=3 * 64 // 16)


def _wrong_exponent(largest: np.ndarray, exponent: np.ndarray) -> tuple[str, str]:
    """Return the symptom and the reason of the first wrong exponent; ("", "") if there is none."""
    right = 15 - np.frexp(largest)[1]  # frexp returns a mantissa from 0.5 to 1
    if np.array_equal(exponent, right):
        return "", ""
    off = exponent - right
    if np.abs(off).max() <= 1:
        symptom = "step"
    elif np.array_equal(exponent, -right) or np.ptp(exponent + right) == 0:
        symptom = "sign"
    elif np.ptp(off) == 0:
        symptom = "bias"
    else:
        symptom = "exponent"
    i = np.flatnonzero(off)[0]
    reached = np.log2(np.float64(largest[i])) + exponent[i]
    return symptom, f"largest = {largest[i]:.6g}: with exponent {exponent[i]} it becomes 2^{reached:.1f}"


def _numbers() -> np.ndarray:
    """Generate numbers of both signs and many magnitudes."""
    rng = np.random.default_rng(15)
    return (rng.standard_normal(64) * 4.0 ** rng.integers(-8, 8, 64)).astype(np.float32)


def _wrong_part(x: np.ndarray, bits: np.ndarray) -> tuple[str, str]:
    """Return the symptom and the reason of the first number with wrong parts; ("", "") if there is none."""
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
