"""Small expressions, bit for bit: what the language and the PTX manual define, worked out here in whole numbers and
fractions, must be what the CPU engine gives and what a GPU gives.

CuPy compiles with -ftz=true, so no operand and no result of arithmetic in float is subnormal. A NaN is a NaN: its other
bits are the processor's own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(x: int, bits: int = 32) -> int:
    """Return the number that these bits are in two's complement."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


# ---------------------------------------------------------------- real numbers, exactly


def rounded(x: Fraction, digits: int, lowest: int, highest: int, mode: str = "rn", negative: bool = False) -> float:
    """Round a fraction to the nearest number of a format, or to the neighbour required by another mode.

    Args:
        digits: those of the mantissa. lowest, highest: exponents of its smallest normal and its largest numbers.
        negative: the sign of a zero result.
    """
    if x == 0:
        return -0.0 if negative else 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, lowest) - digits + 1)
    count, rest = divmod(size, step)
    away = {"rz": False, "ru": x > 0, "rd": x < 0}.get(mode)
    if away is None:
        away = rest * 2 > step or (rest * 2 == step and count % 2 == 1)
    count += 1 if rest and away else 0
    result = count * step
    if result >= Fraction(2) ** (highest + 1):
        toward = {"rn": True, "rz": False, "ru": x > 0, "rd": x < 0}[mode]
        largest = (Fraction(2) - Fraction(2) ** (1 - digits)) * Fraction(2) ** highest
        return math.copysign(math.inf if toward else float(largest), x)
    return math.copysign(float(result), x)


FORMATS = {"float": (24, -126, 127), "double": (53, -1022, 1023), "half": (11, -14, 15), "bfloat": (8, -126, 127)}


def exact(kind: str, operation: Callable[..., Fraction], mode: str = "rn") -> Callable[..., float]:
    """Compute an operation in fractions and round once, as in IEEE 754, for finite numbers."""
    return lambda *x: rounded(operation(*map(Fraction, x)), *FORMATS[kind], mode)


def integer(low: int, high: int, mode: str, of_nan: int) -> Callable[[float], int]:
    """Compute cvt of a real number to an integer from low to high."""

    def convert(x: float) -> int:
        if math.isnan(x):
            return of_nan
        if math.isinf(x):
            return high if x > 0 else low
        whole = {"rz": math.trunc, "ru": math.ceil, "rd": math.floor, "rn": lambda v: round(Fraction(v))}[mode](x)
        return min(max(whole, low), high)

    return convert


INT, UINT = (-(1 << 31), (1 << 31) - 1), (0, M32)
LL, ULL = (-(1 << 63), (1 << 63) - 1), (0, M64)


# ---------------------------------------------------------------- the table: expression -> expected result


def byte_perm(x: int, y: int, s: int) -> int:
    both, result = y << 32 | x, 0
    for i in range(4):
        pick = s >> 4 * i & 7  # the intrinsic ignores bit 3, with which prmt repeats the sign
        result |= (both >> 8 * pick & 255) << 8 * i
    return result


def funnel(low: int, high: int, n: int, right: bool) -> int:
    both = high << 32 | low
    return (both >> n if right else both << n >> 32) & M32


def leading(x: int, bits: int) -> int:
    return bits - x.bit_length()


def first_set(x: int) -> int:
    return (x & -x).bit_length()


def reverse(x: int, bits: int) -> int:
    return int(f"{x:0{bits}b}"[::-1], 2)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shl(x: int, n: int, bits: int = 32) -> int:
    return x << min(n & M32, bits)


def shr(x: int, n: int, bits: int = 32) -> int:
    return x >> min(n & M32, bits)


s32 = signed
UNSIGNED = {  # unsigned a, b, c
    "a + b": lambda a, b, c: a + b,
    "a - b": lambda a, b, c: a - b,
    "a * b": lambda a, b, c: a * b,
    "a / (b | 1)": lambda a, b, c: a // (b | 1),
    "a % (b | 1)": lambda a, b, c: a % (b | 1),
    "a << (c & 63)": lambda a, b, c: shl(a, c & 63),
    "a >> (c & 63)": lambda a, b, c: shr(a, c & 63),
    "a << c": lambda a, b, c: shl(a, c),
    "(unsigned)((int)a >> c)": lambda a, b, c: shr(s32(a), c),
    "__popc(a)": lambda a, b, c: bin(a).count("1"),
    "__clz((int)a)": lambda a, b, c: leading(a, 32),
    "__ffs((int)a)": lambda a, b, c: first_set(a),
    "__brev(a)": lambda a, b, c: reverse(a, 32),
    "__byte_perm(a, b, c)": byte_perm,
    "__funnelshift_l(a, b, c)": lambda a, b, c: funnel(a, b, c & 31, False),
    "__funnelshift_r(a, b, c)": lambda a, b, c: funnel(a, b, c & 31, True),
    "__funnelshift_lc(a, b, c)": lambda a, b, c: funnel(a, b, min(c, 32), False),
    "__funnelshift_rc(a, b, c)": lambda a, b, c: funnel(a, b, min(c, 32), True),
    "__umulhi(a, b)": lambda a, b, c: a * b >> 32,
    "__mulhi((int)a, (int)b)": lambda a, b, c: s32(a) * s32(b) >> 32,
    "__umul24(a, b)": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "__mul24((int)a, (int)b)": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "__usad(a, b, c)": lambda a, b, c: abs(a - b) + c,
    "__sad((int)a, (int)b, c)": lambda a, b, c: abs(s32(a) - s32(b)) + c,
    "__uhadd(a, b)": lambda a, b, c: a + b >> 1,
    "__urhadd(a, b)": lambda a, b, c: a + b + 1 >> 1,
    "__hadd((int)a, (int)b)": lambda a, b, c: s32(a) + s32(b) >> 1,
    "__rhadd((int)a, (int)b)": lambda a, b, c: s32(a) + s32(b) + 1 >> 1,
    "min(a, b)": lambda a, b, c: min(a, b),
    "max((int)a, (int)b)": lambda a, b, c: max(s32(a), s32(b)),
    "(unsigned)(char)a": lambda a, b, c: signed(a, 8),  # a GPU's char is signed
    "(unsigned char)a + (signed char)b": lambda a, b, c: (a & 255) + signed(b, 8),
    "(unsigned)(short)(a + b)": lambda a, b, c: signed(a + b, 16),
    "__dp4a(a, b, c)": lambda a, b, c: sum((a >> k & 255) * (b >> k & 255) for k in (0, 8, 16, 24)) + c,
    "__dp4a((int)a, (int)b, (int)c)": lambda a, b, c: (
        sum(signed(a >> k, 8) * signed(b >> k, 8) for k in (0, 8, 16, 24)) + c
    ),
    "__float_as_uint(__uint_as_float(a & 0xff7fffffu))": lambda a, b, c: a & 0xFF7FFFFF,
    "__float_as_uint(__uint2float_rn(a))": lambda a, b, c: word(rounded(Fraction(a), *FORMATS["float"])),
    "__float_as_uint(__uint2float_rz(a))": lambda a, b, c: word(rounded(Fraction(a), *FORMATS["float"], "rz")),
    "__float_as_uint(__int2float_ru((int)a))": lambda a, b, c: word(rounded(Fraction(s32(a)), *FORMATS["float"], "ru")),
    "__float_as_uint(__int2float_rd((int)a))": lambda a, b, c: word(rounded(Fraction(s32(a)), *FORMATS["float"], "rd")),
    "__float_as_uint((float)(int)a)": lambda a, b, c: word(rounded(Fraction(s32(a)), *FORMATS["float"])),
}
WIDE = {  # unsigned long long a, b, c
    "a + b": lambda a, b, c: a + b,
    "a * b": lambda a, b, c: a * b,
    "a / (b | 1)": lambda a, b, c: a // (b | 1),
    "a % (b | 1)": lambda a, b, c: a % (b | 1),
    "(long long)a / ((long long)(b >> 2) | 1)": lambda a, b, c: quotient(signed(a, 64), b >> 2 | 1),
    "a << c": lambda a, b, c: shl(a, c, 64),
    "a >> c": lambda a, b, c: shr(a, c, 64),
    "(long long)a >> c": lambda a, b, c: shr(signed(a, 64), c, 64),
    "1u << c": lambda a, b, c: shl(1, c) & M32,
    "__popcll(a)": lambda a, b, c: bin(a).count("1"),
    "__clzll((long long)a)": lambda a, b, c: leading(a, 64),
    "__ffsll((long long)a)": lambda a, b, c: first_set(a),
    "__brevll(a)": lambda a, b, c: reverse(a, 64),
    "__umul64hi(a, b)": lambda a, b, c: a * b >> 64,
    "__mul64hi((long long)a, (long long)b)": lambda a, b, c: signed(a, 64) * signed(b, 64) >> 64,
    "min((long long)a, (long long)b)": lambda a, b, c: min(signed(a, 64), signed(b, 64)),
    "__float_as_uint(__ull2float_rn(a))": lambda a, b, c: word(rounded(Fraction(a), *FORMATS["float"])),
    "__float_as_uint(__ll2float_rz((long long)a))": lambda a, b, c: word(
        rounded(Fraction(signed(a, 64)), *FORMATS["float"], "rz")
    ),
    "__double_as_longlong(__ull2double_ru(a))": lambda a, b, c: word(
        rounded(Fraction(a), *FORMATS["double"], "ru"), "d"
    ),
    "__double_as_longlong((double)(long long)a)": lambda a, b, c: word(
        rounded(Fraction(signed(a, 64)), *FORMATS["double"]), "d"
    ),
}
CASTS = {
    "(int)a": integer(*INT, "rz", 0),
    "(unsigned)a": integer(*UINT, "rz", 0),
    "(long long)a": integer(*LL, "rz", 1 << 63),
    "(unsigned long long)a": integer(*ULL, "rz", 1 << 63),
    "(unsigned char)a": lambda a: integer(*UINT, "rz", 0)(a) & 255,
    "(short)a": lambda a: signed(integer(*INT, "rz", 0)(a), 16),
    **{f"__float2int_{m}(a)": integer(*INT, m, 0) for m in ("rn", "rz", "ru", "rd")},
    **{f"__float2uint_{m}(a)": integer(*UINT, m, 0) for m in ("rn", "rz", "ru", "rd")},
    **{f"__float2ll_{m}(a)": integer(*LL, m, 1 << 63) for m in ("rn", "rz", "ru", "rd")},
    **{f"__float2ull_{m}(a)": integer(*ULL, m, 1 << 63) for m in ("rn", "rz", "ru", "rd")},
    "a < 0 ? 1 : a > 0 ? 2 : a == 0 ? 3 : 4": lambda a: 1 if a < 0 else 2 if a > 0 else 3 if a == 0 else 4,
    "(bool)a": lambda a: int(a != 0),
    "isnan(a) + 2 * isinf(a) + 4 * (signbit(a) != 0 && !isnan(a))": lambda a: (
        4 * (math.copysign(1, a) < 0) + 2 if math.isinf(a) else 1 if math.isnan(a) else 4 * (math.copysign(1, a) < 0)
    ),
}
DOUBLE_CASTS = {
    "(int)a": integer(*INT, "rz", -(1 << 31)),
    "(unsigned)a": integer(*UINT, "rz", 1 << 31),
    "(long long)a": integer(*LL, "rz", 1 << 63),
    "(unsigned long long)a": integer(*ULL, "rz", 1 << 63),
    **{f"__double2int_{m}(a)": integer(*INT, m, -(1 << 31)) for m in ("rn", "rz", "ru", "rd")},
    **{f"__double2ull_{m}(a)": integer(*ULL, m, 1 << 63) for m in ("rn", "rz", "ru", "rd")},
    "__double2hiint(a)": lambda a: signed(word(a, "d") >> 32),
    "__double2loint(a)": lambda a: signed(word(a, "d")),
}


def word(x: float, kind: str = "f") -> int:
    """Return the bits of a number, as unsigned."""
    return struct.unpack("<I" if kind == "f" else "<Q", struct.pack(f"<{kind}", x))[0]


def lesser(a: float, b: float) -> float:
    """Return the smaller one; a number rather than a NaN, and -0 rather than +0."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min(a, b, key=lambda v: (v, math.copysign(1, v)))


def ieee(operation: Callable[..., Any]) -> Callable[..., float]:
    """Compute in float64: a sum, product, quotient or root of two floats never gets another value by rounding twice."""

    def compute(*x: float) -> float:
        with np.errstate(all="ignore"):
            return float(np.float32(operation(*map(np.float64, x))))

    return compute


FLOATS = {  # float a, b, c; finite or not
    "a + b": ieee(lambda a, b, c: a + b),
    "a - b": ieee(lambda a, b, c: a - b),
    "a * b": ieee(lambda a, b, c: a * b),
    "__fadd_rn(a, b)": ieee(lambda a, b, c: a + b),
    "__fmul_rn(a, b)": ieee(lambda a, b, c: a * b),
    "a / b": ieee(lambda a, b, c: a / b),
    "__fdiv_rn(a, b)": ieee(lambda a, b, c: a / b),
    "__frcp_rn(a)": ieee(lambda a, b, c: np.float64(1) / a),
    "sqrtf(a)": ieee(lambda a, b, c: np.sqrt(a)),
    "fminf(a, b)": lambda a, b, c: lesser(a, b),
    "fmaxf(a, b)": lambda a, b, c: -lesser(-a, -b),
    "fabsf(a)": lambda a, b, c: abs(a),
    "copysignf(a, b)": lambda a, b, c: math.copysign(a, b),
    "floorf(a)": ieee(lambda a, b, c: np.floor(a)),
    "ceilf(a)": ieee(lambda a, b, c: np.ceil(a)),
    "truncf(a)": ieee(lambda a, b, c: np.trunc(a)),
    "rintf(a)": ieee(lambda a, b, c: np.rint(a)),
    "roundf(a)": ieee(lambda a, b, c: np.copysign(np.floor(np.abs(a) + 0.5), a) if abs(a) < 2**24 else a),
    "__saturatef(a)": lambda a, b, c: 0.0 if math.isnan(a) else min(max(a, 0.0), 1.0) + 0.0,
    "-a": lambda a, b, c: -a,
    "__double2float_rn((double)a * b)": ieee(lambda a, b, c: a * b),
}
FUSED = {  # finite
    "fmaf(a, b, c)": exact("float", lambda a, b, c: a * b + c),
    "__fmaf_rn(a, b, c)": exact("float", lambda a, b, c: a * b + c),
    "__double2float_rz((double)a + c)": lambda a, b, c: rounded(Fraction(float(a) + float(c)), *FORMATS["float"], "rz"),
    "__double2float_ru((double)a + c)": lambda a, b, c: rounded(Fraction(float(a) + float(c)), *FORMATS["float"], "ru"),
}
DOUBLES = {
    "a + b": exact("double", lambda a, b, c: a + b),
    "a - b": exact("double", lambda a, b, c: a - b),
    "a * b": exact("double", lambda a, b, c: a * b),
    "a / b": exact("double", lambda a, b, c: a / b),
    "fma(a, b, c)": exact("double", lambda a, b, c: a * b + c),
    "__dadd_rn(a, b)": exact("double", lambda a, b, c: a + b),
    "sqrt(fabs(a))": lambda a, b, c: math.sqrt(abs(a)),
    "fmin(a, b)": lambda a, b, c: min(a, b),
    "rint(a)": lambda a, b, c: float(round(Fraction(a))),
}


# Of numbers {x} and {y} in a 16-bit format. Results of finite ones are computed exactly and rounded once.
HALVES = {
    "{x}": lambda a, b: a,
    "__hadd({x}, {y})": lambda a, b: a + b,
    "__hsub({x}, {y})": lambda a, b: a - b,
    "__hmul({x}, {y})": lambda a, b: a * b,
    "__hdiv({x}, {y})": lambda a, b: a / b,
    "__hfma({x}, {y}, {x})": lambda a, b: a * b + a,
    "__hneg({x})": lambda a, b: -a,
    "__habs({x})": lambda a, b: abs(a),
    "__hmax({x}, {y})": lambda a, b: max(a, b),
    "__hmin({x}, {y})": lambda a, b: min(a, b),
}
MAKE = {"half": "__float2half_rn", "bfloat": "__float2bfloat16_rn"}
READ = {"half": "__half2float", "bfloat": "__bfloat162float"}


# ---------------------------------------------------------------- running the expressions


def source(groups: dict[str, tuple[str, str, list[str]]]) -> str:
    """Write a kernel for each group: name -> (type of a, b, c; type of the results; expressions)."""
    kernels = []
    for name, (given, result, expressions) in groups.items():
        rows = "".join(f"  out[{k} * n + i] = {e};\n" for k, e in enumerate(expressions))
        kernels.append(
            f'extern "C" __global__ void {name}({result} *out, const {given} *in, int n) {{\n'
            "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n"
            f"  {given} a = in[i], b = in[n + i], c = in[2 * n + i];\n{rows}}}\n"
        )
    return "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + "\n".join(kernels)


def in_format(kind: str) -> list[str]:
    """Return the expressions of HALVES as float."""
    return [f"{READ[kind]}({e.format(x=f'{MAKE[kind]}(a)', y=f'{MAKE[kind]}(b)')})" for e in HALVES]


GROUPS = {
    "unsigneds": ("unsigned", "unsigned", list(UNSIGNED)),
    "wide": ("unsigned long long", "unsigned long long", list(WIDE)),
    "casts": ("float", "long long", list(CASTS)),
    "double_casts": ("double", "long long", list(DOUBLE_CASTS)),
    "floats": ("float", "float", list(FLOATS)),
    "fused": ("float", "float", list(FUSED)),
    "doubles": ("double", "double", list(DOUBLES)),
    "in_half": ("float", "float", in_format("half")),
    "in_bfloat": ("float", "float", in_format("bfloat")),
}


def run(cp: Any, name: str, given: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a group's results, (expressions, n), for inputs of (3, n)."""
    n = given.shape[1]
    out = cp.zeros((len(GROUPS[name][2]), n), dtype)
    kernel = compiled(cp, source(GROUPS)).get_function(name)
    kernel((-(-n // 128),), (128,), (out, cp.asarray(np.ascontiguousarray(given)), np.int32(n)))
    return cp.asnumpy(out)


def words(bits: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(bits)
    dtype = np.uint32 if bits == 32 else np.uint64
    edges = [0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0xFFFFFF, 0x1000000, 0x1000001]
    edges += [(1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    picked = rng.choice(np.array(edges, dtype), (3, n))
    random = rng.integers(0, 1 << bits, (3, n), dtype=dtype) >> rng.integers(0, bits, (3, n)).astype(dtype)
    return np.where(rng.random((3, n)) < 0.4, picked, random).astype(dtype)


@on_each_device
@pytest.mark.parametrize(("name", "table", "bits"), [("unsigneds", UNSIGNED, 32), ("wide", WIDE, 64)])
def test_integers(cp: Any, name: str, table: dict[str, Callable[..., int]], bits: int) -> None:
    given = words(bits, 2000)
    got = run(cp, name, given, given.dtype)
    mask = (1 << bits) - 1
    for row, (expression, operation) in zip(got, table.items(), strict=True):
        expected = [operation(*map(int, x)) & mask for x in given.T]
        np.testing.assert_array_equal(row, np.array(expected, given.dtype), err_msg=expression)


EDGES = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388609.0, 16777215.0, 2.0**31, -(2.0**31), 2.0**32, 2.0**63]
EDGES += [-(2.0**63), 2.0**64, 1e10, -1e10, 1e30, -1e30, 3.4e38, 1.0, -1.0, 255.9, 256.5, 65504.0, 65520.0, 2.0**-14]


def reals(dtype: Any, n: int, finite: bool) -> np.ndarray:
    rng = np.random.default_rng(7)
    edges = EDGES if finite else [*EDGES, math.inf, -math.inf, math.nan]
    picked = rng.choice(np.array(edges, dtype), (3, n))
    random = (rng.standard_normal((3, n)) * 2.0 ** rng.integers(-30, 40, (3, n))).astype(dtype)
    return np.where(rng.random((3, n)) < 0.4, picked, random).astype(dtype)


@on_each_device
@pytest.mark.parametrize(("name", "table", "dtype"), [("casts", CASTS, "f4"), ("double_casts", DOUBLE_CASTS, "f8")])
def test_real_numbers_to_integers(cp: Any, name: str, table: dict[str, Callable[..., int]], dtype: str) -> None:
    given = reals(dtype, 3000, finite=False)
    for row, (expression, operation) in zip(run(cp, name, given, np.int64), table.items(), strict=True):
        values = [operation(x) for x in given[0].tolist()]
        expected = np.array([v & M64 for v in values], np.uint64).astype(np.int64)
        np.testing.assert_array_equal(row, expected, err_msg=expression)


def assert_same_bits(got: np.ndarray, expected: np.ndarray, message: str) -> None:
    """Check for equal bits, and a NaN where one is expected. Subnormal results are ignored: a GPU may flush them."""
    tiny = np.finfo(got.dtype).tiny
    judged = np.isnan(expected) | (expected == 0) | (np.abs(expected) >= 2 * tiny)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg=message)
    judged &= ~np.isnan(expected)
    kind = np.uint32 if got.dtype == np.float32 else np.uint64
    np.testing.assert_array_equal(got[judged].view(kind), expected[judged].view(kind), err_msg=message)
    assert judged.mean() > 0.5


@on_each_device
@pytest.mark.parametrize(
    ("name", "table", "dtype", "finite"),
    [("floats", FLOATS, "f4", False), ("fused", FUSED, "f4", True), ("doubles", DOUBLES, "f8", True)],
)
def test_real_numbers(cp: Any, name: str, table: dict[str, Callable[..., float]], dtype: str, finite: bool) -> None:
    given = reals(dtype, 2000, finite)
    if name == "doubles":
        given[1] = np.where(given[1] == 0, 3.0, given[1])  # fractions have no infinity
    for row, (expression, operation) in zip(run(cp, name, given, given.dtype), table.items(), strict=True):
        expected = np.array([operation(*x) for x in given.T.tolist()]).astype(given.dtype)
        either = name != "floats" or any(word in expression for word in ("fmin", "fmax", "saturate"))
        if either:  # fractions have no signed zero, and CUDA guarantees no sign for these
            expected = np.where((expected == 0) & (row == 0), row, expected)
        assert_same_bits(row, expected, expression)


@on_each_device
@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_16_bits(cp: Any, kind: str) -> None:
    rng = np.random.default_rng(3)
    given = (rng.standard_normal((3, 2000)) * 2.0 ** rng.integers(-6, 7, (3, 2000))).astype(np.float32)
    given[:, :4] = [[1.0, 2.0, -3.0, 65519.0]] * 3
    x, y = (np.array([rounded(Fraction(v), *FORMATS[kind]) for v in row]) for row in given[:2].tolist())
    rows = run(cp, f"in_{kind}", given, np.float32)
    for row, (expression, operation) in zip(rows, HALVES.items(), strict=True):
        compute = exact(kind, operation)
        expected = np.array([compute(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)], np.float32)
        expected = np.where((expected == 0) & (row == 0), row, expected)  # fractions have no signed zero
        np.testing.assert_array_equal(row.view(np.uint32), expected.view(np.uint32), err_msg=expression)


APPROXIMATE = r"""
extern "C" __global__ void approximate(float *out, const float *in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = in[i];
  out[i] = rsqrtf(a), out[n + i] = __fdividef(1.0f, a), out[2 * n + i] = expf(a * 1e-3f), out[3 * n + i] = logf(a);
}
"""


@on_each_device
def test_what_is_only_near(cp: Any) -> None:
    """Within the errors that CUDA's programming guide lists, in units in the last place."""
    a = np.random.default_rng(0).uniform(0.01, 1000, 1000).astype(np.float32)
    out = cp.zeros((4, a.size), np.float32)
    compiled(cp, APPROXIMATE).get_function("approximate")((8,), (128,), (out, cp.asarray(a), np.int32(a.size)))
    x = a.astype(np.float64)
    expected = (1 / np.sqrt(x), 1 / x, np.exp((a * np.float32(1e-3)).astype(np.float64)), np.log(x))
    for row, right, units in zip(cp.asnumpy(out), expected, (2, 2, 2, 1), strict=True):
        assert (np.abs(row - right) <= units * np.spacing(np.abs(right).astype(np.float32)) * 1.01).all()
