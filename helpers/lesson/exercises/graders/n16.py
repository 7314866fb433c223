"""Graders of notebook 16: how many bits a tensor core keeps, and which key goes to which place."""

from __future__ import annotations

import re

import numpy as np

from helpers.attention.fp8 import E4M3, dequantise, quantise
from helpers.lesson.exercises.trial import AWKWARD, FIRST, Trial, exercise

# Adds exactly, then keeps BITS bits of the sum; a and b are rounded to e4m3, as a tensor core's operands are.
ADDER = """
struct Adder {
  int bits, cuts;
  __device__ static float rounded(float x) {
    const float step = ldexpf(1.0f, max(ilogbf(x), -6) - 3);
    return fminf(rintf(x / step) * step, 448.0f);
  }
  __device__ float operator()(float a, float b) const {
    const float last = ldexpf(1.0f, -bits), sum = (1.0f + rounded(a) * rounded(b)) / last;
    return (cuts ? floorf(sum) : rintf(sum)) * last;
  }
};
extern "C" __global__ void __launch_bounds__(128) other(int* answers, int bits, int cuts) {
  const Adder sum{bits, cuts};
  const int kept = bits_kept(sum);
  const bool cut = truncates(sum, kept);
  if (threadIdx.x == 0) answers[0] = kept, answers[1] = cut;
}
"""
TENSOR_CORE = "the tensor core"
ADDERS = {  # name -> (bits kept, whether it truncates)
    TENSOR_CORE: (13, True),
    "one that keeps 10 bits and rounds": (10, False),
    "one that keeps 14 bits and truncates": (14, True),
    "one that keeps 13 bits and rounds": (13, False),
    "one that keeps 7 bits and truncates": (7, True),
}
MOST_PRODUCTS = 24


@exercise("16_kept_bits", minutes=10, only_cc=90)
def kept_bits(trial: Trial) -> None:
    """Test the learner's functions with the tensor core, then with adders that keep other numbers of bits."""
    for name in trial.sizes("adder", *ADDERS):
        bits, cuts = ADDERS[name]
        answers = trial.empty(2, dtype=np.int32)
        if name == TENSOR_CORE:
            trial.launch("probe", 1, 128, answers)
        else:
            trial.launch("other", 1, 128, answers, bits, int(cuts), extra=ADDER)
        kept, cut = map(int, trial.xp.asnumpy(answers))
        row = trial.rows[FIRST if name == TENSOR_CORE else AWKWARD]
        if kept != bits:
            wrong, comes_out = (kept, "as 1") if kept > bits else (kept + 1, "as more than 1")
            told = f"of {name}, bits_kept says {kept}, but 1 + 2^-{wrong} comes out {comes_out}"
            symptom = "few" if kept == 0 else "factors" if kept == 9 else "one off" if abs(kept - bits) == 1 else ""
            row.fail([told], symptom or ("many" if kept > bits else "few"))
        elif cut != cuts:
            row.fail([f"of {name}, bits_kept is right; truncates says {bool(cut)}"], "half" if cuts else "rounds")
        trial.expect("answers", answers, np.array([bits, cuts], np.int32), tolerance=0)
    if trial.report:
        products = sum(event.kind == "product" for event in trial.report.events)
        trial.limit("products", products, at_most=MOST_PRODUCTS)


ORDER = """
extern "C" __global__ void order(int* keys, unsigned* numbers) {
  keys[threadIdx.x] = key_at(threadIdx.x);
  float p[16];
  for (int i = 0; i < 16; ++i) p[i] = i;
  for (int i = 0; i < 4; ++i) numbers[4 * threadIdx.x + i] = operand(p, i);
}
"""


@exercise("16_order_of_keys", minutes=15, only_cc=90)
def order_of_keys(trial: Trial) -> None:
    """Compare the two functions first: any order passes if both use it. Then test the product."""
    first = (64, 32)
    for n, n_kv in trial.sizes("N, N_kv", first, (33, 21), (1, 1)):
        if (n, n_kv) == first:
            symptom, reason = _wrong_order(trial)
            if symptom:
                trial.rows[FIRST].fail([reason], symptom)
        p, v = np.abs(trial.rng.standard_normal((n, n_kv))), trial.rng.standard_normal((n_kv, 16)) + 0.5
        p8, v8 = quantise(64 * p), quantise(v)
        o = trial.empty(n, 16)
        trial.launch("one_tile", 1, 128, dequantise(p8), v8, o, n, n_kv)
        p, v = dequantise(p8, dtype=np.float64), dequantise(v8, dtype=np.float64)
        # Each of 32 addends and the sum loses at most 2^-13 of the largest; a product may reach twice its power of two.
        tolerance = 2.0**-6 * float((p[:, :, None] * np.abs(v)).max())
        trial.expect("O", o, p @ v, tolerance=tolerance)
    if trial.report:
        trial.limit("shuffles", len(re.findall(r"__shfl\w*", trial.plain)), exactly=0)
        trial.limit("bytes written to shared memory", trial.shared().written, exactly=16 * 32)


def _wrong_order(trial: Trial) -> tuple[str, str]:
    """Return the symptom and the reason of the first place where the functions differ; ("", "") if there is none."""
    keys, packed = trial.empty(32, dtype=np.int32), trial.empty(32, 4, dtype=np.uint32)
    trial.launch("order", 1, 32, keys, packed, extra=ORDER)
    keys = trial.xp.asnumpy(keys)
    numbers = np.ascontiguousarray(trial.xp.asnumpy(packed)).view(E4M3).astype(np.float32).reshape(32, 4, 4)
    taken = {}
    for lane, i, byte in np.ndindex(32, 4, 4):
        t, place = lane % 4, i // 2 * 16 + lane % 4 * 4 + byte
        number = numbers[lane, i, byte]
        if number not in range(16):
            return "numbers", f"byte {byte} of a[{i}] is none of the thread's 16 numbers"
        j, e = divmod(int(number), 4)
        if e // 2 != i % 2:
            return "rows", f"byte {byte} of a[{i}] is p[{4 * j + e}], of row g{' + 8' * (e // 2)}"
        key = 8 * j + 2 * t + e % 2
        if taken.setdefault(place, key) != key:
            return "lanes", f"at place {place}, thread {lane} has key {key}, and others key {taken[place]}"
    for place, key in sorted(taken.items()):
        if list(taken.values()).count(key) > 1:
            return "twice", f"key {key} takes more than one place, {place} among them"
        if keys[place] != key:
            return "order", f"place {place} has key {key} of P, and key_at({place}) is {keys[place]}"
    return "", ""
