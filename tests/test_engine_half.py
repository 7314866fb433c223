"""half and bfloat16 kernels against NumPy float16 and ml_dtypes bfloat16, bit for bit.

The kernels' arguments are raw bits (uint16), so the same tests run on a GPU. An H200 gave the same bits everywhere;
other GPUs may round the last bit of a transcendental function differently, so one unit is allowed there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_files import cuda_text

from helpers.device import ON_GPU, cp

SOURCE = cuda_text("engine_half")


@dataclasses.dataclass(frozen=True)
class Format:
    """One 16-bit format, with the rounding that its results are compared with."""

    name: str
    dtype: np.dtype
    header: str
    type: str
    word: str
    digits: int  # of the significand, including the implicit one
    smallest: int  # exponent of the smallest subnormal
    largest: float

    def source(self) -> str:
        text = SOURCE.replace("WORD22", f"{self.word}22").replace("WORD2", f"{self.word}2").replace("WORD", self.word)
        return text.replace("TYPE", self.type).replace("HEADER", self.header)

    def values(self, bits: np.ndarray) -> np.ndarray:
        """Return the numbers that the bits stand for, in float64."""
        return bits.view(self.dtype).astype(np.float64)

    def round(self, x: np.ndarray, how: Callable[[np.ndarray], np.ndarray] = np.rint) -> np.ndarray:
        """Round float64 numbers once to this format, as bits; all NaNs are 0x7FFF."""
        x = np.asarray(x, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - self.digits, self.smallest))
            y = np.where(np.isfinite(x), how(x / step) * step, x)
            reaches = {np.rint: True, np.trunc: False, np.ceil: x > 0, np.floor: x < 0}[how]
            over = np.isfinite(x) & (np.abs(y) > self.largest)
            y = np.where(over, np.copysign(np.where(reaches, np.inf, self.largest), x), y)
        bits = np.asarray(y).astype(np.float32).astype(self.dtype).view(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


FORMATS = [
    Format("float16", np.dtype(np.float16), "cuda_fp16.h", "__half", "half", 11, -24, 65504.0),
    Format(
        "bfloat16",
        np.dtype(ml_dtypes.bfloat16),
        "cuda_bf16.h",
        "__nv_bfloat16",
        "bfloat16",
        8,
        -133,
        float(np.ldexp(255.0, 120)),
    ),
]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy warns about NaNs
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)

ALL = np.arange(65536, dtype=np.uint16)
MODES = {"rn": np.rint, "rz": np.trunc, "ru": np.ceil, "rd": np.floor}


@functools.cache
def module(form: Format) -> Any:
    return cp.RawModule(code=form.source(), options=("-std=c++17",))


def launch(form: Format, name: str, inputs: list[np.ndarray], rows: int, dtype: Any, wrong: int = 0) -> list[Any]:
    """Run a kernel over n elements: return its rows of n results, and its counters of mismatches."""
    n = inputs[0].size
    out = cp.zeros((rows, n), dtype)
    counters = [cp.zeros(wrong, cp.uint32)] if wrong else []
    kernel = module(form).get_function(name)
    args = (*(cp.asarray(x) for x in inputs), out, *counters, np.int32(n))
    kernel(((n + 255) // 256,), (256,), args)
    return [cp.asnumpy(out), *(cp.asnumpy(c) for c in counters)]


def assert_bits(form: Format, name: str, got: np.ndarray, expected: np.ndarray, *inputs: np.ndarray) -> None:
    """Check for equal bits; where a NaN is expected, any NaN passes."""
    nan = np.isnan(form.values(expected))
    bad = np.flatnonzero(np.where(nan, ~np.isnan(form.values(got)), got != expected))
    if bad.size:
        i = bad[0]
        arguments = ", ".join(str(x[i]) for x in inputs)
        raise AssertionError(
            f"{name}({arguments}) of {form.name}: got {got[i]:#06x} ({form.values(got)[i]}), expected "
            f"{expected[i]:#06x} ({form.values(expected)[i]}); {bad.size} of {got.size} are wrong"
        )


def operands(form: Format, count: int, seed: int) -> list[np.ndarray]:
    """Return three columns of bits: every triple of some special values, and random ones of any and of similar size."""
    rng = np.random.default_rng(seed)
    one, top = int(form.round(np.array([1.0]))[0]), int(form.round(np.array([form.largest]))[0])
    least = 1 << (form.digits - 1)  # the smallest normal number
    special = [0, 1, 2, least - 1, least, least + 1, one - 1, one, one + 1, top - 1, top, top + 1, 0x7FFF]
    special = np.array(special + [v | 0x8000 for v in special], np.uint16)
    grid = [column.ravel() for column in np.meshgrid(special, special, special)]
    wild = [rng.integers(0, 65536, count // 2).astype(np.uint16) for _ in range(3)]
    near = [form.round(rng.normal(0, 1, count // 2) * 2.0 ** rng.integers(-4, 4, count // 2)) for _ in range(3)]
    return [np.concatenate(parts) for parts in zip(grid, wild, near, strict=True)]


@each_format
def test_conversion_to_float_of_every_value(form: Format) -> None:
    out = launch(form, "to_float", [ALL], 5, np.float32)[0]
    expected = form.values(ALL).astype(np.float32)
    for row in out:
        same = row.view(np.uint32) == expected.view(np.uint32)
        assert np.all(same | (np.isnan(row) & np.isnan(expected)))


@each_format
def test_conversion_from_float_in_every_mode(form: Format) -> None:
    finite = np.sort(form.values(ALL[np.isfinite(form.values(ALL))]))
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32),
            rng.normal(0, 1, 500_000).astype(np.float32),
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            np.nextafter(ties, np.float32(-np.inf)),
            form.values(ALL).astype(np.float32),
            np.float32([65519.996, 65520.0, 3.3961775e38, 3.3961773e38, np.inf, -np.inf, np.nan, -0.0]),
        ]
    )
    out = launch(form, "from_float", [x], 9, np.uint16)[0]
    expected = {mode: form.round(x, how) for mode, how in MODES.items()}
    for k, mode in enumerate(MODES):
        assert_bits(form, f"from float, {mode}", out[k], expected[mode], x)
    for k in range(4, 9):
        assert_bits(form, f"from float, form {k}", out[k], expected["rn"], x)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers too large for the type
        assert_bits(form, "astype", x.astype(form.dtype).view(np.uint16), expected["rn"], x)
    assert np.all(out[:, np.isnan(x)] == 0x7FFF)


@each_format
def test_conversion_from_double_rounds_once(form: Format) -> None:
    finite = np.sort(form.values(ALL[np.isfinite(form.values(ALL))]))
    ties = (finite[1:] + finite[:-1]) / 2
    # Through float, a double slightly above a tie would become the tie, and round the wrong way.
    x = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), [1e300, -1e-300, np.nan]])
    out = launch(form, "from_double", [x], 2, np.uint16)[0]
    if ON_GPU:  # CuPy compiles with -ftz=true: through float, the smallest numbers may become zeros
        keep = ~(np.abs(x) < 2.0**-125)
        x, out = x[keep], out[:, keep]
    for row in out:
        assert_bits(form, "from double", row, form.round(x), x)


@each_format
def test_conversion_to_integers_of_every_value(form: Format) -> None:
    out, wrong = launch(form, "to_integer", [ALL], 26, np.int64, wrong=1)
    x = form.values(ALL)
    kinds = [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
    columns = [(kind, how) for kind in kinds for how in MODES.values()] + [(np.int8, np.trunc), (np.uint8, np.trunc)]
    for k, (kind, how) in enumerate(columns):
        info = np.iinfo(kind)
        whole, highest = how(x), 2.0 ** (info.bits if info.min == 0 else info.bits - 1)
        inside = (whole >= info.min) & (whole < highest)
        expected = np.where(inside, whole, 0).astype(kind)
        expected[whole >= highest], expected[whole < info.min] = info.max, info.min
        expected[np.isnan(x)] = (1 << 63 if info.min == 0 else -(1 << 63)) if info.bits == 64 else 0
        expected = expected.astype(np.int64)
        bad = np.flatnonzero(out[k] != expected)
        assert not bad.size, (kind, how, x[bad[0]], out[k][bad[0]], expected[bad[0]])
    assert wrong[0] == 0  # a cast equals ..._rz


@each_format
def test_conversion_from_integers_in_every_mode(form: Format) -> None:
    rng = np.random.default_rng(2)
    powers = np.array([s * (2**k + d) for k in range(63) for d in (-1, 0, 1) for s in (-1, 1)], dtype=np.int64)
    shifted = rng.integers(-(2**62), 2**62, 20_000) >> rng.integers(0, 62, 20_000)
    v = np.concatenate([powers, shifted, [2**63 - 1, -(2**63), 65519, 65520, 65521, 2**40 + 2**32 + 1]])
    out, wrong = launch(form, "from_integer", [v], 24, np.uint16, wrong=1)
    for k, kind in enumerate([np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]):
        cast = v.astype(kind)
        # float64 has 53 bits. One sticky bit for the cut-off part of a 64-bit number suffices for rounding.
        magnitude = np.where(cast < 0, -cast.astype(np.float64), 0)
        exact = cast.astype(np.float64)
        if np.dtype(kind).itemsize == 8:
            magnitude = np.array([abs(int(c)) for c in cast], dtype=np.uint64)
            low = np.uint64(0xFFF)
            sticky = (magnitude & ~low) | np.where(magnitude & low, np.uint64(0x800), np.uint64(0))
            kept = np.where(magnitude >> np.uint64(52), sticky, magnitude)
            exact = np.where(cast < 0, -kept.astype(np.float64), kept.astype(np.float64))
        for j, (mode, how) in enumerate(MODES.items()):
            assert_bits(form, f"{np.dtype(kind)} {mode}", out[4 * k + j], form.round(exact, how), cast)
    assert wrong[0] == 0  # the constructor equals ..._rn


# Functions of one number. "exact" ones round correctly on a GPU too.
UNARY: list[tuple[str, Callable[[np.ndarray], np.ndarray], bool]] = [
    ("hsqrt", np.sqrt, True),
    ("hrsqrt", lambda x: 1 / np.sqrt(x), False),
    ("hrcp", lambda x: 1 / x, False),
    ("hexp", np.exp, False),
    ("hexp2", np.exp2, False),
    ("hexp10", lambda x: np.power(10.0, x), False),
    ("hlog", np.log, False),
    ("hlog2", np.log2, False),
    ("hlog10", np.log10, False),
    ("hsin", np.sin, False),
    ("hcos", np.cos, False),
    ("htanh", np.tanh, False),
    ("htrunc", np.trunc, True),
    ("hceil", np.ceil, True),
    ("hfloor", np.floor, True),
    ("hrint", np.rint, True),
    ("__hneg", np.negative, True),
    ("__habs", np.abs, True),
    ("-", np.negative, True),
    ("+", np.positive, True),
]


@each_format
def test_functions_of_every_value(form: Format) -> None:
    out, wrong = launch(form, "unary", [ALL], len(UNARY), np.uint16, wrong=len(UNARY))
    x = form.values(ALL)
    with np.errstate(all="ignore"):
        for k, (name, function, exact) in enumerate(UNARY):
            expected = form.round(function(x))
            if ON_GPU and not exact:
                got, want = form.values(out[k]), form.values(expected)
                step = np.abs(form.values(expected + np.uint16(1)) - want)
                bad = ~((got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= step))
                assert not bad.any(), (name, x[bad][:5], got[bad][:5], want[bad][:5])
            else:
                assert_bits(form, name, out[k], expected, x)
    assert not wrong.any(), [name for (name, *_), count in zip(UNARY, wrong, strict=True) if count]


def saturated(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, np.minimum(x, 1.0), 0.0)  # NaN and -0 become +0


@each_format
def test_arithmetic_of_two(form: Format) -> None:
    a, b, _ = operands(form, 200_000, seed=3)
    out, wrong = launch(form, "binary", [a, b], 22, np.uint16, wrong=22)
    x, y = form.values(a), form.values(b)
    # -0 is less than +0 here, and a NaN loses: sort by sign first, then fmax and fmin decide.
    with np.errstate(all="ignore"):
        zeros = (x == 0) & (y == 0)
        larger = np.where(zeros, np.where(np.signbit(x) & np.signbit(y), -0.0, 0.0), np.fmax(x, y))
        smaller = np.where(zeros, np.where(np.signbit(x) | np.signbit(y), -0.0, 0.0), np.fmin(x, y))
        nan = np.isnan(x) | np.isnan(y)
        basic = [x + y, x - y, x * y, x / y]
        results = [*basic, *basic[:3], *(saturated(r) for r in basic[:3]), larger, smaller]
        results += [np.where(nan, np.nan, larger), np.where(nan, np.nan, smaller), *basic, *basic]
    names = "hadd hsub hmul hdiv hadd_rn hsub_rn hmul_rn hadd_sat hsub_sat hmul_sat hmax hmin hmax_nan hmin_nan"
    names = (names + " + - * / += -= *= /=").split()
    for k, (name, result) in enumerate(zip(names, results, strict=True)):
        assert_bits(form, name, out[k], form.round(result), x, y)
    assert np.all(out[0][np.isnan(results[0])] == 0x7FFF)
    assert not wrong.any(), [name for name, count in zip(names, wrong, strict=True) if count]
    if form.name == "float16":  # NumPy's own arithmetic checks the reference once
        with np.errstate(all="ignore"):
            own = (a.view(np.float16) + b.view(np.float16)).view(np.uint16)
        assert_bits(form, "numpy +", out[0], own, x, y)


def exact_fma(form: Format, a: float, b: float, c: float) -> int:
    """Compute a * b + c in whole numbers, rounded once to nearest even, as bits."""
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        return int(form.round(np.array([a * b + c]))[0])
    top = total.numerator.bit_length() - total.denominator.bit_length()  # a power of 2, off by at most one
    exponent = max(top - form.digits, form.smallest)
    if abs(total) >= Fraction(2) ** (exponent + form.digits):
        exponent += 1
    magnitude = abs(total) / Fraction(2) ** exponent
    value = np.ldexp(float(round(magnitude)), exponent)
    return int(form.round(np.array([value if total > 0 else -value]))[0])


@each_format
def test_fused_multiply_add_rounds_once(form: Format) -> None:
    rng = np.random.default_rng(4)
    a, b, c = (column[::3] for column in operands(form, 8_000, seed=5))
    # The hard cases: a product that is a tie, and an addend so small that even float64 would lose it.
    values = form.values(ALL)
    odd = 2.0 ** (form.digits - 1) + 2 * rng.integers(0, 2 ** (form.digits - 2), 5_000) + 1
    x, y = odd, np.full(odd.size, 1.5)  # odd * 1.5 needs one bit more than the format has
    x, y = np.concatenate([x, x[:1000] / 4]), np.concatenate([y, y[:1000]])
    tiny = values[(np.abs(values) < 2.0**-10) & (values != 0)]
    z = rng.choice(tiny, x.size)
    columns = [np.concatenate(pair) for pair in zip((a, b, c), map(form.round, (x, y, z)), strict=True)]
    out, wrong = launch(form, "ternary", columns, 3, np.uint16, wrong=3)
    p, q, r = map(form.values, columns)
    with np.errstate(all="ignore"):
        simple = p * q + r
    expected = form.round(simple)
    for i in np.flatnonzero(np.isfinite(simple)):
        expected[i] = exact_fma(form, p[i], q[i], r[i])
    assert_bits(form, "hfma", out[0], expected, p, q, r)
    result = form.values(expected)
    assert_bits(form, "hfma_sat", out[1], form.round(saturated(result)), p, q, r)
    relu = np.where(result <= 0, 0.0, result)
    assert_bits(form, "hfma_relu", out[2], form.round(relu), p, q, r)
    assert not wrong.any()
    if form.name == "bfloat16":  # the cases are hard: float64 alone gets some of them wrong
        assert np.any(form.round(simple) != expected)


@each_format
def test_comparisons(form: Format) -> None:
    a, b, _ = operands(form, 20_000, seed=6)
    b[-5000:] = a[-5000:]
    out, wrong = launch(form, "compare", [a, b], 1, np.uint32, wrong=12)
    x, y = form.values(a), form.values(b)
    ordered = [x == y, (x < y) | (x > y), x < y, x <= y, x > y, x >= y]
    either = np.isnan(x) | np.isnan(y)
    operators = [x == y, x != y, x < y, x <= y, x > y, x >= y]
    inf = [x == np.inf, x == -np.inf]
    columns = [*ordered, *(o | either for o in ordered), *operators, *operators, np.isnan(x), *inf, np.isnan(x), x != 0]
    for k, column in enumerate(columns):
        bad = np.flatnonzero((out[0] >> k & 1) != column)
        assert not bad.size, (k, x[bad[0]], y[bad[0]])
    assert not wrong.any()


@each_format
def test_pairs_shuffles_and_atomics(form: Format) -> None:
    rng = np.random.default_rng(7)
    bits = form.round(rng.normal(0, 1, 32))
    out, lanes = cp.zeros(30, np.uint16), cp.zeros(224, np.uint16)
    sums = cp.zeros(4, cp.float16)  # only the bits matter: zeros
    if not ON_GPU:
        sums = cp.zeros(4, form.dtype)
    module(form).get_function("pairs")((1,), (32,), (cp.asarray(bits), out, lanes, sums[:1], sums[2:]))
    v = [float(x) for x in form.values(bits)]
    w, x, y, z = (int(b) for b in bits[:4])
    parts = [w, w, w, y, w, y, x, z, w, w, x, x, x, w, w, x, z, y, w, x]

    def rounded(*values: float) -> list[int]:
        return [int(b) for b in form.round(np.array(values))]

    up = form.values(form.round(np.array(v[:2]) + 1))
    twice = form.values(form.round(up + 1))
    down = form.values(form.round(twice - 1))
    parts += [w, x, *rounded(*twice), *rounded(*twice), *rounded(*(down - 1))]
    first = form.values(np.array([exact_fma(form, v[0], v[2], v[0]), exact_fma(form, v[0], v[3], v[1])], np.uint16))
    parts += [exact_fma(form, -v[1], v[3], first[0]), exact_fma(form, v[1], v[2], first[1])]
    assert cp.asnumpy(out).tolist() == parts

    lane = np.arange(32)
    expected = [
        bits[np.full(32, 5)],
        bits[np.maximum(lane - 1, 0)],
        bits[np.where(lane + 2 > 31, lane, lane + 2)],
        bits[lane ^ 7],
        bits[31 - (lane ^ 16)],
        bits[lane // 8 * 8 + 3],
        bits[31 - lane],
    ]
    assert np.array_equal(cp.asnumpy(lanes).reshape(7, 32), expected)
    total = cp.asnumpy(sums).view(np.uint16)
    assert form.values(total)[[0, 2, 3]].tolist() == [32.0, 32.0, 64.0]


LIMITS = r"""
#include <cuda/std/limits>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename T> __device__ void ask(float *out) {
  typedef cuda::std::numeric_limits<T> limits;
  out[0] = limits::max(), out[1] = limits::lowest(), out[2] = limits::min(), out[3] = limits::epsilon();
  out[4] = limits::denorm_min(), out[5] = limits::infinity(), out[6] = limits::quiet_NaN();
  out[7] = limits::digits, out[8] = limits::max_exponent, out[9] = limits::min_exponent;
}
extern "C" __global__ void limits(float *half_out, float *bfloat_out) {
  ask<__half>(half_out), ask<__nv_bfloat16>(bfloat_out);
}
// A type may be compiled without its conversions and operators, as large libraries do.
extern "C" __global__ void functions(const half *in, half *out, __nv_bfloat16 *sum) {
  out[0] = __hadd(in[0], in[1]);
  atomicAdd(sum, __float2bfloat16(1.5f));
}
"""


def test_limits_and_the_switches_that_turn_operators_off() -> None:
    off = [f"-D__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF2_OPERATORS", "BFLOAT16_OPERATORS")]
    limits = cp.RawModule(code=LIMITS, options=("-std=c++17", *off))
    outs = [cp.zeros(10, np.float32) for _ in FORMATS]
    limits.get_function("limits")((1,), (1,), tuple(outs))
    for form, out in zip(FORMATS, outs, strict=True):
        info = ml_dtypes.finfo(form.dtype)
        names = ("max", "min", "smallest_normal", "eps", "smallest_subnormal")
        expected = [float(getattr(info, name)) for name in names]
        got = cp.asnumpy(out).tolist()
        assert got[:5] == expected
        assert got[5] == np.inf and np.isnan(got[6])
        assert got[7:] == [form.digits, info.maxexp, info.minexp + 1]


@pytest.mark.skipif(ON_GPU, reason="CuPy does not look at the types of arguments")
def test_the_engine_knows_the_types_of_the_arguments() -> None:
    kernel = cp.RawModule(code=LIMITS, options=()).get_function("functions")
    a, out = cp.asarray(np.float16([1.0, 2.0])), cp.zeros(1, np.float16)
    total = cp.zeros(1, cp.bfloat16)
    kernel((1,), (3,), (a, out, total))
    assert float(out[0]) == 3.0
    assert float(total[0]) == 4.5
    with pytest.raises(TypeError, match=r"dtype is float32, the kernel reads float16"):
        kernel((1,), (1,), (cp.zeros(2, np.float32), out, total))
    with pytest.raises(TypeError, match=r"dtype is float16, the kernel reads bfloat16"):
        kernel((1,), (1,), (a, out, out))


PORTABLE = r"""
#include <cuda_fp16.h>
extern "C" __global__ void both_ways(const float *in, unsigned short *out, const unsigned short *half_in,
                                     float *half_out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = __half_as_ushort(__float2half(in[i]));
  if (i < 65536) half_out[i] = __half2float(__ushort_as_half(half_in[i]));
}
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU converts in hardware")
def test_a_processor_without_half_conversions_gives_the_same_bits() -> None:
    form = FORMATS[0]
    kernel = cp.RawModule(code=PORTABLE, options=("-U__F16C__",)).get_function("both_ways")
    x = np.random.default_rng(8).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    x[::2] = np.float32(2.0) ** (x.view(np.uint32)[::2] % 50 - 28.0) * (1 + x.view(np.uint32)[::2] // 2**21 / 2**11)
    out, wide = cp.zeros(x.size, np.uint16), cp.zeros(65536, np.float32)
    kernel(((x.size + 255) // 256,), (256,), (cp.asarray(x), out, cp.asarray(ALL), wide, np.int32(x.size)))
    with np.errstate(over="ignore"):
        assert_bits(form, "integer code", cp.asnumpy(out), x.astype(np.float16).view(np.uint16), x)
    wide, expected = cp.asnumpy(wide), ALL.view(np.float16).astype(np.float32)
    assert np.all((wide.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(wide) & np.isnan(expected)))


@pytest.mark.skipif(ON_GPU, reason="the message is the engine's")
def test_what_a_gpu_refuses_is_refused() -> None:
    code = '#include <cuda_fp16.h>\nextern "C" __global__ void k(half *x) {\n  x[0] = x[1] * 2.0f;\n}\n'
    with pytest.raises(cp.CompileError, match=r"kernel\.cu:3: error: .*ambiguous"):
        cp.RawModule(code=code).compile()
