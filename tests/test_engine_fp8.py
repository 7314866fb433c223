"""8-bit floats: every conversion, bit for bit against ml_dtypes, in ones, pairs and fours."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
on_formats = pytest.mark.parametrize("name", FORMATS)

FROM = """
#include <cuda_fp8.h>
extern "C" __global__ void narrow(
    const float* f, const double* d, const __half* h, const __nv_bfloat16* b, unsigned char* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __nv_fp8_NAME(f[i]).__x;
  out[n + i] = __nv_cvt_float_to_fp8(f[i], __NV_NOSAT, __NV_KIND);
  out[2 * n + i] = __nv_fp8_NAME(d[i]).__x;
  out[3 * n + i] = __nv_cvt_double_to_fp8(d[i], __NV_NOSAT, __NV_KIND);
  out[4 * n + i] = __nv_fp8_NAME(h[i]).__x;
  out[5 * n + i] = __nv_cvt_halfraw_to_fp8(h[i], __NV_NOSAT, __NV_KIND);
  out[6 * n + i] = __nv_fp8_NAME(b[i]).__x;
  out[7 * n + i] = __nv_cvt_bfloat16raw_to_fp8(b[i], __NV_NOSAT, __NV_KIND);
}
"""


def code_of(source: str, name: str) -> str:
    return source.replace("NAME", name).replace("KIND", name.upper())


def numbers(name: str) -> np.ndarray:
    """Return all numbers of the format, the midpoints of neighbours with the floats next to them, and others."""
    with np.errstate(invalid="ignore"):
        own = np.arange(256, dtype=np.uint8).view(FORMATS[name]).astype(np.float64)
    own = np.unique(own[np.isfinite(own)])
    middles = (own[1:] + own[:-1]) / 2
    found = [own, middles, *(np.nextafter(middles.astype(np.float32), np.float32(s)) for s in (-1e38, 1e38))]
    past = LARGEST[name] * np.array([1 + 2**-5, 1 + 2**-4, 1 + 2**-3, 1.2, 2, 1e9])
    rng = np.random.default_rng(5)
    found += [past, -past, [0.0, -0.0, np.inf, -np.inf, np.nan], rng.standard_normal(500) * 40, 2.0 ** -np.arange(30)]
    values = np.concatenate([np.asarray(v, np.float64) for v in found])
    return np.append(values, np.zeros(-values.size % 128))


def expected(values: np.ndarray, name: str, saturates: bool) -> np.ndarray:
    """Return ml_dtypes' bytes; a NaN is 0x7F."""
    values = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(FORMATS[name]).view(np.uint8)
    if saturates:
        large = np.array([LARGEST[name], -LARGEST[name]]).astype(FORMATS[name]).view(np.uint8)
        over = ~np.isfinite(found.view(FORMATS[name]).astype(np.float32)) & ~np.isnan(values)
        found = np.where(over, np.where(values > 0, large[0], large[1]), found)
    elif name == "e4m3":
        # There is no infinity: too large numbers become a NaN with their sign.
        over = np.isnan(found.view(FORMATS[name]).astype(np.float32)) & ~np.isnan(values)
        found = np.where(over, np.where(values > 0, 0x7F, 0xFF), found)
    return np.where(np.isnan(values), 0x7F, found).astype(np.uint8)


@on_each_device
@on_formats
def test_rounded_bit_for_bit(cp: Any, name: str) -> None:
    double = numbers(name)
    with np.errstate(over="ignore"):
        single, half = double.astype(np.float32), double.astype(np.float16)
    brain = single.astype(ml_dtypes.bfloat16)
    n = double.size
    out = cp.zeros((8, n), cp.uint8)
    given = [cp.asarray(v) for v in (single, double, half)]
    # CuPy does not always support ml_dtypes' bfloat16; a kernel only sees the bits.
    kernel = compiled(
        cp,
        code_of(FROM, name)
        .replace("const __nv_bfloat16* b", "const unsigned short* raw")
        .replace("int i =", "const __nv_bfloat16* b = (const __nv_bfloat16*)raw; int i ="),
    ).get_function("narrow")
    kernel((n // 128,), (128,), (*given, cp.asarray(brain.view(np.uint16)), out))
    rows = [v for value in (single, double, half, brain.astype(np.float32)) for v in (value, value)]
    for row, (got, values) in enumerate(zip(cp.asnumpy(out), rows, strict=True)):
        wanted = expected(values, name, saturates=row % 2 == 0)
        if values.dtype == np.float64:  # a double's NaN keeps its sign and two more bits
            got, wanted = got[~np.isnan(values)], wanted[~np.isnan(values)]
            values = values[~np.isnan(values)]
        different = got != wanted
        shown = [
            (v, hex(g), hex(w)) for v, g, w in zip(values[different], got[different], wanted[different], strict=True)
        ][:4]
        assert not different.any(), f"row {row}: {shown}"


TO = """
#include <cuda_fp8.h>
extern "C" __global__ void widen(const unsigned char* in, float* f, unsigned short* h, double* d, unsigned short* b,
                                 int* ints, long long* longs) {
  int i = threadIdx.x;
  __nv_fp8_NAME x;
  x.__x = in[i];
  f[i] = float(x);
  d[i] = double(x);
  h[i] = __half_as_ushort(__half(x));
  b[i] = __bfloat16_as_ushort(__nv_bfloat16(x));
  ints[6 * i] = int(x); ints[6 * i + 1] = (int)(unsigned)(x); ints[6 * i + 2] = (unsigned char)x;
  ints[6 * i + 3] = (signed char)x; ints[6 * i + 4] = (short)x; ints[6 * i + 5] = (bool)x;
  longs[i] = (long long)x;
}
"""


@on_each_device
@on_formats
def test_widened_bit_for_bit(cp: Any, name: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    outputs = [cp.zeros(256, t) for t in (cp.float32, cp.uint16, cp.float64, cp.uint16)]
    ints, longs = cp.zeros((256, 6), cp.int32), cp.zeros(256, cp.int64)
    kernel = compiled(cp, code_of(TO, name)).get_function("widen")
    kernel((1,), (256,), (cp.asarray(every), *outputs, ints, longs))
    values = every.view(FORMATS[name]).astype(np.float32)
    single, half, double, brain = (cp.asnumpy(out) for out in outputs)
    np.testing.assert_array_equal(single, values)
    np.testing.assert_array_equal(double, values)
    np.testing.assert_array_equal(np.signbit(single), np.signbit(values) & ~np.isnan(values))
    halves = np.where(np.isnan(values), 0x7FFF, values.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(half, halves)
    np.testing.assert_array_equal(
        brain, np.where(np.isnan(values), 0x7FFF, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    )
    whole = np.where(np.isnan(values), 0, np.trunc(np.clip(values.astype(np.float64), -(2.0**40), 2.0**40)))
    got = cp.asnumpy(ints)
    limits = [(-(2**31), 2**31 - 1), (0, 2**32 - 1), (0, 255), (-128, 127), (-(2**15), 2**15 - 1)]
    for column, (low, high) in enumerate(limits):
        wanted = np.clip(whole, low, high).astype(np.int64)
        np.testing.assert_array_equal(got[:, column].astype(np.int64) & 0xFFFFFFFF, wanted & 0xFFFFFFFF, str(column))
    np.testing.assert_array_equal(got[:, 5], (every & 0x7F) != 0)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(cp.asnumpy(longs)[finite], np.trunc(values[finite]).astype(np.int64))


GROUPS = """
#include <cuda_fp8.h>
extern "C" __global__ void groups(const float4* in, unsigned* fours, float4* back, unsigned short* pairs, float2* two,
                                  unsigned* mixed) {
  int i = threadIdx.x;
  __nv_fp8x4_NAME four(in[i]);
  fours[i] = four.__x;
  back[i] = float4(four);
  __nv_fp8x2_NAME pair(make_float2(in[i].x, in[i].y));
  pairs[i] = pair.__x;
  two[i] = float2(pair);
  __half2 low = __floats2half2_rn(in[i].x, in[i].y), high = __floats2half2_rn(in[i].z, in[i].w);
  mixed[2 * i] = __nv_fp8x4_NAME(low, high).__x;
  __half2 again(__nv_cvt_fp8x2_to_halfraw2(pair.__x, __NV_KIND));
  mixed[2 * i + 1] = *(unsigned*)&again;
}
"""


@on_each_device
@on_formats
def test_pairs_and_fours(cp: Any, name: str) -> None:
    values = np.random.default_rng(9).uniform(-60, 60, (64, 4)).astype(np.float16).astype(np.float32)
    fours, pairs = cp.zeros(64, cp.uint32), cp.zeros(64, cp.uint16)
    back, two, mixed = cp.zeros((64, 4), cp.float32), cp.zeros((64, 2), cp.float32), cp.zeros((64, 2), cp.uint32)
    kernel = compiled(cp, code_of(GROUPS, name)).get_function("groups")
    kernel((1,), (64,), (cp.asarray(values), fours, back, pairs, two, mixed))
    small = values.astype(FORMATS[name])
    wide = small.astype(np.float32)
    np.testing.assert_array_equal(cp.asnumpy(fours)[:, None].view(np.uint8), small.view(np.uint8))
    np.testing.assert_array_equal(cp.asnumpy(pairs)[:, None].view(np.uint8), small[:, :2].view(np.uint8))
    np.testing.assert_array_equal(cp.asnumpy(back), wide)
    np.testing.assert_array_equal(cp.asnumpy(two), wide[:, :2])
    np.testing.assert_array_equal(cp.asnumpy(mixed)[:, :1].copy().view(np.uint8), small.view(np.uint8))
    np.testing.assert_array_equal(cp.asnumpy(mixed)[:, 1:].copy().view(np.float16).astype(np.float32), wide[:, :2])


@on_each_device
def test_a_product_of_scaled_numbers(cp: Any) -> None:
    """An fp8 kernel's usual arithmetic works: integers and floats in, a scale, a sum in float."""
    code = """
    #include <cuda_fp8.h>
    extern "C" __global__ void dot(const __nv_fp8_e4m3* a, const __nv_fp8_e5m2* b, float scale, float* out) {
      float sum = 0;
      for (int i = 0; i < 32; ++i) sum += float(a[i]) * static_cast<float>(b[i]);
      out[0] = sum * scale + float(__nv_fp8_e4m3(17)) + float(__nv_fp8_e5m2((unsigned short)9));
    }"""
    rng = np.random.default_rng(2)
    a = rng.uniform(-8, 8, 32).astype(ml_dtypes.float8_e4m3fn)
    b = rng.uniform(-8, 8, 32).astype(ml_dtypes.float8_e5m2)
    out = cp.zeros(1, cp.float32)
    kernel = compiled(cp, code).get_function("dot")
    kernel((1,), (1,), (cp.asarray(a.view(np.uint8)), cp.asarray(b.view(np.uint8)), np.float32(0.5), out))
    exact = (a.astype(np.float64) * b.astype(np.float64)).sum() * 0.5 + 16 + 8
    np.testing.assert_allclose(cp.asnumpy(out), [exact], rtol=1e-6)


@on_each_device
def test_powers_of_two(cp: Any) -> None:
    code = """
    #include <cuda_fp8.h>
    extern "C" __global__ void scales(const float* in, unsigned char* out, float* back) {
      int i = threadIdx.x, n = blockDim.x;
      out[i] = __nv_fp8_e8m0(in[i]).__x;
      out[n + i] = __nv_cvt_float_to_e8m0(in[i], __NV_NOSAT, cudaRoundPosInf);
      out[2 * n + i] = __nv_cvt_float_to_e8m0(in[i], __NV_SATFINITE, cudaRoundZero);
      __nv_fp8_e8m0 scale;
      scale.__x = (unsigned char)i;
      back[i] = float(scale);
    }"""
    rng = np.random.default_rng(6)
    powers = 2.0 ** np.arange(-126, 128).astype(np.float64)
    values = np.concatenate([powers[::3], powers[::4] * 1.5, powers[1::5] * (1 + 2**-20), rng.uniform(0, 9, 40)])
    values = np.append(values, [3e38, np.inf, np.nan])[:256].astype(np.float32)
    values = np.append(values, np.ones(256 - values.size, np.float32))
    out, back = cp.zeros((3, 256), cp.uint8), cp.zeros(256, cp.float32)
    compiled(cp, code).get_function("scales")((1,), (256,), (cp.asarray(values), out, back))
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.log2(values.astype(np.float64)) + 127
    up, down = np.ceil(exponent), np.floor(exponent)
    nan, large = np.isnan(values), up >= 255
    np.testing.assert_array_equal(cp.asnumpy(out)[0], np.where(nan, 255, np.where(large, 254, up)))
    np.testing.assert_array_equal(cp.asnumpy(out)[1], np.where(nan | large, 255, up))
    np.testing.assert_array_equal(cp.asnumpy(out)[2], np.where(nan, 255, np.minimum(down, 254)))
    expected = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
    np.testing.assert_array_equal(cp.asnumpy(back), expected)
