"""wmma of tf32, of bytes and of double, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

SOURCE = cuda_text("engine_wmma")
TYPES = {  # types of the factors in CUDA and in memory, and of the sums
    "tf32": ("wmma::precision::tf32", "float", "float"),
    "int8": ("signed char", "signed char", "int"),
    "uint8": ("unsigned char", "unsigned char", "int"),
    "double": ("double", "double", "double"),
}
DTYPES = {"float": np.float32, "signed char": np.int8, "unsigned char": np.uint8, "int": np.int32, "double": np.float64}
CASES = [("tf32", 16, 16, 8), ("double", 8, 8, 4)]
CASES += [(name, *shape) for name in ("int8", "uint8") for shape in ((16, 16, 16), (32, 8, 16), (8, 32, 16))]


def run(
    cp: Any, kind: str, shape: tuple[int, int, int], arrays: list[np.ndarray], rows: tuple[bool, bool, bool]
) -> Any:
    """Compute 2 (A B + C), with each matrix in memory by rows or by columns."""
    (m, n, k), (factor, t, c) = shape, TYPES[kind]
    layouts = ["wmma::row_major" if by_rows else "wmma::col_major" for by_rows in rows[:2]]
    name = f"product<{m}, {n}, {k}, {factor}, {t}, {c}, {', '.join(layouts)}>"
    rounding = "for (auto& x : A.x) x = wmma::__float_to_tf32(x); for (auto& x : B.x) x = wmma::__float_to_tf32(x);"
    source = SOURCE.replace("ROUND", rounding if kind == "tf32" else "").replace("SCALED", "S")
    laid_out = [x if by_rows else np.ascontiguousarray(x.T) for x, by_rows in zip(arrays, rows, strict=True)]
    # The distance of rows is a multiple of 16 bytes.
    laid_out[:2] = [np.pad(x, ((0, 0), (0, -x.shape[1] % (16 // x.itemsize)))) for x in laid_out[:2]]
    out = cp.zeros(laid_out[2].shape, DTYPES[c])
    leading = [np.int32(x.shape[1]) for x in laid_out]
    kernel = compiled(cp, source, (name,)).get_function(name)
    kernel(
        (1,),
        (32,),
        (*(cp.asarray(x) for x in laid_out), out, *leading, np.int32(laid_out[0].size), np.bool_(not rows[2])),
    )
    return cp.asnumpy(out) if rows[2] else cp.asnumpy(out).T


def to_tf32(x: np.ndarray) -> np.ndarray:
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@on_each_device
@pytest.mark.parametrize("kind, m, n, k", CASES)
@pytest.mark.parametrize("rows", [(True, True, True), (True, False, False), (False, True, True), (False, False, False)])
def test_product(cp: Any, kind: str, m: int, n: int, k: int, rows: tuple[bool, bool, bool]) -> None:
    rng = np.random.default_rng(m + n)
    if kind in ("int8", "uint8"):
        dtype = np.dtype(kind)
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        a, b = (rng.integers(low, high + 1, s).astype(dtype) for s in ((m, k), (k, n)))
        c = rng.integers(-1000, 1000, (m, n)).astype(np.int32)
        exact = 2 * (a.astype(np.int64) @ b.astype(np.int64) + c)
        np.testing.assert_array_equal(run(cp, kind, (m, n, k), [a, b, c], rows), exact)
        return
    dtype = np.float32 if kind == "tf32" else np.float64
    a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
    if kind == "tf32":
        exact = 2 * (to_tf32(a).astype(np.float64) @ to_tf32(b).astype(np.float64) + c)
        np.testing.assert_allclose(run(cp, kind, (m, n, k), [a, b, c], rows), exact, rtol=3e-6, atol=3e-6)
    else:
        np.testing.assert_allclose(run(cp, kind, (m, n, k), [a, b, c], rows), 2 * (a @ b + c), rtol=1e-14, atol=1e-14)


@on_each_device
def test_exact_products_of_tf32(cp: Any) -> None:
    """Small whole numbers: nothing is rounded, so every bit is known."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-30, 31, s).astype(np.float32) for s in ((16, 8), (8, 16), (16, 16)))
    np.testing.assert_array_equal(run(cp, "tf32", (16, 16, 8), [a, b, c], (True, True, True)), 2 * (a @ b + c))


@on_each_device
def test_rounding_to_tf32(cp: Any) -> None:
    code = """
    #include <mma.h>
    extern "C" __global__ void narrow(const float* in, float* out) {
      out[threadIdx.x] = nvcuda::wmma::__float_to_tf32(in[threadIdx.x]);
    }"""
    rng = np.random.default_rng(4)
    values = rng.standard_normal(128).astype(np.float32)
    middles = (to_tf32(values[:32]).view(np.uint32) + np.uint32(0x1000)).view(np.float32)  # half a step away
    values[:32], values[32:36] = middles, [0.0, -0.0, np.inf, -np.inf]
    out = cp.zeros(128, cp.float32)
    compiled(cp, code).get_function("narrow")((1,), (128,), (cp.asarray(values), out))
    np.testing.assert_array_equal(cp.asnumpy(out).view(np.uint32)[:32], to_tf32(values[:32]).view(np.uint32))
    np.testing.assert_array_equal(cp.asnumpy(out)[32:36], values[32:36])
    np.testing.assert_array_equal(cp.asnumpy(out)[36:], to_tf32(values[36:]))


@on_each_device
@pytest.mark.parametrize("saturates", [False, True])
def test_sums_of_bytes_beyond_an_int(cp: Any, saturates: bool) -> None:
    code = """
    #include <mma.h>
    using namespace nvcuda;
    extern "C" __global__ void overflow(int* out, int start) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, wmma::row_major> a;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, wmma::col_major> b;
      wmma::fragment<wmma::accumulator, 16, 16, 16, int> sums;
      wmma::fill_fragment(a, 127);
      wmma::fill_fragment(b, start < 0 ? -127 : 127);
      wmma::fill_fragment(sums, start);
      wmma::mma_sync(sums, a, b, sums, SATURATES);
      wmma::store_matrix_sync(out, sums, 16, wmma::mem_row_major);
    }"""
    kernel = compiled(cp, code.replace("SATURATES", str(saturates).lower())).get_function("overflow")
    for start in (2**31 - 5, -(2**31) + 5):
        out = cp.zeros((16, 16), cp.int32)
        kernel((1,), (32,), (out, np.int32(start)))
        exact = start + 16 * 127 * 127 * (1 if start > 0 else -1)
        wrapped = (exact + 2**31) % 2**32 - 2**31
        expected = (2**31 - 1 if start > 0 else -(2**31)) if saturates else wrapped
        np.testing.assert_array_equal(cp.asnumpy(out), np.full((16, 16), expected))


@pytest.mark.parametrize("swap", [0, 2])
def test_accumulators_in_a_layout_that_no_gpu_has(swap: int) -> None:
    """The results are the same, but element 0 of a lane is another one: of row 0, or of row 8."""
    code = """
    #include <cuda_fp16.h>
    #include <mma.h>
    using namespace nvcuda;
    extern "C" __global__ void squared(const __half* a, const float* c, float* d, float* first) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> rows;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> columns;
      wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
      wmma::load_matrix_sync(rows, a, 16);
      wmma::load_matrix_sync(columns, a, 16);
      wmma::load_matrix_sync(sums, c, 16, wmma::mem_row_major);
      first[threadIdx.x] = sums.x[0];
      wmma::mma_sync(sums, rows, columns, sums);
      wmma::store_matrix_sync(d, sums, 16, wmma::mem_col_major);
    }"""
    a = np.random.default_rng(3).integers(-8, 9, (16, 16)).astype(np.float16)
    c = np.arange(256, dtype=np.float32).reshape(16, 16)
    d, first = engine.zeros((16, 16), np.float32), engine.zeros(32, np.float32)
    module = engine.RawModule(code=code, options=("-std=c++17", f"-D__ENGINE_WMMA_SWAP={swap}"))
    module.get_function("squared")((1,), (32,), (engine.asarray(a), engine.asarray(c), d, first))
    np.testing.assert_array_equal(np.asarray(d).T, a.astype(np.float32) @ a.astype(np.float32) + c)
    np.testing.assert_array_equal(np.asarray(first)[:4], 128 * (swap > 0) + np.array([0, 2, 4, 6]))
