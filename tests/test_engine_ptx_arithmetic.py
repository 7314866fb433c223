"""Inline PTX that computes: integers, bits, carries, floats with their rounding, comparisons, conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device

DTYPES = {"r": np.uint32, "l": np.uint64, "f": np.float32, "d": np.float64, "h": np.uint16}
CPP = {"r": "unsigned", "l": "unsigned long long", "f": "float", "d": "double", "h": "unsigned short"}


def kernel(name: str, text: str, letters: str) -> str:
    """Make a kernel that runs `text` on each element. letters: constraints, the result's first."""
    to, *inputs = letters
    parameters = "".join(f", const {CPP[letter]} *x{i}" for i, letter in enumerate(inputs))
    operands = ", ".join(f'"{letter}"(x{i}[t])' for i, letter in enumerate(inputs))
    return f"""
extern "C" __global__ void k_{name}({CPP[to]} *y{parameters}) {{
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("{text}" : "={to}"(y[t]) : {operands});
}}"""


def run(cp: Any, source: str, name: str, letters: str, inputs: Sequence[np.ndarray]) -> np.ndarray:
    n = len(inputs[0])
    y = cp.zeros(n, DTYPES[letters[0]])
    compiled(cp, source).get_function(f"k_{name}")((n // 64,), (64,), (y, *(cp.asarray(x) for x in inputs)))
    return cp.asnumpy(y)


# ------------------------------------------------------------------------------------ integers

M32, M64 = 2**32 - 1, 2**64 - 1


def s32(x: int) -> int:
    return (x & M32) - 2**32 * (x >> 31 & 1)


def s64(x: int) -> int:
    return (x & M64) - 2**64 * (x >> 63 & 1)


def s16(x: int) -> int:
    return (x & 0xFFFF) - 2**16 * (x >> 15 & 1)


def s8(x: int) -> int:
    return (x & 0xFF) - 2**8 * (x >> 7 & 1)


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def field(a: int, at: int, n: int, bits: int, signed: bool) -> int:
    at, n = at & 255, n & 255
    sign = (a >> min(at + n - 1, bits - 1) & 1) if signed and n else 0
    return sum((a >> (at + i) & 1 if i < n and at + i < bits else sign) << i for i in range(bits))


def inserted(a: int, b: int, at: int, n: int, bits: int) -> int:
    at, n = at & 255, n & 255
    for i in range(min(n, max(bits - at, 0))):
        b = b & ~(1 << at + i) | (a >> i & 1) << at + i
    return b


def permuted(a: int, b: int, bytes_: list[int]) -> int:
    return sum(((b << 32 | a) >> 8 * byte & 255) << 8 * i for i, byte in enumerate(bytes_))


def highest(x: int) -> int:
    return x.bit_length() - 1 if x else M32


INTEGERS: dict[str, tuple[str, str, Callable[..., int]]] = {
    "add": ("add.s32 %0, %1, %2;", "rrr", lambda a, b: a + b),
    "add_sat": ("add.sat.s32 %0, %1, %2;", "rrr", lambda a, b: clamp(s32(a) + s32(b), -(2**31), 2**31 - 1)),
    "sub_sat": ("sub.s32.sat %0, %1, %2;", "rrr", lambda a, b: clamp(s32(a) - s32(b), -(2**31), 2**31 - 1)),
    "sub64": ("sub.u64 %0, %1, %2;", "lll", lambda a, b: a - b),
    "mul_lo": ("mul.lo.s32 %0, %1, %2;", "rrr", lambda a, b: a * b),
    "mul_hi": ("mul.hi.u32 %0, %1, %2;", "rrr", lambda a, b: a * b >> 32),
    "mul_hi_s": ("mul.hi.s32 %0, %1, %2;", "rrr", lambda a, b: s32(a) * s32(b) >> 32),
    "mul_hi64": ("mul.hi.s64 %0, %1, %2;", "lll", lambda a, b: s64(a) * s64(b) >> 64),
    "mul_lo64": ("mul.lo.u64 %0, %1, %2;", "lll", lambda a, b: a * b),
    "mul_wide": ("mul.wide.u32 %0, %1, %2;", "lrr", lambda a, b: a * b),
    "mul_wide_s": ("mul.wide.s32 %0, %1, %2;", "lrr", lambda a, b: s32(a) * s32(b)),
    "mul24": ("mul24.lo.u32 %0, %1, %2;", "rrr", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mad_lo": ("mad.lo.u32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: a * b + c),
    "mad_hi": ("mad.hi.s32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: (s32(a) * s32(b) >> 32) + c),
    "mad_wide": ("mad.wide.u32 %0, %1, %2, %3;", "lrrl", lambda a, b, c: a * b + c),
    "sad": ("sad.s32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: abs(s32(a) - s32(b)) + c),
    "div": (
        "{ .reg .u32 b; or.b32 b, %2, 1; div.s32 %0, %1, b; }",
        "rrr",
        lambda a, b: int(Fraction(s32(a), s32(b | 1))),
    ),
    "rem": (
        "{ .reg .u32 b; or.b32 b, %2, 1; rem.s32 %0, %1, b; }",
        "rrr",
        lambda a, b: s32(a) - s32(b | 1) * int(Fraction(s32(a), s32(b | 1))),
    ),
    "min_u": ("min.u32 %0, %1, %2;", "rrr", min),
    "max_s": ("max.s32 %0, %1, %2;", "rrr", lambda a, b: max(s32(a), s32(b))),
    "abs": ("abs.s32 %0, %1;", "rr", lambda a: abs(s32(a))),
    "neg64": ("neg.s64 %0, %1;", "ll", lambda a: -a),
    "and": ("and.b32 %0, %1, %2;", "rrr", lambda a, b: a & b),
    "or64": ("or.b64 %0, %1, %2;", "lll", lambda a, b: a | b),
    "xor": ("xor.b32 %0, %1, 0xF0;", "rr", lambda a: a ^ 0xF0),
    "not": ("not.b32 %0, %1;", "rr", lambda a: ~a),
    "cnot": ("cnot.b32 %0, %1;", "rr", lambda a: int(a == 0)),
    "shl": ("shl.b32 %0, %1, %2;", "rrr", lambda a, b: a << b if b < 32 else 0),
    "shr_u": ("shr.u32 %0, %1, %2;", "rrr", lambda a, b: a >> min(b, 40)),
    "shr_s": ("shr.s32 %0, %1, %2;", "rrr", lambda a, b: s32(a) >> min(b, 40)),
    "shr_s64": ("shr.s64 %0, %1, %2;", "llr", lambda a, b: s64(a) >> min(b, 70)),
    "shl64": ("shl.b64 %0, %1, %2;", "llr", lambda a, b: a << b if b < 64 else 0),
    "shf_l": ("shf.l.wrap.b32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    "shf_r": ("shf.r.clamp.b32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    "popc": ("popc.b32 %0, %1;", "rr", lambda a: bin(a).count("1")),
    "popc64": ("popc.b64 %0, %1;", "rl", lambda a: bin(a).count("1")),
    "clz": ("clz.b32 %0, %1;", "rr", lambda a: 32 - a.bit_length()),
    "clz64": ("clz.b64 %0, %1;", "rl", lambda a: 64 - a.bit_length()),
    "brev": ("brev.b32 %0, %1;", "rr", lambda a: int(f"{a:032b}"[::-1], 2)),
    "brev64": ("brev.b64 %0, %1;", "ll", lambda a: int(f"{a:064b}"[::-1], 2)),
    "bfind": ("bfind.u32 %0, %1;", "rr", highest),
    "bfind_s": ("bfind.s32 %0, %1;", "rr", lambda a: highest(~s32(a) if s32(a) < 0 else a)),
    "bfind_shift": ("bfind.shiftamt.u32 %0, %1;", "rr", lambda a: 31 - highest(a) if a else M32),
    "bfe": ("bfe.u32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: field(a, b, c, 32, False)),
    "bfe_s": ("bfe.s32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: field(a, b, c, 32, True)),
    "bfe_64": ("bfe.s64 %0, %1, %2, %3;", "llrr", lambda a, b, c: field(a, b, c, 64, True)),
    "bfi": ("bfi.b32 %0, %1, %2, 5, %3;", "rrrr", lambda a, b, c: inserted(a, b, 5, c, 32)),
    "szext": ("szext.wrap.s32 %0, %1, %2;", "rrr", lambda a, b: field(a, 0, b & 31, 32, True)),
    "bmsk": ("bmsk.clamp.b32 %0, %1, %2;", "rrr", lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32)),
    "lop3": ("lop3.b32 %0, %1, %2, %3, 0x6a;", "rrrr", lambda a, b, c: (a & b) ^ c),
    "prmt_f4e": (
        "prmt.b32.f4e %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: permuted(a, b, [(c & 3) + i for i in range(4)]),
    ),
    "prmt_b4e": (
        "prmt.b32.b4e %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: permuted(a, b, [(c & 3) - i & 7 for i in range(4)]),
    ),
    "prmt_rc8": ("prmt.b32.rc8 %0, %1, %2, %3;", "rrrr", lambda a, b, c: permuted(a, b, [c & 3] * 4)),
    "prmt_ecl": (
        "prmt.b32.ecl %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: permuted(a, b, [max(i, c & 3) for i in range(4)]),
    ),
    "prmt_ecr": (
        "prmt.b32.ecr %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: permuted(a, b, [min(i, c & 3) for i in range(4)]),
    ),
    "prmt_rc16": (
        "prmt.b32.rc16 %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: permuted(a, b, [(c & 1) * 2 + i % 2 for i in range(4)]),
    ),
    "dp4a": (
        "dp4a.s32.u32 %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: c + sum(s8(a >> i) * (b >> i & 255) for i in (0, 8, 16, 24)),
    ),
    "dp2a": (
        "dp2a.hi.u32.s32 %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: c + (a & 0xFFFF) * s8(b >> 16) + (a >> 16) * s8(b >> 24),
    ),
    "carry": (
        "{ .reg .u32 a, b, c, d; mov.b64 {a, b}, %1; mov.b64 {c, d}, %2; add.cc.u32 a, a, c; addc.u32 b, b, d;"
        " mov.b64 %0, {a, b}; }",
        "lll",
        lambda a, b: a + b,
    ),
    "borrow": (
        "{ .reg .u32 a, b, c, d; mov.b64 {a, b}, %1; mov.b64 {c, d}, %2; sub.cc.u32 a, a, c; subc.u32 b, b, d;"
        " mov.b64 %0, {a, b}; }",
        "lll",
        lambda a, b: a - b,
    ),
    "mad_carry": (
        "{ .reg .u32 l, h; mov.b64 {l, h}, %3; mad.lo.cc.u32 l, %1, %2, l; madc.hi.u32 h, %1, %2, h;"
        " mov.b64 %0, {l, h}; }",
        "lrrl",
        lambda a, b, c: a * b + c,
    ),
    "halves": ("{ .reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, a}; }", "rr", lambda a: a >> 16 | a << 16),
    "low_half": ("mov.b32 {%0, _}, %1;", "hr", lambda a: a & 0xFFFF),
    "set": ("set.lt.u32.s32 %0, %1, %2;", "rrr", lambda a, b: M32 if s32(a) < s32(b) else 0),
    "slct": ("slct.b32.s32 %0, %1, %2, %3;", "rrrr", lambda a, b, c: a if s32(c) >= 0 else b),
    "selp": (
        "{ .reg .pred p; setp.hs.u32 p, %1, %2; selp.b32 %0, %1, %2, p; }",
        "rrr",
        max,
    ),
    "joined": (
        "{ .reg .pred p, q, r; setp.ne.u32 r, %3, 0; setp.lt.and.s32 p|q, %1, %2, r; selp.u32 %0, 1, 0, p;"
        " @q add.u32 %0, %0, 2; }",
        "rrrr",
        lambda a, b, c: (s32(a) < s32(b) and c != 0) + 2 * (s32(a) >= s32(b) and c != 0),
    ),
    "logic": (
        "{ .reg .pred p, q; setp.gt.u32 p, %1, %2; setp.eq.u32 q, %2, 1; xor.pred p, p, q; not.pred q, q;"
        " or.pred p, p, !q; selp.u32 %0, 1, 0, p; }",
        "rrr",
        lambda a, b: int(((a > b) != (b == 1)) or b == 1),
    ),
    "cvt_u8": ("cvt.u32.u8 %0, %1;", "rr", lambda a: a & 255),
    "cvt_s8": ("cvt.s32.s8 %0, %1;", "rr", s8),
    "cvt_sat": ("cvt.sat.s8.s32 %0, %1;", "rr", lambda a: clamp(s32(a), -128, 127)),
    "cvt_sat_u": ("cvt.sat.u16.s32 %0, %1;", "hr", lambda a: clamp(s32(a), 0, 65535)),
    "cvt_wide": ("cvt.s64.s32 %0, %1;", "lr", s32),
    "cvt_narrow": ("cvt.u32.u64 %0, %1;", "rl", lambda a: a),
    "cvt_pack": (
        "cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;",
        "rrrr",
        lambda a, b, c: c << 16 | (clamp(s32(a), -128, 127) & 255) << 8 | clamp(s32(b), -128, 127) & 255,
    ),
}
INTEGER_SOURCE = "".join(kernel(name, text, letters) for name, (text, letters, _) in INTEGERS.items())


def integers(letter: str, seed: int) -> np.ndarray:
    """Make numbers of all sizes, including the special ones."""
    rng, bits = np.random.default_rng(seed), {"r": 32, "l": 64}[letter]
    x = [int(rng.integers(0, 2**63)) * 2 + 1 >> int(rng.integers(64 - bits, 64)) for _ in range(256)]
    special = [0, 1, 2, 3, 31, 32, 33, 63, 64, 255, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1]
    for i, at in enumerate(rng.permutation(256)[: 4 * len(special)]):
        x[at] = special[i % len(special)]
    return np.array([v & (2**bits - 1) for v in x], DTYPES[letter])


@on_each_device
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(cp: Any, name: str) -> None:
    _, letters, f = INTEGERS[name]
    inputs = [integers(letter, i + 1) for i, letter in enumerate(letters[1:])]
    if name == "bfe_64":  # the manual uses 8 bits of place and length, ptxas's code for 64 bits uses all
        inputs[1:] = [side & 255 for side in inputs[1:]]
    got = run(cp, INTEGER_SOURCE, name, letters, inputs)
    bits = 8 * got.dtype.itemsize
    expected = [f(*(int(v) for v in values)) & (2**bits - 1) for values in zip(*inputs, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, got.dtype))


# ------------------------------------------------------------------------------------ floats

NAN32 = 0x7FFFFFFF


def exact(x: float) -> Fraction:
    return Fraction(float(x))


def rounded(
    value: Fraction, mode: str, mantissa: int = 24, least: int = -149, largest: float = 3.4028234663852886e38
) -> float:
    """Round a number to this many bits, in a rounding mode of PTX. Exact zeros become +0."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) if abs(value) < Fraction(2) ** 900 else 900
    while Fraction(2) ** exponent > abs(value):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    step = Fraction(2) ** max(exponent - mantissa + 1, least)
    down = math.floor(value / step)
    rest = value / step - down
    if mode == "rn":
        units = down + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2))
    else:
        units = down + (rest > 0 and (mode == "rp" or (mode == "rz" and value < 0)))
    result = units * step
    if abs(result) > Fraction(largest):
        away = mode == "rn" or (mode == "rp" and value > 0) or (mode == "rm" and value < 0)
        return math.copysign(math.inf if away else largest, value)
    return float(result) if result else math.copysign(0.0, value)


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def floats(seed: int, n: int = 256) -> np.ndarray:
    """Make finite numbers: of similar sizes, whose sums need rounding, and of all sizes."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 12, n))).astype(np.float32)
    wild = rng.integers(0, 2**32, n // 4, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x[: n // 4] = np.where(np.isfinite(wild), wild, 1.5)
    return x


MODES = ("rn", "rz", "rp", "rm")
ROUNDED: dict[str, tuple[str, str, Callable[..., Fraction], str]] = {}
for _mode in MODES:
    ROUNDED |= {
        f"add_{_mode}": (f"add.{_mode}.f32 %0, %1, %2;", "fff", lambda a, b: a + b, _mode),
        f"sub_{_mode}": (f"sub.{_mode}.f32 %0, %1, %2;", "fff", lambda a, b: a - b, _mode),
        f"mul_{_mode}": (f"mul.{_mode}.f32 %0, %1, %2;", "fff", lambda a, b: a * b, _mode),
        f"fma_{_mode}": (f"fma.{_mode}.f32 %0, %1, %2, %3;", "ffff", lambda a, b, c: a * b + c, _mode),
        f"div_{_mode}": (f"div.{_mode}.f32 %0, %1, %2;", "fff", lambda a, b: a / b, _mode),
        f"rcp_{_mode}": (f"rcp.{_mode}.f32 %0, %1;", "ff", lambda a: 1 / a, _mode),
        f"from_double_{_mode}": (f"cvt.{_mode}.f32.f64 %0, %1;", "fd", lambda a: a, _mode),
        f"from_integer_{_mode}": (f"cvt.{_mode}.f32.u32 %0, %1;", "fr", lambda a: a, _mode),
        f"from_long_{_mode}": (f"cvt.{_mode}.f32.u64 %0, %1;", "fl", lambda a: a, _mode),
    }
ROUNDED_SOURCE = "".join(kernel(name, text, letters) for name, (text, letters, *_) in ROUNDED.items())


@on_each_device
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding(cp: Any, name: str) -> None:
    """All bits of results whose sums and products are not exactly zero."""
    _, letters, f, mode = ROUNDED[name]
    inputs: list[np.ndarray] = []
    for i, letter in enumerate(letters[1:]):
        if letter == "d":
            inputs.append(floats(i + 1).astype(np.float64) * (1 + 2.0**-26))
        else:
            inputs.append(floats(i + 1) if letter == "f" else integers(letter, i + 1))
    got = run(cp, ROUNDED_SOURCE, name, letters, inputs)
    values = [
        f(*(Fraction(int(v)) if isinstance(v, np.integer) else exact(v) for v in row))
        for row in zip(*inputs, strict=True)
    ]
    expected = np.array([rounded(value, mode) for value in values], np.float32)
    keep = np.array([value != 0 for value in values])
    np.testing.assert_array_equal(got.view(np.uint32)[keep], expected.view(np.uint32)[keep])


@on_each_device
@pytest.mark.parametrize("mode", MODES)
def test_roots_are_rounded(cp: Any, mode: str) -> None:
    x = np.abs(floats(5))
    source = "".join(kernel(f"sqrt_{m}", f"sqrt.{m}.f32 %0, %1;", "ff") for m in MODES)
    got = run(cp, source, f"sqrt_{mode}", "ff", [x])
    for value, root in zip(x, got, strict=True):
        below, above = exact(np.nextafter(root, np.float32(0))), exact(np.nextafter(root, np.float32(np.inf)))
        here, value = exact(root), exact(value)
        if mode == "rn":
            assert ((here + below) / 2) ** 2 <= value <= ((here + above) / 2) ** 2
        elif mode == "rp":
            assert below**2 < value <= here**2 or value == 0
        else:
            assert here**2 <= value < above**2


INF, N = np.inf, np.nan
SPECIAL: dict[str, tuple[str, list[tuple[float, ...]], list[float]]] = {
    "add_ftz": (
        "add.ftz.f32 %0, %1, %2;",
        [(1e-40, 1e-40), (1e-40, 1.0), (-1e-40, 0.0), (1.5e-38, -1.4e-38)],
        [0, 1, 0, 0],
    ),
    "add_sat": ("add.sat.f32 %0, %1, %2;", [(0.5, 0.25), (0.75, 0.5), (-1, 0.5), (N, 1)], [0.75, 1, 0, 0]),
    "mul_ftz": ("mul.rn.ftz.f32 %0, %1, %2;", [(1e-30, -1e-10), (3, 4), (INF, 0)], [-0.0, 12, N]),
    "fma_sat": ("fma.rn.sat.f32 %0, %1, %2, %1;", [(0.5, 0.5), (2, 2), (-1, 3)], [0.75, 1, 0]),
    "min": ("min.f32 %0, %1, %2;", [(1, 2), (N, 3), (-0.0, 0.0), (0.0, -0.0), (N, N)], [1, 3, -0.0, -0.0, N]),
    "max": ("max.f32 %0, %1, %2;", [(1, 2), (3, N), (-0.0, 0.0), (0.0, -0.0)], [2, 3, 0, 0]),
    "max_nan": ("max.NaN.f32 %0, %1, %2;", [(1, 2), (3, N)], [2, N]),
    "max_xorsign": ("max.xorsign.abs.f32 %0, %1, %2;", [(1, -2), (-3, -2), (-1, 0.5)], [-2, 3, -1]),
    "div_full": ("div.full.f32 %0, %1, %2;", [(1, 4), (INF, 3), (1, 0.0), (0, 0.0)], [0.25, INF, INF, N]),
    "div_approx": ("div.approx.f32 %0, %1, %2;", [(1, 4), (1, 2.0**127), (INF, 2.0**127)], [0.25, 0, N]),
    "copysign": ("copysign.f32 %0, %1, %2;", [(-1, 2), (1, -3)], [-2, 3]),
    "abs": ("abs.f32 %0, %1;", [(-1, 0), (-0.0, 0)], [1, 0]),
    "neg_ftz": ("neg.ftz.f32 %0, %1;", [(1, 0), (1e-40, 0)], [-1, -0.0]),
    "sat": ("cvt.sat.f32.f32 %0, %1;", [(2, 0), (0.5, 0), (-3, 0), (N, 0)], [1, 0.5, 0, 0]),
    "rni": ("cvt.rni.f32.f32 %0, %1;", [(2.5, 0), (3.5, 0), (-0.4, 0)], [2, 4, -0.0]),
    "rzi": ("cvt.rzi.f32.f32 %0, %1;", [(2.7, 0), (-2.7, 0)], [2, -2]),
    "rmi": ("cvt.rmi.f32.f32 %0, %1;", [(2.7, 0), (-2.2, 0)], [2, -3]),
    "rpi": ("cvt.rpi.f32.f32 %0, %1;", [(2.2, 0), (-2.7, 0)], [3, -2]),
    "unordered": (
        "{ .reg .pred p, q; setp.ltu.f32 p, %1, %2; setp.num.f32 q, %1, %2; selp.f32 %0, 0f40000000, 0f00000000, p;"
        " @q add.f32 %0, %0, 0f3F800000; }",
        [(1, 2), (2, 1), (N, 1)],
        [3, 1, 2],
    ),
    "ordered": (
        "{ .reg .pred p, q; setp.ne.f32 p, %1, %2; testp.finite.f32 q, %1; selp.f32 %0, 2.0, 0.0, p;"
        " @!q add.f32 %0, %0, 1.0; }",
        [(1, 2), (2, 2), (N, 1), (INF, 1)],
        [2, 0, 1, 3],
    ),
    "set_f32": ("set.ge.f32.f32 %0, %1, %2;", [(1, 2), (2, 2)], [0, 1]),
}
SPECIAL_SOURCE = "".join(kernel(name, text, "ff" + "f" * ("%2" in text)) for name, (text, *_) in SPECIAL.items())


@on_each_device
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(cp: Any, name: str) -> None:
    text, rows, expected = SPECIAL[name]
    columns = np.resize(np.array(rows, np.float32), (64, 2)).T.copy()
    got = run(cp, SPECIAL_SOURCE, name, "fff"[: 2 + ("%2" in text)], columns[: 1 + ("%2" in text)])[: len(rows)]
    want = np.array(expected, np.float32).view(np.uint32)
    np.testing.assert_array_equal(got.view(np.uint32), np.where(np.isnan(expected), NAN32, want))


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
TO_INTEGER = {
    f"{mode}_{to}_{source}": (mode, to, source)
    for mode, to, source in [
        *((mode, "s32", "f32") for mode in WHOLE),
        *(("rzi", to, source) for to in ("u32", "s64", "u64", "s16", "u8") for source in ("f32", "f64")),
        ("rzi", "s32", "f64"),
        ("rni", "s32", "f16"),
    ]
}
_LETTERS = {"8": "r", "16": "h", "32": "r", "64": "l"}


def to_integer_letters(to: str, source: str) -> str:
    return _LETTERS[to[1:]] + {"f32": "f", "f64": "d", "f16": "h"}[source]


TO_INTEGER_SOURCE = "".join(
    kernel(name, f"cvt.{mode}.{to}.{source} %0, %1;", to_integer_letters(to, source))
    for name, (mode, to, source) in TO_INTEGER.items()
)


@on_each_device
@pytest.mark.parametrize("name", TO_INTEGER)
def test_floats_to_integers(cp: Any, name: str) -> None:
    """Values out of range saturate; NaN is 0, or only the top bit if one side has 64 bits."""
    mode, to, source = TO_INTEGER[name]
    x = floats(9).astype(np.float64)
    x[64:80] = [0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 5e9, 1e19, 2e19, -1e19, INF, -INF, N, 254.9, 40000.0]
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[source]
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    got = run(
        cp, TO_INTEGER_SOURCE, name, to_integer_letters(to, source), [x.view(np.uint16) if source == "f16" else x]
    )
    bits, signed = int(to[1:]), to[0] == "s"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    nan = 2 ** (bits - 1) if bits == 64 or source == "f64" else 0
    register = 8 * got.dtype.itemsize
    for value, found in zip(x, got, strict=True):
        v = float(WHOLE[mode](value))
        expected = nan if math.isnan(v) else clamp(int(v), low, high) if math.isfinite(v) else (high if v > 0 else low)
        if math.isnan(v) and bits < 64 and source == "f64":
            continue  # (not on all of them: the register above the result)
        assert int(found) == expected & (2**register - 1), value


# ------------------------------------------------------------------------------------ 16 bits and 8

SMALL = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
PAIRS: dict[str, tuple[str, str, int, Callable[..., Any]]] = {}
for _kind in SMALL:
    PAIRS |= {
        f"fma_{_kind}": (f"fma.rn.{_kind}x2 %0, %1, %2, %3;", _kind, 3, lambda a, b, c: a * b + c),
        f"fma_relu_{_kind}": (
            f"fma.rn.relu.{_kind}x2 %0, %1, %2, %3;",
            _kind,
            3,
            lambda a, b, c: np.maximum(a * b + c, 0),
        ),
        f"add_{_kind}": (f"add.rn.{_kind}x2 %0, %1, %2;", _kind, 2, lambda a, b: a + b),
        f"sub_{_kind}": (f"sub.rn.{_kind}x2 %0, %1, %2;", _kind, 2, lambda a, b: a - b),
        f"mul_{_kind}": (f"mul.rn.{_kind}x2 %0, %1, %2;", _kind, 2, lambda a, b: a * b),
        f"min_{_kind}": (f"min.{_kind}x2 %0, %1, %2;", _kind, 2, np.fmin),
        f"max_{_kind}": (f"max.{_kind}x2 %0, %1, %2;", _kind, 2, np.fmax),
        f"neg_{_kind}": (f"neg.{_kind}x2 %0, %1;", _kind, 1, lambda a: -a),
        f"abs_{_kind}": (f"abs.{_kind}x2 %0, %1;", _kind, 1, np.abs),
    }
PAIRS["mul_sat_f16"] = ("mul.sat.f16x2 %0, %1, %2;", "f16", 2, lambda a, b: np.clip(a * b, 0, 1))
PAIRS["setp_f16"] = (
    "{ .reg .pred p, q; .reg .b32 l, h; setp.gt.f16x2 p|q, %1, %2; selp.b32 l, 0x3C00, 0, p; selp.b32 h, 0x3C00, 0, q;"
    " shl.b32 h, h, 16; or.b32 %0, l, h; }",
    "f16",
    2,
    lambda a, b: (a > b).astype(np.float64),
)
PAIRS["set_f16"] = ("set.gtu.f16x2.f16x2 %0, %1, %2;", "f16", 2, lambda a, b: (a > b).astype(np.float64))
PAIRS["set_mask"] = (
    "{ .reg .b32 m; set.le.u32.bf16x2 m, %1, %2; and.b32 %0, m, 0x3F803F80; }",
    "bf16",
    2,
    lambda a, b: (a <= b).astype(np.float64),
)
PAIR_SOURCE = "".join(kernel(name, text, "r" * (count + 1)) for name, (text, _, count, _) in PAIRS.items())


@on_each_device
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(cp: Any, name: str) -> None:
    """Each half is the exact result, rounded once."""
    _, kind, count, f = PAIRS[name]
    rng = np.random.default_rng(3)
    inputs = [(rng.standard_normal(512) * np.exp2(rng.integers(-6, 6, 512))).astype(SMALL[kind]) for _ in range(count)]
    got = run(cp, PAIR_SOURCE, name, "r" * (count + 1), [x.view(np.uint32) for x in inputs]).view(np.uint16)
    exact_values = f(*(x.astype(np.float64) for x in inputs))  # exact except for sums of numbers far apart
    np.testing.assert_array_equal(got, exact_values.astype(SMALL[kind]).view(np.uint16))


EIGHT = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
EIGHT_SOURCE = "".join(
    kernel(f"encode_{kind}", f"cvt.rn.satfinite.{kind}x2.f32 %0, %1, %2;", "hff")
    + kernel(f"relu_{kind}", f"cvt.rn.satfinite.relu.{kind}x2.f32 %0, %1, %2;", "hff")
    + kernel(f"halves_{kind}", f"cvt.rn.satfinite.{kind}x2.f16x2 %0, %1;", "hr")
    + kernel(f"decode_{kind}", f"cvt.rn.f16x2.{kind}x2 %0, %1;", "rh")
    for kind in EIGHT
)


@on_each_device
@pytest.mark.parametrize("kind", EIGHT)
def test_eight_bits(cp: Any, kind: str) -> None:
    """To nearest even; too large numbers become the largest one; NaN is 0x7f. Back: every code."""
    dtype = EIGHT[kind]
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.concatenate(
        [
            floats(7, 960),
            np.float32(
                [
                    0,
                    -0.0,
                    INF,
                    -INF,
                    N,
                    448,
                    464,
                    465,
                    57344,
                    61440,
                    2.0**-9,
                    2.0**-10,
                    2.0**-16,
                    2.0**-17,
                    3 * 2.0**-18,
                    -1e9,
                ]
            ),
        ]
    )
    x = np.concatenate([x, np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)[:48]]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
        expected = np.where(np.isnan(x), 0x7F, expected)
        relu = np.where(np.isnan(x), 0x7F, np.clip(x, 0, largest).astype(dtype).view(np.uint8) & 0x7F)
        half = x.astype(np.float16)
    other = x[::-1].copy()
    for name, want in (("encode", expected), ("relu", relu)):
        got = run(cp, EIGHT_SOURCE, f"{name}_{kind}", "hff", [x, other])
        np.testing.assert_array_equal(got >> 8, want)
        np.testing.assert_array_equal(got & 255, want[::-1])
    got = run(cp, EIGHT_SOURCE, f"halves_{kind}", "hr", [half.view(np.uint32)])
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.clip(half.astype(np.float32), -largest, largest).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(got.view(np.uint8), np.where(np.isnan(half), 0x7F, want))
    codes = np.arange(256, dtype=np.uint8)
    got = run(cp, EIGHT_SOURCE, f"decode_{kind}", "rh", [codes.view(np.uint16)]).view(np.float16)
    np.testing.assert_array_equal(got, codes.view(dtype).astype(np.float16))


TF32_SOURCE = kernel("away", "cvt.rna.tf32.f32 %0, %1;", "rf") + kernel("nearest", "cvt.rn.tf32.f32 %0, %1;", "rf")


@on_each_device
def test_tf32(cp: Any) -> None:
    x = floats(11)
    x[:4] = np.uint32([0x3F801000, 0x3F803000, 0xBF801000, 0x3F800FFF]).view(np.float32)  # ties, and just below one
    for name, mode in (("away", lambda r, down: r >= Fraction(1, 2)), ("nearest", None)):
        got = run(cp, TF32_SOURCE, name, "rf", [x])
        bits = x.view(np.uint32).astype(np.int64)
        up = 0x1000 if mode else 0xFFF + (bits >> 13 & 1)
        np.testing.assert_array_equal(got >> 13, (bits + up) >> 13)  # the hardware ignores the others


CONVERSIONS: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = {
    "f32_to_f16": ("cvt.rn.f16.f32 %0, %1;", "hf", lambda x: x.astype(np.float16).view(np.uint16)),
    "f32_to_bf16": ("cvt.rn.bf16.f32 %0, %1;", "hf", lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint16)),
    "f64_to_f16": ("cvt.rn.f16.f64 %0, %1;", "hd", lambda x: x.astype(np.float16).view(np.uint16)),
    "s32_to_f16": ("cvt.rn.f16.s32 %0, %1;", "hr", lambda x: x.view(np.int32).astype(np.float16).view(np.uint16)),
    "f16_to_f32": ("cvt.f32.f16 %0, %1;", "fh", lambda x: x.view(np.float16).astype(np.float32)),
    "bf16_to_f32": ("cvt.f32.bf16 %0, %1;", "fh", lambda x: x.view(ml_dtypes.bfloat16).astype(np.float32)),
    "f32_to_f64": ("cvt.f64.f32 %0, %1;", "df", lambda x: x.astype(np.float64)),
    "s32_to_f64": ("cvt.rn.f64.s32 %0, %1;", "dr", lambda x: x.view(np.int32).astype(np.float64)),
}
CONVERSION_SOURCE = "".join(kernel(name, text, letters) for name, (text, letters, _) in CONVERSIONS.items())


@on_each_device
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(cp: Any, name: str) -> None:
    _, letters, f = CONVERSIONS[name]
    x: np.ndarray = floats(13)
    if letters[1] == "d":
        x = x.astype(np.float64) * (1 + 2.0**-30)
    elif letters[1] == "h":
        x = np.arange(0x7C00, dtype=np.uint16) if "bf16" not in name else np.arange(0x7F80, dtype=np.uint16)
    elif letters[1] == "r":
        x = integers("r", 13)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(cp, CONVERSION_SOURCE, name, letters, [x]), f(x))


# ------------------------------------------------------------------------------------ doubles

DOUBLE_SOURCE = (
    kernel("multiply_add", "fma.rn.f64 %0, %1, %2, %3;", "dddd")
    + kernel("chain", "{ .reg .f64 t; mul.rn.f64 t, %1, %2; add.rn.f64 %0, t, %3; }", "dddd")
    + kernel("chain32", "{ .reg .f32 t; mul.rn.f32 t, %1, %2; add.rn.f32 %0, t, %3; }", "ffff")
    + kernel("quotient", "{ .reg .f64 t; sqrt.rn.f64 t, %2; div.rn.f64 %0, %1, t; }", "ddd")
)


@on_each_device
def test_doubles(cp: Any) -> None:
    rng = np.random.default_rng(17)
    a, b, c = rng.standard_normal((3, 64))
    c = -a * b * (1 + rng.integers(-2, 3, 64) * 2.0**-52)
    fused = [float(exact(x) * exact(y) + exact(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(run(cp, DOUBLE_SOURCE, "multiply_add", "dddd", [a, b, c]), fused)
    np.testing.assert_array_equal(run(cp, DOUBLE_SOURCE, "chain", "dddd", [a, b, c]), a * b + c)
    np.testing.assert_array_equal(run(cp, DOUBLE_SOURCE, "quotient", "ddd", [a, np.abs(b)]), a / np.sqrt(np.abs(b)))
    x, y = a.astype(np.float32), b.astype(np.float32)
    z = -x * y
    np.testing.assert_array_equal(run(cp, DOUBLE_SOURCE, "chain32", "ffff", [x, y, z]), x * y + z)
