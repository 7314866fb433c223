"""SIMD within a word, DPX, dot products of bytes, and arithmetic with a rounding mode, against NumPy and fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine

SMALLEST_NORMAL = 2.0**-126  # of float32

KERNEL = """
extern "C" __global__ void apply(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned x = a[i], y = b[i], z = c[i];
  EXPRESSION
}
"""
EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80808080, 0x7F7F7F7F]


def words(count: int = 512) -> list[np.ndarray]:
    """Make three arrays of 32 bits: every pair of the edges, then random ones."""
    rng = np.random.default_rng(7)
    found = rng.integers(0, 2**32, (3, count), dtype=np.uint32)
    pairs = np.array([(x, y) for x in EDGES for y in EDGES], np.uint32).T
    found[:2, : pairs.shape[1]] = pairs
    return list(found)


def run(cp: Any, statement: str, outputs: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the words, and the statement's results for each three of them: [outputs, words]."""
    given = words()
    out = cp.zeros((given[0].size, outputs), cp.uint32)
    kernel = compiled(cp, KERNEL.replace("EXPRESSION", statement)).get_function("apply")
    kernel((given[0].size // 128,), (128,), (*(cp.asarray(x) for x in given), out))
    return given, cp.asnumpy(out).T


def lanes_of(word: np.ndarray, lanes: int, signed: bool) -> np.ndarray:
    kind = {(2, True): np.int16, (2, False): np.uint16, (4, True): np.int8, (4, False): np.uint8}[lanes, signed]
    return word[:, None].view(kind).astype(np.int64)


def as_words(lanes: np.ndarray) -> np.ndarray:
    kind = {2: np.uint16, 4: np.uint8}[lanes.shape[1]]
    return np.ascontiguousarray((lanes & np.iinfo(kind).max).astype(kind)).view(np.uint32)[:, 0]


def clip(lanes: np.ndarray, signed: bool) -> np.ndarray:
    bits = 32 // lanes.shape[1]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return np.clip(lanes, low, high)


# Odd sums are rounded away from zero: 3 / 2 = 2, -3 / 2 = -2.
LANEWISE: dict[str, tuple[bool, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "vadd": (True, lambda x, y: x + y),
    "vaddss": (True, lambda x, y: clip(x + y, True)),
    "vaddus": (False, lambda x, y: clip(x + y, False)),
    "vsub": (True, lambda x, y: x - y),
    "vsubss": (True, lambda x, y: clip(x - y, True)),
    "vsubus": (False, lambda x, y: clip(x - y, False)),
    "vabsdiffs": (True, lambda x, y: abs(x - y)),
    "vabsdiffu": (False, lambda x, y: abs(x - y)),
    "vavgs": (True, lambda x, y: np.sign(x + y) * ((abs(x + y) + 1) // 2)),
    "vavgu": (False, lambda x, y: (x + y + 1) // 2),
    "vhaddu": (False, lambda x, y: (x + y) // 2),
    "vmaxs": (True, np.maximum),
    "vmaxu": (False, np.maximum),
    "vmins": (True, np.minimum),
    "vminu": (False, np.minimum),
}
ALONE = {
    "vabs": abs,
    "vabsss": lambda x: clip(abs(x), True),
    "vneg": lambda x: -x,
    "vnegss": lambda x: clip(-x, True),
}
COMPARED = {"eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater}
COMPARED |= {"le": np.less_equal, "lt": np.less}


@on_each_device
@pytest.mark.parametrize("lanes", [2, 4])
def test_arithmetic_of_lanes(cp: Any, lanes: int) -> None:
    names = [*LANEWISE, *ALONE]
    calls = [f"__{name}{lanes}({'x' if name in ALONE else 'x, y'})" for name in names]
    code = " ".join(f"out[i * {len(calls)} + {n}] = {call};" for n, call in enumerate(calls))
    (a, b, _), out = run(cp, code, len(calls))
    for name, got in zip(names, out, strict=True):
        if name in ALONE:
            expected = ALONE[name](lanes_of(a, lanes, True))
        else:
            signed, f = LANEWISE[name]
            expected = f(lanes_of(a, lanes, signed), lanes_of(b, lanes, signed))
        np.testing.assert_array_equal(got, as_words(expected), f"__{name}{lanes}")


@on_each_device
@pytest.mark.parametrize("lanes", [2, 4])
def test_comparisons_of_lanes(cp: Any, lanes: int) -> None:
    names = [f"{op}{sign}" for op in COMPARED for sign in (("",) if op in ("eq", "ne") else ("s", "u"))]
    calls = [f"__{kind}{name}{lanes}(x, y)" for name in names for kind in ("vcmp", "vset")]
    code = " ".join(f"out[i * {len(calls)} + {n}] = {call};" for n, call in enumerate(calls))
    (a, b, _), out = run(cp, code, len(calls))
    for number, name in enumerate(names):
        signed = not name.endswith("u")
        true = COMPARED[name[:2]](lanes_of(a, lanes, signed), lanes_of(b, lanes, signed))
        np.testing.assert_array_equal(out[2 * number], as_words(np.where(true, -1, 0)), f"__vcmp{name}{lanes}")
        np.testing.assert_array_equal(out[2 * number + 1], as_words(np.where(true, 1, 0)), f"__vset{name}{lanes}")


@on_each_device
def test_sums_of_differences_and_dot_products(cp: Any) -> None:
    calls = ["__vsads2(x, y)", "__vsadu2(x, y)", "__vsads4(x, y)", "__vsadu4(x, y)"]
    calls += ["__dp4a((int)x, (int)y, (int)z)", "__dp4a(x, y, z)", "__dp2a_lo((int)x, (int)y, (int)z)"]
    calls += ["__dp2a_hi((int)x, (int)y, (int)z)", "__dp2a_lo(x, y, z)", "__dp2a_hi(x, y, z)"]
    calls += ["__dp4a(*(char4*)&x, *(char4*)&y, (int)z)", "__dp2a_hi(*(ushort2*)&x, *(uchar4*)&y, z)"]
    code = " ".join(f"out[i * {len(calls)} + {n}] = {call};" for n, call in enumerate(calls))
    (a, b, c), out = run(cp, code, len(calls))

    def differences(lanes: int, signed: bool) -> np.ndarray:
        return abs(lanes_of(a, lanes, signed) - lanes_of(b, lanes, signed)).sum(1)

    def dot(lanes: int, signed: bool, part: slice) -> np.ndarray:
        products = lanes_of(a, lanes, signed) * lanes_of(b, 4, signed)[:, part]
        return (c + products.sum(1)) & 0xFFFFFFFF

    low, high, every = slice(0, 2), slice(2, 4), slice(None)
    expected = [differences(2, True), differences(2, False), differences(4, True), differences(4, False)]
    expected += [dot(4, True, every), dot(4, False, every), dot(2, True, low), dot(2, True, high)]
    expected += [dot(2, False, low), dot(2, False, high), dot(4, True, every), dot(2, False, high)]
    for call, got, wanted in zip(calls, out, expected, strict=True):
        np.testing.assert_array_equal(got, wanted.astype(np.uint32), call)


@on_each_device
def test_minima_and_maxima_of_three_and_of_sums(cp: Any) -> None:
    calls, expected = [], []
    a, b, c = words()
    for name, best in (("max", np.maximum), ("min", np.minimum)):
        for kind, cast in (("s32", np.int32), ("u32", np.uint32)):
            x, y, z = (v.view(cast) for v in (a, b, c))
            sum_ = (a + b).view(cast)
            calls += [f"__vi{name}3_{kind}(x, y, z)", f"__viadd{name}_{kind}(x, y, z)"]
            expected += [best(best(x, y), z), best(sum_, z)]
            calls.append(f"[&]{{ bool first; unsigned r = __vib{name}_{kind}(x, y, &first); return r ^ first; }}()")
            expected.append(best(x, y) ^ (best(x, y) == x))
        x, y, z = (v.view(np.int32) for v in (a, b, c))
        calls += [f"__vi{name}_s32_relu(x, y)", f"__vi{name}3_s32_relu(x, y, z)", f"__viadd{name}_s32_relu(x, y, z)"]
        expected += [best(x, y), best(best(x, y), z), best((a + b).view(np.int32), z)]
        expected[-3:] = [np.maximum(e, 0) for e in expected[-3:]]
        for kind, signed in (("s16x2", True), ("u16x2", False)):
            x, y, z = (lanes_of(v, 2, signed) for v in (a, b, c))
            wrapped = lanes_of(as_words(x + y), 2, signed)
            calls += [f"__vi{name}3_{kind}(x, y, z)", f"__viadd{name}_{kind}(x, y, z)"]
            expected += [as_words(best(best(x, y), z)), as_words(best(wrapped, z))]
            calls.append(
                f"[&]{{ bool h, l; unsigned r = __vib{name}_{kind}(x, y, &h, &l); return r ^ (h << 16 | l); }}()"
            )
            expected.append(as_words(best(x, y) ^ (best(x, y) == x)))
            if signed:
                calls += [f"__vi{name}_{kind}_relu(x, y)", f"__viadd{name}_{kind}_relu(x, y, z)"]
                expected += [as_words(np.maximum(best(x, y), 0)), as_words(np.maximum(best(wrapped, z), 0))]
    code = " ".join(f"out[i * {len(calls)} + {n}] = (unsigned){call};" for n, call in enumerate(calls))
    _, out = run(cp, code, len(calls))
    for call, got, wanted in zip(calls, out, expected, strict=True):
        np.testing.assert_array_equal(got, np.asarray(wanted).astype(np.int64) & 0xFFFFFFFF, call)


# ---------------------------------------------------------------- rounding modes


def rounded(exact: Fraction, mode: str, kind: type[np.floating]) -> np.floating:
    """Round an exact number within a float format's range to the neighbour on the mode's side."""
    value = kind(float(exact)) if kind is np.float64 else nearest_float(exact)
    toward_zero = mode == "rz"
    down = mode == "rd" or (toward_zero and exact > 0)
    up = mode == "ru" or (toward_zero and exact < 0)
    if np.isinf(value):
        largest = np.finfo(kind).max
        return value if (value > 0 and up) or (value < 0 and down) else kind(np.copysign(largest, value))
    if down and Fraction(float(value)) > exact:
        return np.nextafter(value, kind(-np.inf))
    if up and Fraction(float(value)) < exact:
        return np.nextafter(value, kind(np.inf))
    return value


def nearest_float(exact: Fraction) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(float(exact))  # any neighbour of it will do: `rounded` checks both sides


FLOATS = [0.0, 1.0, -1.0, 3.0, 0.1, -0.7, 1e30, -3e38, 3.4e38, 1e-30, -1e-38, 1.5e-45, 16777217.0, 1 + 2**-23, 1e10]


@on_each_device
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_rounding_modes(cp: Any, kind: type[np.floating]) -> None:
    letter, fma, scalar = ("f", "__fmaf", "float") if kind is np.float32 else ("d", "__fma", "double")
    operations = {
        f"__{letter}add": lambda x, y, z: x + y,
        f"__{letter}sub": lambda x, y, z: x - y,
        f"__{letter}mul": lambda x, y, z: x * y,
        f"__{letter}div": lambda x, y, z: x / y if y else None,
        f"__{letter}rcp": lambda x, y, z: 1 / x if x else None,
        fma: lambda x, y, z: x * y + z,
    }
    calls = [
        f"{name}_{mode}({'x' if name.endswith('rcp') else 'x, y, z' if name == fma else 'x, y'})"
        for name in operations
        for mode in ("rz", "ru", "rd")
    ]
    stores = " ".join(f"out[i * {len(calls)} + {n}] = {call};" for n, call in enumerate(calls))
    code = f"""
    extern "C" __global__ void apply(const {scalar}* a, const {scalar}* b, const {scalar}* c, {scalar}* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      {scalar} x = a[i], y = b[i], z = c[i];
      {stores}
    }}"""
    rng = np.random.default_rng(3)
    a, b = (np.array([pair[i] for pair in [(x, y) for x in FLOATS for y in FLOATS]], kind) for i in range(2))
    more = rng.standard_normal((2, 256 - a.size)).astype(kind) * kind(100)
    a, b = np.append(a, more[0]), np.append(b, more[1])
    c = rng.standard_normal(256).astype(kind)
    out = cp.zeros((256, len(calls)), kind)
    compiled(cp, code).get_function("apply")((2,), (128,), (*(cp.asarray(v) for v in (a, b, c)), out))
    got = cp.asnumpy(out).T
    checked = 0
    for number, call in enumerate(calls):
        name, mode = call[: call.index("(")].rsplit("_", 1)
        for x, y, z, result in zip(a, b, c, got[number], strict=True):
            exact = operations[name](*(Fraction(float(v)) for v in (x, y, z)))
            if exact is None or abs(exact) > Fraction(float(np.finfo(kind).max)):
                continue
            wanted = rounded(exact, mode, kind)
            if cp is not engine and kind == np.float32 and any(0 < abs(v) < SMALLEST_NORMAL for v in (x, y, z, wanted)):
                continue  # CuPy compiles with -ftz=true
            assert result == wanted, f"{call} of {x!r}, {y!r}, {z!r}: {result!r}, and not {wanted!r}"
            checked += 1
    assert checked > 3000


@on_each_device
def test_rounding_modes_at_the_edges(cp: Any) -> None:
    code = """
    extern "C" __global__ void edges(float* out, float huge, float one, double* wide, double two) {
      out[0] = __fadd_rz(huge, huge); out[1] = __fadd_ru(huge, huge); out[2] = __fadd_rd(huge, huge);
      out[3] = __fmul_rd(-huge, huge); out[4] = __fmul_ru(-huge, huge);
      out[5] = __fadd_rd(one, -one); out[6] = __fadd_ru(one, -one); out[7] = __fsqrt_rd(2.0f * one);
      out[8] = __fsqrt_ru(2.0f * one); out[9] = __fsqrt_rz(2.0f * one); out[10] = __frcp_ru(3.0f * one);
      wide[0] = __dsqrt_rd(two); wide[1] = __dsqrt_ru(two); wide[2] = __dsqrt_rz(two); wide[3] = __dadd_rn(two, 1e-17);
    }"""
    out, wide = cp.zeros(11, cp.float32), cp.zeros(4, cp.float64)
    huge, one = np.float32(3e38), np.float32(1)
    compiled(cp, code).get_function("edges")((1,), (1,), (out, huge, one, wide, np.float64(2)))
    got, biggest = cp.asnumpy(out), np.finfo(np.float32).max
    np.testing.assert_array_equal(got[:5], [biggest, np.inf, biggest, -np.inf, -biggest])
    assert math.copysign(1, got[5]) == -1 and math.copysign(1, got[6]) == 1 and not got[5:7].any()
    root = np.float32(2**0.5)  # 1.41421354, which is below the root
    np.testing.assert_array_equal(got[7:10], [root, np.nextafter(root, np.float32(2)), root])
    assert got[10] == np.float32(1 / 3)  # 0.33333334, which is above it
    near = 2**0.5  # 1.4142135623730951, which is above it
    np.testing.assert_array_equal(cp.asnumpy(wide), [np.nextafter(near, 1), near, np.nextafter(near, 1), 2.0])
