"""Arithmetic that C++ leaves undefined and a GPU does not: shifts by the width or more, real numbers that do not fit an
integer, integer division by zero. The expected values follow the PTX manual (shl, shr, cvt), worked out in Python."""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.attention import kernel
from helpers.attention.ladder import LADDER
from helpers.engine import arithmetic
from helpers.engine.cuda_source.source import blank_comments
from helpers.xray import xray

i32, u32, i64, u64 = np.int32, np.uint32, np.int64, np.uint64

# C type: (NumPy's, bits, is signed)
INTEGERS = {
    "int": (i32, 32, True),
    "unsigned": (u32, 32, False),
    "long long": (i64, 64, True),
    "unsigned long long": (u64, 64, False),
    "short": (np.int16, 16, True),
    "unsigned short": (np.uint16, 16, False),
    "signed char": (np.int8, 8, True),
    "unsigned char": (np.uint8, 8, False),
}

SHIFTS = cuda_text("engine_arithmetic_shifts")


def shift(value: int, count: int, bits: int, signed: bool, right: bool) -> int:
    """Compute PTX's shl and shr of a number with this many bits: the count is unsigned, and clamps."""
    count = min(count & 0xFFFFFFFF, bits)
    if right:
        return value >> count
    result = (value << count) & ((1 << bits) - 1)
    return result - (1 << bits) if signed and result >> (bits - 1) else result


@on_each_device
@pytest.mark.parametrize("count", ["int", "unsigned", "long long", "unsigned char"])
@pytest.mark.parametrize("value", INTEGERS)
def test_shifts_clamp(cp: Any, value: str, count: str) -> None:
    dtype, bits, signed = INTEGERS[value]
    counts = [0, 1, 5, 7, 8, 15, 16, 31, 32, 33, 40, 63, 64, 65, 100, 200]
    counts += [] if "unsigned" in count else [-1, -32, -(2**31)]
    limits = np.iinfo(dtype)
    values = [v for v in (0, 1, 2, 5, limits.max, limits.max - 6, limits.min, -1, -8) if limits.min <= v <= limits.max]
    pairs = [(v, c) for v in values for c in counts]
    x, n = np.array([v for v, _ in pairs], dtype), np.array([c for _, c in pairs], INTEGERS[count][0])
    out = [cp.zeros(size, dtype) for size in (x.size, x.size, 2 * x.size, x.size)]
    names = tuple(f"shifts<{a}, {b}>" for a in INTEGERS for b in ("int", "unsigned", "long long", "unsigned char"))
    function = compiled(cp, SHIFTS, names).get_function(f"shifts<{value}, {count}>")
    function((1,), (x.size,), (*out, cp.asarray(x), cp.asarray(n)))
    wide = max(bits, 32), signed or bits < 32  # narrow numbers become int
    left, right = (np.array([shift(v, c, *wide, r) for v, c in pairs], object) for r in (False, True))
    wrapped = [np.array([int(v) & ((1 << bits) - 1) for v in side], u64).astype(dtype) for side in (left, right)]
    for got, expected in zip(out, (*wrapped, np.stack(wrapped, 1).reshape(-1), wrapped[0]), strict=True):
        np.testing.assert_array_equal(cp.asnumpy(got), expected)


@on_each_device
def test_a_mask_of_all_bits(cp: Any) -> None:
    n = np.arange(33, dtype=i32)
    out = cp.zeros(33, u32)
    names = tuple(f"shifts<{a}, {b}>" for a in INTEGERS for b in ("int", "unsigned", "long long", "unsigned char"))
    compiled(cp, SHIFTS, names).get_function("masks")((1,), (33,), (out, cp.asarray(n)))
    np.testing.assert_array_equal(cp.asnumpy(out), [2**k - 1 for k in range(33)])


CONVERSIONS = cuda_text("engine_arithmetic_conversions")


def converted(x: float, double: bool, bits: int, signed: bool) -> int:
    """Compute cvt.rzi, through 32 bits for narrower integers."""
    wide = max(bits, 32)
    low, high = (-(1 << (wide - 1)), (1 << (wide - 1)) - 1) if signed else (0, (1 << wide) - 1)
    if math.isnan(x):
        result = 0 if wide == 32 and not double else 1 << (wide - 1)
    else:
        result = low if x == -math.inf else high if x == math.inf else min(max(math.trunc(x), low), high)
    result &= (1 << bits) - 1
    return result - (1 << bits) if signed and result >> (bits - 1) else result


REALS = [0.0, -0.0, 0.99, -0.99, 1.5, -1.5, 127.0, 128.5, -128.0, -129.0, 255.0, 256.0, 300.0, -5.0, 65535.0, 65536.0]
REALS += [3e10, -3e10, 1e19, -1e19, 2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**32 - 256]
REALS += [2.0**63, -(2.0**63), 2.0**64]
REALS += [1e30, -1e30, math.inf, -math.inf, math.nan, 1e-30]


@on_each_device
@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("integer", INTEGERS)
def test_conversions_saturate(cp: Any, integer: str, real: str) -> None:
    dtype, bits, signed = INTEGERS[integer]
    names = tuple(f"convert<{a}, {b}>" for a in INTEGERS for b in ("float", "double"))
    x = np.array(REALS, np.float32 if real == "float" else np.float64)
    out = cp.zeros((7, x.size), dtype)
    function = compiled(cp, CONVERSIONS, names).get_function(f"convert<{integer}, {real}>")
    function((1,), (x.size,), (out, cp.asarray(x), cp.zeros(1, dtype)))
    expected = [converted(v, real == "double", bits, signed) for v in x.tolist()]
    for row in cp.asnumpy(out):
        np.testing.assert_array_equal(row, np.array(expected, dtype))


@on_each_device
def test_conversions_in_every_form(cp: Any) -> None:
    names = tuple(f"convert<{a}, {b}>" for a in INTEGERS for b in ("float", "double"))
    module = compiled(cp, CONVERSIONS, names)
    out, uns = cp.zeros(12, i32), cp.zeros(2, u32)
    x = cp.asarray(np.array([3e10, -3e10, 8.5], np.float32))
    module.get_function("one_by_one")((1,), (1,), (out, uns, x, i32(2)))
    most, least = 2**31 - 1, -(2**31)
    expected = [24, least, least, -most, most, 1, most, least, 68, 76, 85, 93]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    np.testing.assert_array_equal(cp.asnumpy(uns), [0, 2**32 - 1])
    x, y = np.array(REALS, np.float32), np.array(REALS)
    for name, dtype in (("to_int", i32), ("to_uint", u32)):  # in a macro
        both = cp.zeros((2, x.size), dtype)
        module.get_function(name)((1,), (x.size,), (both, cp.asarray(x), cp.asarray(y)))
        for row, values, double in zip(cp.asnumpy(both), (x, y), (False, True), strict=True):
            expected = [converted(v, double, 32, dtype is i32) for v in values.tolist()]
            np.testing.assert_array_equal(row, np.array(expected, dtype))


DIVISIONS = r"""
template <typename T> __global__ void divide(T *q, const T *a, const T *b) {
  int i = threadIdx.x;
  q[i] = a[i] / b[i];
}
template <typename T> __global__ void both(T *q, T *r, const T *a, const T *b) {
  int i = threadIdx.x;
  q[i] = a[i] / b[i];
  r[i] = a[i] % b[i];
}
extern "C" __global__ void of_struct(int *out, const int4 *v, int k) {  // from memory, at a distance
  __shared__ int s[8];
  s[threadIdx.x] = 0;
  __syncthreads();
  out[threadIdx.x] = v[threadIdx.x].z / s[threadIdx.x * k] + 10;
}
"""
DIVIDE = ("int", "unsigned", "long long", "unsigned long long")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors divide otherwise")
@on_each_device
@pytest.mark.parametrize("kind", DIVIDE)
def test_divisions_do_not_trap(cp: Any, kind: str) -> None:
    dtype, bits, signed = INTEGERS[kind]
    values = [7, 0, 1, 123456, 2**31 - 1] + ([-7, -(2 ** (bits - 1)), -1] if signed else [2**bits - 1, 2**31])
    pairs = [(a, b) for a in values for b in [*values, 3]]
    a, b = (cp.asarray(np.array(side, dtype)) for side in zip(*pairs, strict=True))
    names = tuple(f"{name}<{t}>" for name in ("divide", "both") for t in DIVIDE)
    module = compiled(cp, DIVISIONS, names)
    out, again, rest = (cp.zeros(len(pairs), dtype) for _ in range(3))
    module.get_function(f"divide<{kind}>")((1,), (len(pairs),), (out, a, b))
    module.get_function(f"both<{kind}>")((1,), (len(pairs),), (again, rest, a, b))
    quotients, remainders = [], []
    for x, y in pairs:
        if y == 0:  # all bits; the low half if both 64-bit numbers fit into it
            q = (2**32 - 1 if 0 <= x < 2**32 else -1) if bits == 64 else -1
            quotients.append(q & (2**bits - 1))
            remainders.append(x)
        else:
            q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            quotients.append(q & (2**bits - 1))
            remainders.append(x - q * y)
    expected = np.array(quotients, u64).astype(dtype)
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    np.testing.assert_array_equal(cp.asnumpy(again), expected)
    found, wanted = cp.asnumpy(rest), np.array(remainders, dtype)
    if cp is not engine:  # PTX does not define it: an H200 returns the quotient, or the dividend
        by_zero = np.array([y == 0 for _, y in pairs])
        assert ((found == wanted) | (found == expected))[by_zero].all()
        wanted[by_zero] = found[by_zero]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors divide otherwise")
@on_each_device
def test_divisors_in_memory(cp: Any) -> None:
    names = tuple(f"{name}<{t}>" for name in ("divide", "both") for t in DIVIDE)
    out = cp.zeros(8, i32)
    v = cp.asarray(np.arange(32, dtype=i32))
    compiled(cp, DIVISIONS, names).get_function("of_struct")((1,), (8,), (out, v, i32(1)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.full(8, 9))


# ---------------------------------------------------------------- what a checked run says

HEADER = "__device__ int of_header(int n, float f) {\n  int shifted = 5 << n;\n  return shifted + (int)f;\n}\n"
DIVIDES = 'extern "C" __global__ void mean(int *out, const int *sum, int n) {\n  out[0] = sum[0] / n;\n}\n'


def test_the_xray_reports_divisions_by_zero() -> None:
    function = engine.RawKernel(DIVIDES, "mean")
    out, total = engine.zeros(1, i32), engine.asarray(np.array([6], i32))
    assert xray(function, (1,), (1,), (out, total, i32(3))).clean and out[0] == 2
    if platform.machine() in ("x86_64", "AMD64"):
        (finding,) = xray(function, (1,), (1,), (out, total, i32(0))).findings
        assert (finding.kind, finding.line, out[0]) == ("division by zero", 2, -1)


def test_the_xray_reports_what_is_not_mended(tmp_path: Any) -> None:
    """A user's header is compiled unchanged, so its results may differ from a GPU's."""
    (tmp_path / "own.h").write_text(HEADER)
    code = '#include "own.h"\nextern "C" __global__ void user(int *o, int n, float f) {\n  o[0] = of_header(n, f);\n}\n'
    function = engine.RawKernel(code, "user", options=(f"-I{tmp_path}",))
    out = engine.zeros(1, i32)
    assert xray(function, (1,), (1,), (out, i32(31), np.float32(2e9))).clean
    found = xray(function, (1,), (1,), (out, i32(37), np.float32(-1e10))).findings
    assert {f.kind for f in found} == {"shift", "conversion"}
    told = {f.kind: str(f) for f in found}
    assert "by 37 bits" in told["shift"] and "-1e+10 to an integer" in told["conversion"]


def test_the_xray_is_silent_where_results_are_a_gpus() -> None:
    code = 'extern "C" __global__ void mended(int *o, int n, float f) {\n  o[0] = (1 << n) + (int)f;\n  o[1] = f;\n}\n'
    function = engine.RawKernel(code, "mended")
    out = engine.zeros(2, i32)
    assert xray(function, (1,), (1,), (out, i32(32), np.float32(1e10))).clean
    assert out.tolist() == [2**31 - 1] * 2


# ---------------------------------------------------------------- the edited source


@pytest.mark.parametrize(
    ("code", "edited"),
    [
        ("a << b", "a << ::engine_left << b"),
        ("a >>= b;", "a >>= ::engine_right = b;"),
        ("x = (int)y;", "x = (int)(::engine_to<int>)y;"),
        ("f((unsigned char)-y)", "f((unsigned char)(::engine_to<unsigned char>)-y)"),
        ("static_cast<long long>(y)", "static_cast<long long>((::engine_in<long long>)(y))"),
        ("a[int(y) + 1]", "a[int((::engine_in<int>)(y)) + 1]"),
        ("x = (T)y + (T)(z);", "x = (T)(::engine_to<T>)y + (T)(z);"),
    ],
)
def test_edits_and_back(code: str, edited: str) -> None:
    assert arithmetic.edited(code) == edited
    assert arithmetic.original(edited) == code


@pytest.mark.parametrize(
    "code",
    [
        "std::vector<std::vector<int>> v;",
        "kernel<<<1, 2>>>(x);",
        "#if (1 << 4) > 2\n",
        '"a << b" /* c << d */ // e >> f',
        "sizeof(int) * n",
        "void f(int) const;",
        "auto g = [](int) -> int { return 1; };",
        "int (*h)(int) = 0;",
        "void load(unsigned (&r)[4]);",
        "T operator<<(T a, int n);",
    ],
)
def test_what_is_left_alone(code: str) -> None:
    assert arithmetic.edited(code) == code


# Sources that are edited in pieces, each of which ends with a } at the beginning of a line.
PIECES = {
    "functions": "int f(int x) {\n  return x << 2;\n}\nint g(float x) {\n  return (int)x >> 1;\n}\n",
    "a namespace": "namespace n {\nint f(int x) {\n  return x << 2;\n}\n}\nint g(int x) { return x >> 1; }",
    "an open < before a function": "int a = b < c\n{ int f = g < h\n}\n, n = x >> 1 >> 2;",
    "an open < in brackets": "int f(int a = b < c < (\n{\n}\n) >> 3, int d = 1 >> 2);",
    "brackets over two pieces": "int a = static_cast<int>(f([] {\n  return 1.5f;\n}\n)) << 3;",
    "brackets in a confusion": "int a = static_cast<int>(\n}\n{ 1.5f ) } << 3;",
    "a bracket that nothing opens": "int f() {\n}\n) >> 1; int n = b < c < d >> 2;",
    "a type of a later piece": "int f(float x) {\n  return (T)(x) >> 1;\n}\nusing T = int;\n",
    "a cast behind a piece": "int f() {\n}\n(int)x; x >> 1;",
    "a macro over two pieces": "#define F int f() { \\\n  return 1 << 2; \\\n}\n#if 1 << 3\n}\n#endif\nint n = 1 << 2;",
}


@pytest.mark.parametrize("code", [*PIECES.values(), *(kernel.source(stage.file) for stage in LADDER.values())])
def test_pieces_are_edited_as_the_whole(code: str) -> None:
    clean = blank_comments(code)
    assert len(arithmetic._END_OF_A_PIECE.findall(clean)) > 0
    whole = [*arithmetic._shifts(clean), *arithmetic._casts(clean, arithmetic._type_names(clean))]
    assert sorted(arithmetic._edits(clean)) == sorted(whole)


def test_a_source_that_the_edits_would_break_is_compiled_as_it_is() -> None:
    """`<<=` on a bit-field cannot be edited, because bit-fields have no references."""
    code = (
        "struct Bits { unsigned a : 5, b : 3; };\n"
        'extern "C" __global__ void fields(unsigned *out, int n) {\n'
        "  Bits bits = {1, 1};\n  bits.a <<= n;\n  out[0] = bits.a;\n}\n"
    )
    out = engine.zeros(1, u32)
    engine.RawKernel(code, "fields")((1,), (1,), (out, i32(3)))
    assert out[0] == 8


@pytest.mark.exhaustive(one_of_each=lambda stage: (stage.direction, stage.dtypes))
@pytest.mark.parametrize("stage", LADDER.values(), ids=lambda stage: stage.file)
def test_the_courses_kernels_are_compiled_as_edited(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the unedited text to fall back to; cached like any other build."""
    if reason := stage.unavailable():
        pytest.skip(reason)
    build = engine.compiler.build
    monkeypatch.setattr(engine.compiler, "build", lambda *what, **how: build(*what, **{**how, "plain": None}))
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "0")  # whether it compiles does not depend on it
    code = kernel.source(stage.file)
    engine.RawModule(code=code, options=(*kernel.options(stage.defines(64)), *kernel.headers(code))).compile()


def test_an_error_shows_the_line_as_it_is_written() -> None:
    code = 'extern "C" __global__ void wrong(int *out, int n, float f) {\n  out[0] = (int)f << n + missing;\n}\n'
    with pytest.raises(engine.CompileError) as caught:
        engine.RawModule(code=code).compile()
    assert "kernel.cu:2: error" in str(caught.value) and "engine_" not in str(caught.value)
    assert "out[0] = (int)f << n + missing;\n" + " " * 8 + " " * 26 + "^" in str(caught.value)


def test_an_assertion_shows_its_text_as_it_is_written() -> None:
    code = (
        'extern "C" __global__ void claims(int n, float f) {\n'
        "  assert((1 << n) == (int)f && static_cast<int>(f) > 0);\n}\n"
    )
    function = engine.RawKernel(code, "claims")
    with pytest.raises(engine.LaunchError, match=r"\(1 << n\) == \(int\)f && static_cast<int>\(f\) > 0 \["):
        function((1,), (1,), (i32(3), np.float32(9)))
