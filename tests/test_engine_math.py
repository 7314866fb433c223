"""Mathematical functions, intrinsics, bits, conversions and vector types of the CPU engine, against NumPy and math."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

erf, erfc = np.vectorize(math.erf), np.vectorize(math.erfc)


def bessel(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Average f(x, angle) over half a turn: Bessel's integrals. The trapezoid rule is exact for periodic functions."""
    angle = (np.arange(4000) + 0.5) * np.pi / 4000
    return f(x[..., None], angle).mean(-1)


# name: (NumPy in float64, lower and upper limit of inputs). With a trailing f, in float.
REAL: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    "exp": (np.exp, -80, 80),
    "exp2": (np.exp2, -100, 100),
    "exp10": (lambda x: 10.0**x, -30, 30),
    "expm1": (np.expm1, -5, 5),
    "log": (np.log, 1e-6, 1e6),
    "log2": (np.log2, 1e-6, 1e6),
    "log10": (np.log10, 1e-6, 1e6),
    "log1p": (np.log1p, -0.9, 100),
    "sqrt": (np.sqrt, 0, 1e6),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-6, 1e6),
    "cbrt": (np.cbrt, -100, 100),
    "rcbrt": (lambda x: 1 / np.cbrt(x), 0.1, 100),
    "sin": (np.sin, -50, 50),
    "cos": (np.cos, -50, 50),
    "tan": (np.tan, -1.5, 1.5),
    "sinpi": (lambda x: np.sin(np.pi * np.remainder(x, 2)), -9, 9),
    "cospi": (lambda x: np.cos(np.pi * np.remainder(x, 2)), -9, 9),
    "asin": (np.arcsin, -1, 1),
    "acos": (np.arccos, -1, 1),
    "atan": (np.arctan, -20, 20),
    "sinh": (np.sinh, -10, 10),
    "cosh": (np.cosh, -10, 10),
    "tanh": (np.tanh, -5, 5),
    "asinh": (np.arcsinh, -50, 50),
    "acosh": (np.arccosh, 1, 50),
    "atanh": (np.arctanh, -0.99, 0.99),
    "erf": (erf, -4, 4),
    "erfc": (erfc, -4, 4),
    "erfcx": (lambda x: np.exp(x * x) * erfc(x), -3, 9),
    "normcdf": (lambda x: 0.5 * erfc(-x / math.sqrt(2)), -5, 5),
    "tgamma": (np.vectorize(math.gamma), 0.1, 20),
    "lgamma": (np.vectorize(math.lgamma), 0.1, 50),
    "j0": (lambda x: bessel(lambda x, a: np.cos(x * np.sin(a)), x), 0, 20),
    "j1": (lambda x: bessel(lambda x, a: np.cos(a - x * np.sin(a)), x), 0, 20),
    "cyl_bessel_i0": (lambda x: bessel(lambda x, a: np.exp(x * np.cos(a)), x), -10, 10),
    "cyl_bessel_i1": (lambda x: bessel(lambda x, a: np.exp(x * np.cos(a)) * np.cos(a), x), -10, 10),
    "fabs": (np.abs, -9, 9),
    "ceil": (np.ceil, -9, 9),
    "floor": (np.floor, -9, 9),
    "trunc": (np.trunc, -9, 9),
    "rint": (np.rint, -9, 9),
    "nearbyint": (np.rint, -9, 9),
    "round": (lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), -9, 9),
    "logb": (lambda x: np.floor(np.log2(np.abs(x))), 0.01, 1e5),
}
# In double the expected value itself has an error of more than a few units.
WIDE = {"j0", "j1", "cyl_bessel_i0", "cyl_bessel_i1", "tgamma", "lgamma", "erfcx"}
# Inverses are tested with their functions: erf(erfinv(x)) is x.
INVERSES = {
    "erfinv": (erf, -0.999, 0.999),
    "erfcinv": (erfc, 1e-3, 1.999),
    "normcdfinv": (lambda y: 0.5 * erfc(-y / math.sqrt(2)), 1e-3, 0.999),
}
BINARY: dict[str, Callable[..., np.ndarray]] = {
    "pow": lambda a, b: np.abs(a) ** b,
    "atan2": np.arctan2,
    "fmod": np.fmod,
    "remainder": np.vectorize(math.remainder),
    "hypot": np.hypot,
    "rhypot": lambda a, b: 1 / np.hypot(a, b),
    "copysign": np.copysign,
    "fdim": lambda a, b: np.maximum(a - b, 0),
    "fmax": np.fmax,
    "fmin": np.fmin,
}
FAST = {
    "__expf": ("exp", -10, 10),
    "__exp10f": ("exp10", -5, 5),
    "__logf": ("log", 0.1, 100),
    "__log2f": ("log2", 0.1, 100),
    "__log10f": ("log10", 0.1, 100),
    "__sinf": ("sin", -3, 3),
    "__cosf": ("cos", -3, 3),
    "__tanf": ("tan", -1, 1),
    "__frsqrt_rn": ("rsqrt", 0.1, 100),
    "__fsqrt_rn": ("sqrt", 0, 100),
}


def _unary(name: str, f: str, c_type: str) -> str:
    return (
        f'extern "C" __global__ void {name}({c_type} *out, const {c_type} *in, int n) {{\n'
        f"  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) out[i] = {f};\n}}\n"
    )


def _functions() -> str:
    code = ""
    for name in (*REAL, *INVERSES):
        code += _unary(f"test_{name}f", f"{name}f(in[i])", "float") + _unary(f"test_{name}", f"{name}(in[i])", "double")
    for name in BINARY:
        first = "fabs(in[i])" if name == "pow" else "in[i]"
        code += _unary(f"test_{name}f", f"{name}f({first}, in[n + i])", "float")
        code += _unary(f"test_{name}", f"{name}({first}, in[n + i])", "double")
    for name in FAST:
        code += _unary(f"test_{name}", f"{name}(in[i])", "float")
    return code


N = 1000


def inputs(low: float, high: float, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, N).astype(dtype)


def run(cp: Any, name: str, x: np.ndarray, dtype: Any) -> np.ndarray:
    out = cp.full(N, np.nan, dtype)
    compiled(cp, _functions()).get_function(f"test_{name}")((4,), (256,), (out, cp.asarray(x), np.int32(N)))
    return cp.asnumpy(out).astype(np.float64)


def assert_close(cp: Any, got: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    """Check to a few units in the last place; a GPU's own functions may have the 16 that CUDA documents at worst."""
    eps = float(np.finfo(dtype).eps) * (4 if cp is engine else 16)
    np.testing.assert_allclose(got, expected, rtol=eps, atol=eps * min(1.0, float(np.abs(expected).max())))


@on_each_device
@pytest.mark.parametrize("name", REAL)
def test_functions_of_one_number(cp: Any, name: str) -> None:
    f, low, high = REAL[name]
    for dtype, suffix in ((np.float32, "f"), (np.float64, "")):
        x = inputs(low, high, dtype)
        got, expected = run(cp, name + suffix, x, dtype), f(x.astype(np.float64))
        if dtype == np.float64 and name in WIDE:
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        else:
            assert_close(cp, got, expected, dtype)


@on_each_device
@pytest.mark.parametrize("name", INVERSES)
def test_inverse_functions(cp: Any, name: str) -> None:
    f, low, high = INVERSES[name]
    for dtype, suffix in ((np.float32, "f"), (np.float64, "")):
        x = inputs(low, high, dtype)
        # CUDA allows normcdfinvf 5 ulp, and at 0.001 the way back to x makes ten of each.
        ulp = 50 if name == "normcdfinv" else 16
        np.testing.assert_allclose(f(run(cp, name + suffix, x, dtype)), x, rtol=ulp * np.finfo(dtype).eps)
    assert np.isclose(run(cp, "erfinvf", np.full(N, 1e-10, np.float32), np.float32)[0], 1e-10 * math.sqrt(math.pi) / 2)


@on_each_device
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(cp: Any, name: str) -> None:
    for dtype, suffix in ((np.float32, "f"), (np.float64, "")):
        x = np.stack([inputs(-10, 10, dtype), inputs(-5, 5, dtype, seed=1)])
        assert_close(cp, run(cp, name + suffix, x, dtype), BINARY[name](*x.astype(np.float64)), dtype)


@on_each_device
@pytest.mark.parametrize("name", FAST)
def test_fast_intrinsics(cp: Any, name: str) -> None:
    function, low, high = FAST[name]
    x = inputs(low, high, np.float32)
    got, expected = run(cp, name, x, np.float32), REAL[function][0](x.astype(np.float64))
    if cp is engine:
        assert_close(cp, got, expected, np.float32)
    else:
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@on_each_device
def test_extremes_lose_nan(cp: Any) -> None:
    x = np.resize(np.array([np.nan, 1.0, np.nan, -np.inf, np.inf, -0.0], np.float32), 2 * N).reshape(2, N)
    x[1] = np.roll(x[1], 1)
    for name in ("fmaxf", "fminf"):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(run(cp, name, x, np.float32), BINARY[name[:-1]](*x))


OTHERS = cuda_text("engine_math_others")


@on_each_device
def test_mixed_types_and_single_values(cp: Any) -> None:
    out = cp.full(64, np.nan, np.float64)
    compiled(cp, OTHERS).get_function("mixed")((1,), (1,), (out,))
    f = np.float32
    x = f(1) + f(5) * f(1e-4)
    s, c = math.sin, math.cos
    expected = [
        5,
        2**32 - 3,
        2,
        2**40,
        1.25,
        1,
        3e9,
        100,
        -(2**40),
        s(0.5),
        c(0.5),
        s(0.25),
        c(0.25),
        0.5**0.5,
        0.5**0.5,
    ]
    expected += [10, 10, 3.5, 2**0.5, 3, 1 / 3, 2, 0.5, 30**0.5, 1, 0, 0, 24, 3, 7, 0.625, 4, 0.75, 2, 1, 2, 3]
    expected += [1 + 2.0**-23, 3.5, 4, f(0.1) + f(0.2), f(0.1) * f(0.3), f(1) / f(3), f(1) / f(3), f(1) - x * x]
    got = cp.asnumpy(out)
    np.testing.assert_allclose(got[: len(expected)], expected, rtol=3e-7 if cp is engine else 1e-5)
    assert np.isnan(got[len(expected) :]).all()
    assert got[len(expected) - 1] == float(f(1) - f(x * x)), "the product was fused with the difference"


@on_each_device
def test_sizes_and_alignments_of_vectors(cp: Any) -> None:
    out = cp.zeros(98, np.int32)
    compiled(cp, OTHERS).get_function("vector_sizes")((1,), (1,), (out,))
    expected = []
    for size in (1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 4, 8):
        for n in (1, 2, 3, 4):
            expected += [n * size, size if n == 3 else min(n * size, 16)]
    np.testing.assert_array_equal(cp.asnumpy(out), [*expected, 12, 4])


@on_each_device
def test_vectors(cp: Any) -> None:
    x = np.random.default_rng(0).uniform(-99, 99, (70, 4)).astype(np.float32)
    out, pairs = cp.zeros((70, 4), np.float32), cp.zeros((70, 2), np.float32)
    compiled(cp, OTHERS).get_function("vectors")((3,), (32,), (cp.asarray(x), out, pairs, np.int32(70)))
    np.testing.assert_array_equal(cp.asnumpy(out), x[:, [2, 1, 0, 3]])
    np.testing.assert_array_equal(cp.asnumpy(pairs), np.stack([x[:, 0] + x[:, 1], np.trunc(x[:, 3])], 1))


def _signed(v: int, width: int = 32) -> int:
    return v - (1 << width) if v >> (width - 1) else v


def _bytes(v: int, signed: bool) -> list[int]:
    parts = [v >> i & 255 for i in (0, 8, 16, 24)]
    return [_signed(p, 8) for p in parts] if signed else parts


def _byte_perm(a: int, b: int, selector: int) -> int:
    both, result = b << 32 | a, 0
    for i in range(4):
        s = selector >> 4 * i & 7  # the intrinsic ignores bit 3, with which prmt repeats the sign
        result |= (both >> 8 * s & 255) << 8 * i
    return result


def _nth_set(mask: int, base: int, n: int) -> int:
    places = [i for i in (range(base, 32) if n > 0 else range(base, -1, -1)) if mask >> i & 1]
    return places[abs(n) - 1] if len(places) >= abs(n) else -1


def _bits(a: int, b: int) -> list[int]:
    """Compute the results of the kernel `bits` in Python's integers."""
    both, sa, sb = a << 32 | b, _signed(a), _signed(b)
    high_first = b << 32 | a  # a funnel shift takes (low, high)
    reverse = int(f"{both:064b}"[::-1], 2)
    s24 = [_signed(v & 0xFFFFFF, 24) for v in (a, b)]
    return [
        a.bit_count(),
        both.bit_count(),
        32 - a.bit_length(),
        64 - both.bit_length(),
        (a & -a).bit_length(),
        (both & -both).bit_length(),
        int(f"{a:032b}"[::-1], 2),
        reverse,
        reverse >> 32,
        _byte_perm(a, b, 0x7250),
        _byte_perm(a, b, b),
        high_first << (b & 31) >> 32,
        high_first >> (b & 31),
        high_first << 32 >> 32,
        high_first >> (31 + b % 2),
        sa * sb >> 32,
        a * b >> 32,
        s24[0] * s24[1],
        (a & 0xFFFFFF) * (b & 0xFFFFFF),
        5 + sum(x * y for x, y in zip(_bytes(a, True), _bytes(b, True), strict=True)),
        5 + sum(x * y for x, y in zip(_bytes(a, False), _bytes(b, False), strict=True)),
        abs(sa - sb) + 7,
        abs(a - b) + 7,
        (sa + sb) >> 1,
        (sa + sb + 1) >> 1,
        (a + b) >> 1,
        both * both >> 96,
        _signed(both, 64) * -3 >> 64,
        a,
        a,
        b,
        _nth_set(a, b % 32, 2),
        _nth_set(a, b % 32, -1),
        b,
        1,
    ]


@on_each_device
def test_bits(cp: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (2, 200), dtype=np.uint64)
    x[0, :6], x[1, :6] = [0, 1, 2**31, 2**32 - 1, 0, 2**31], [0, 0, 2**31, 2**32 - 1, 1, 31]
    x[:, 6:50] &= 0xFFF
    expected = np.array([[v % 2**32 for v in _bits(int(a), int(b))] for a, b in x.T]).T
    out = cp.zeros((len(expected), 200), np.uint32)
    compiled(cp, OTHERS).get_function("bits")((1,), (200,), (cp.asarray(x.astype(np.uint32)), out, np.int32(200)))
    got = cp.asnumpy(out)
    # The bits of a signalling NaN may change on their way through a float.
    for row in range(len(expected)):
        np.testing.assert_array_equal(got[row], expected[row], err_msg=f"operation {row}")


INTEGERS = {"int": (-(2**31), 2**31 - 1), "uint": (0, 2**32 - 1), "ll": (-(2**63), 2**63 - 1), "ull": (0, 2**64 - 1)}
C_INTEGERS = {"int": "int", "uint": "unsigned", "ll": "long long", "ull": "unsigned long long"}
MODES: dict[str, Callable[[float], int]] = {"rn": round, "rz": math.trunc, "ru": math.ceil, "rd": math.floor}


def _conversions() -> str:
    code = ""
    for mode in MODES:
        for name, c_type in C_INTEGERS.items():
            for real in ("float", "double"):
                code += (
                    f'extern "C" __global__ void {real}2{name}_{mode}({c_type} *out, const {real} *in) '
                    f"{{ out[threadIdx.x] = __{real}2{name}_{mode}(in[threadIdx.x]); }}\n"
                )
                if real == "double" and "ll" not in name and mode != "rn":
                    continue  # exact
                code += (
                    f'extern "C" __global__ void {name}2{real}_{mode}({real} *out, const {c_type} *in) '
                    f"{{ out[threadIdx.x] = __{name}2{real}_{mode}(in[threadIdx.x]); }}\n"
                )
        code += (
            f'extern "C" __global__ void double2float_{mode}(float *out, const double *in) '
            f"{{ out[threadIdx.x] = __double2float_{mode}(in[threadIdx.x]); }}\n"
        )
    return code


@on_each_device
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INTEGERS)
def test_real_to_integer_saturates(cp: Any, name: str, mode: str) -> None:
    low, high = INTEGERS[name]
    c_dtype = {"int": "i4", "uint": "u4", "ll": "i8", "ull": "u8"}[name]
    for real, dtype in (("float", np.float32), ("double", np.float64)):
        x = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -1.5, -2.5, 0.49999997, 1e10, -1e10, 1e30, -1e30, 2.0**31, -(2.0**31)]
        x += [2.0**32, 2.0**63, -(2.0**63), 2.0**64, np.inf, -np.inf, np.nan, 2147483520.0, 8388609.0, 12345678.9]
        x = np.array(x, dtype)
        out = cp.zeros(x.shape, c_dtype)
        compiled(cp, _conversions()).get_function(f"{real}2{name}_{mode}")((1,), (x.size,), (out, cp.asarray(x)))
        # NaN is 0, except from double or to 64 bits: then the top bit alone (CUDA's PTX manual, cvt)
        of_nan = 0 if real == "float" and "ll" not in name else 1 << (63 if "ll" in name else 31)
        of_nan -= 2 * of_nan if of_nan and low else 0
        expected = []
        for value in x.tolist():
            if math.isnan(value):
                expected.append(of_nan)
            elif math.isinf(value):
                expected.append(high if value > 0 else low)
            else:
                expected.append(min(max(MODES[mode](value), low), high))
        np.testing.assert_array_equal(cp.asnumpy(out), np.array(expected, c_dtype), err_msg=f"{real} {mode}")


def rounded(value: int | float, dtype: Any, mode: str) -> float:
    """Round an exact number to a float type. Python compares whole numbers and floats exactly."""
    near = dtype(value)
    if mode == "rn" or float(near) == value or not math.isfinite(value):
        return near
    up = {"ru": True, "rd": False, "rz": value < 0}[mode]
    if up == (float(near) > value):
        return near
    return np.nextafter(near, dtype(np.inf if up else -np.inf))


@on_each_device
@pytest.mark.parametrize("mode", MODES)
def test_rounding_to_float(cp: Any, mode: str) -> None:
    rng = np.random.default_rng(0)
    module = compiled(cp, _conversions())
    for name, (low, high) in INTEGERS.items():
        c_dtype = {"int": "i4", "uint": "u4", "ll": "i8", "ull": "u8"}[name]
        x = rng.integers(low, high, 200, dtype=c_dtype, endpoint=True)
        x[:4] = [low, high, 16777217, 16777219]
        for real, dtype in (("float", np.float32), ("double", np.float64)):
            if real == "double" and "ll" not in name and mode != "rn":
                continue
            out = cp.zeros(200, dtype)
            module.get_function(f"{name}2{real}_{mode}")((1,), (200,), (out, cp.asarray(x)))
            expected = [rounded(int(v), dtype, mode) for v in x]
            np.testing.assert_array_equal(cp.asnumpy(out), np.array(expected, dtype), err_msg=f"{name} {real}")
    x = rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200)
    out = cp.zeros(200, np.float32)
    module.get_function(f"double2float_{mode}")((1,), (200,), (out, cp.asarray(x)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.array([rounded(float(v), np.float32, mode) for v in x]))
