"""Kernels with 8-bit products: they convert, permute and transpose bytes, and load boxes of bytes by TMA."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text
from hopper_tiles import HEAD, OPTIONS, map_of, refused_by_ptxas

from helpers import engine
from helpers.xray import xray

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

CONVERT = r"""
#include <cuda_fp8.h>
extern "C" __global__ void convert(const float *in, unsigned short *e4m3, unsigned short *e5m2, unsigned char *type) {
  int i = blockIdx.x * 128 + threadIdx.x;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(e4m3[i]) : "f"(-in[i]), "f"(in[i]));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(e5m2[i]) : "f"(-in[i]), "f"(in[i]));
  type[i] = __nv_fp8_e4m3(in[i]).__x;
}
extern "C" __global__ void back(const unsigned short *in, unsigned *e4m3, unsigned *e5m2) {
  int i = blockIdx.x * 128 + threadIdx.x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(e4m3[i]) : "h"(in[i]));
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(e5m2[i]) : "h"(in[i]));
}
"""


@on_each_device
def test_every_case_of_rounding(cp: Any) -> None:
    """Rounding changes at numbers that bfloat16 can represent: these and their neighbours are all cases."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    x = (upper | np.array([0, 1, 0xFFFF], np.uint32)).reshape(-1).view(np.float32)
    pairs = [cp.zeros(x.size, np.uint16) for _ in range(2)]
    single = cp.zeros(x.size, np.uint8)
    compiled(cp, CONVERT).get_function("convert")((x.size // 128,), (128,), (cp.asarray(x), *pairs, single))
    for pair, dtype, largest in zip(pairs, (E4M3, ml_dtypes.float8_e5m2), (448, 57344), strict=True):
        with np.errstate(invalid="ignore"):
            wanted = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
        wanted = np.where(np.isnan(x), 0x7F, wanted)
        got = cp.asnumpy(pair)
        np.testing.assert_array_equal(got & 0xFF, wanted)
        np.testing.assert_array_equal(got >> 8, np.where(np.isnan(x), 0x7F, wanted ^ 0x80))
        if dtype == E4M3:
            np.testing.assert_array_equal(cp.asnumpy(single), wanted)


@on_each_device
def test_every_pair_of_bytes_becomes_halves(cp: Any) -> None:
    pairs = np.arange(1 << 16).astype(np.uint16)
    out = [cp.zeros(1 << 16, np.uint32) for _ in range(2)]
    compiled(cp, CONVERT).get_function("back")((1 << 9,), (128,), (cp.asarray(pairs), *out))
    for words, dtype in zip(out, (E4M3, ml_dtypes.float8_e5m2), strict=True):
        wanted = pairs.view(np.uint8).view(dtype).astype(np.float16)
        bits = np.where(np.isnan(wanted), 0x7FFF, wanted.view(np.uint16))
        np.testing.assert_array_equal(cp.asnumpy(words).view(np.uint16), bits)


# Rows of bytes of K by a map of five dimensions: row i + 2 t + 8 j of each 16 in shared memory is row 4 t + 2 j + i.
ROWS = HEAD + cuda_text("engine_eights_rows")


def test_a_map_permutes_the_rows_of_a_matrix() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (64, 128)).astype(np.uint8)
    array, out = engine.asarray(rows), engine.zeros((32, 64), np.uint8)
    strides = (128, 4 * 128, 2 * 128, 16 * 128)
    given = engine.tensor_map.encode_tiled(
        "uint8", array.ctypes.data, (128, 2, 4, 2, 4), strides, (64, 2, 4, 2, 2), swizzle=64
    )
    compiled(engine, ROWS, options=OPTIONS).get_function("permuted")((1,), (128,), (given, out))
    order = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    chosen = [16 * block + row for block in (1, 2) for row in order]
    np.testing.assert_array_equal(engine.asnumpy(out), rows[chosen, 64:])


# O = P V. P (64 x KEYS floats, from 0 to 1) comes as a product's sums do: thread 4 g + t of a warp has of row g columns
# 2 t and 2 t + 1 of every eight. As e4m3 it goes into registers of A without shuffles, and then position p of each 16
# keys holds key 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. V (KEYS x 64 bytes) is transposed with its keys in this order.
PV = HEAD + cuda_text("engine_eights_pv")
PV = PV.replace("SUMS", ", ".join(f"%{i}" for i in range(32)))
PV = PV.replace("OUTPUTS", ", ".join(f'"+f"(d[{i}])' for i in range(32)))


def pv_arguments(cp: Any) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return the arguments of pv, and the expected result."""
    rng = np.random.default_rng(7)
    p, v = rng.random((64, 64), np.float32), rng.integers(-8, 9, (64, 64)).astype(E4M3)
    args = map_of(cp.asarray(v.view(np.uint8)), (64, 64), 64), cp.asarray(p), cp.zeros((64, 64), np.float32)
    return args, p.astype(E4M3).astype(np.float64) @ v.astype(np.float64)


@on_each_device
def test_weights_and_transposed_bytes_meet(cp: Any) -> None:
    args, expected = pv_arguments(cp)
    compiled(cp, PV, options=OPTIONS).get_function("pv")((1,), (128,), args)
    np.testing.assert_allclose(cp.asnumpy(args[-1]), expected, atol=64 * 8 * 2**-13 * 2)


def test_its_xray_counts_bytes_and_conflicts() -> None:
    args, _ = pv_arguments(engine)
    report = xray(compiled(engine, PV, options=OPTIONS).get_function("pv"), (1,), (128,), args)
    assert not report.findings
    v, vt = report.shared["v"], report.shared["vt"]
    assert (v.written, v.read) == (4096, 4096)  # by TMA, by ldmatrix
    assert (vt.written, vt.read) == (4096, 2 * 64 * 32)  # by stmatrix, by two products
    assert v.conflicts == vt.conflicts == 0
    assert report.tensor_flop == 2 * 64 * 64 * 64


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("bug", "says"),
    [(1, "no proxy fence"), (2, "no wgmma fence"), (3, "race"), (4, "not waited for")],
)
def test_its_xray_finds_what_is_missing(bug: int, says: str) -> None:
    args, _ = pv_arguments(engine)
    kernel = compiled(engine, PV, options=(*OPTIONS, f"-DBUG={bug}")).get_function("pv")
    report = xray(kernel, (1,), (128,), args, write_back=False)
    assert any(says in str(finding) for finding in report.findings), report.findings


def test_ptxas_takes_these_kernels() -> None:
    assert refused_by_ptxas(ROWS) == ""
    assert refused_by_ptxas(PV) == ""
