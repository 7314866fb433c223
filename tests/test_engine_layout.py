"""Static `__shared__` arrays are laid out in the order of the source, each at a multiple of its type's alignment."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine
from helpers.engine import shared_layout
from helpers.xray import xray

# Wider than a gap of the checked build. The compiler must not see what an address is a multiple of.
ALIGNED = r"""
typedef unsigned long long Address;
static __device__ __align__(16384) float hidden[64];
__device__ __align__(8192) float table[64];
__device__ float before = 3;
__device__ __align__(8192) float given[4] = {1, 2, 3, 4};
struct alignas(8192) Rows { float x[2048]; };
__device__ Address rest(const volatile void *p, int n) {
  volatile Address at = (Address)p;
  return at % n;
}
extern "C" __global__ void far_apart(Address *out, int i) {
  __shared__ float odd[33];
  __shared__ __align__(8192) float tile[2048];
  __shared__ __align__(16384) float buffer[2][2048];
  __shared__ Rows rows;
  __shared__ float last;
  odd[i] = tile[i] = rows.x[i] = hidden[i] = table[i] = last = before + given[i];
  buffer[0][i] = buffer[1][i] = last + odd[i] + tile[i] + rows.x[i] + hidden[i] + table[i];
  out[0] = rest(tile, 8192), out[1] = rest(buffer, 16384), out[2] = rest(&rows, 8192);
  out[3] = rest(hidden, 16384), out[4] = rest(table, 8192), out[5] = rest(given, 8192);
  volatile Address other = (Address)&buffer[0][i];
  other = other ^ 8192;  // the other buffer
  *(float *)other = 7;
  out[6] = (Address)buffer[1][i];
}
"""

CODE = r"""
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;
typedef unsigned long long Address;

// Every array is written and read, or a GPU's compiler leaves it out.
#define USE(a) ((volatile char *)&a)[i]
#define AT(k, a) out[k] = (Address)&a - (Address)&first, USE(a) = 1, out[k + 16] = USE(a)
extern "C" __global__ void offsets(Address *out, int i) {
  __shared__ half first[256], second[256];
  __shared__ char odd[5];
  __shared__ float real[33];
  __shared__ char more[3];
  __shared__ double wide;
  __shared__ half last[3];
  AT(0, first);
  AT(1, second);
  AT(2, odd);
  AT(3, real);
  AT(4, more);
  AT(5, wide);
  AT(6, last);
  out[7] = (Address)first % 128;
}
template <int N> __global__ void of_template(Address *out, int i) {
  __shared__ half first[N];
  __shared__ char odd;
  __shared__ float second[N];
  AT(0, first);
  AT(1, odd);
  AT(2, second);
  out[7] = (Address)first % 128;
}
extern "C" __global__ void tiles(float *out, const half *in) {
  __shared__ half s_a[256], s_b[256];
  for (int i = threadIdx.x; i < 256; i += 32) s_a[i] = in[i], s_b[i] = in[256 + i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 0.0f);
  wmma::load_matrix_sync(a, s_a, 16);
  wmma::load_matrix_sync(b, s_b, 16);
  wmma::mma_sync(c, a, b, c);
  wmma::store_matrix_sync(out, c, 16, wmma::mem_row_major);
}
extern "C" __global__ void past_16_bytes(float *out, const half *in) {
  __shared__ half s[8 + 256];
  for (int i = threadIdx.x; i < 256; i += 32) s[8 + i] = in[i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::load_matrix_sync(a, s + 8, 16);
  float sum = 0;
  for (int i = 0; i < a.num_elements; i++) sum += __half2float(a.x[i]);
  out[threadIdx.x] = sum;
}
extern "C" __global__ void as_vectors(float *out, int i) {
  __shared__ char flag;
  __shared__ float odd[8];
  flag = 1;
  odd[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float4 v = *(float4 *)(odd + i);
  out[threadIdx.x] = v.x + v.w + flag;
}
"""
NAMES = ("of_template<7>", "of_template<100>")
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a compiler lays thread-locals out as it likes")


def module(cp: Any) -> Any:
    options = ("-std=c++17",)
    if cp is not engine:
        from helpers.attention import kernel

        options += kernel.wmma_headers()
    return compiled(cp, CODE, NAMES, options)


@linux
@on_each_device
@pytest.mark.skipif(not engine.compiler._is_gcc_on_linux(), reason="clang aligns arrays to 16 bytes")
def test_arrays_lie_as_a_gpu_has_them(cp: Any) -> None:
    out = cp.zeros(32, np.uint64)
    module(cp).get_function("offsets")((1,), (1,), (out, np.int32(0)))
    assert cp.asnumpy(out)[:8].tolist() == [0, 512, 1024, 1032, 1164, 1168, 1176, 0]
    for n in (7, 100):
        module(cp).get_function(f"of_template<{n}>")((1,), (1,), (out, np.int32(0)))
        first, odd, second, begin = cp.asnumpy(out)[[0, 1, 2, 7]].tolist()
        assert (first, odd, begin) == (0, 2 * n, 0)
        assert second in (-(-(odd + 1) // 4) * 4, -(-(odd + 1) // 16) * 16)  # g++ aligns some arrays more


@linux
def test_the_checked_build_has_the_same_addresses_modulo_128() -> None:
    fast, checked = engine.zeros(32, np.uint64), engine.zeros(32, np.uint64)
    for name in ("offsets", *NAMES):
        kernel = module(engine).get_function(name)
        kernel((1,), (1,), (fast, np.int32(0)))
        xray(kernel, (1,), (1,), (checked, np.int32(0))).assert_clean()
        assert (fast % 128 == checked % 128).all() and (checked[1:3] > fast[1:3]).all()


@on_each_device
def test_halves_for_tensor_cores(cp: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 16, 16)).astype(np.float16)
    out = cp.zeros((16, 16), np.float32)
    module(cp).get_function("tiles")((1,), (32,), (out, cp.asarray(x)))
    expected = x[0].astype(np.float32) @ x[1].astype(np.float32)
    np.testing.assert_allclose(cp.asnumpy(out), expected, rtol=1e-5, atol=1e-5)


@on_each_device
def test_a_matrix_at_a_multiple_of_16_bytes(cp: Any) -> None:
    """GPUs take it, and the documentation asks for 32 bytes: the X-ray says so."""
    x = cp.asarray(np.arange(256).astype(np.float16))
    out = cp.zeros(32, np.float32)
    kernel = module(cp).get_function("past_16_bytes")
    kernel((1,), (32,), (out, x))
    each = cp.asnumpy(out)
    if cp is engine:  # each element is held twice by 16 elements of 32 lanes, or once by 8
        (finding,) = xray(kernel, (1,), (32,), (out, x)).findings
        assert finding.kind == "misaligned" and "requires multiples of 32" in str(finding)
        assert CODE.splitlines()[finding.line - 1].strip() == "wmma::load_matrix_sync(a, s + 8, 16);"
    assert each.sum() in (np.arange(256).sum(), 2 * np.arange(256).sum())


@linux
def test_the_checked_build_sees_misaligned_vectors_of_shared_memory() -> None:
    """`odd` lies at 4 bytes past a round address, in the checked build too: odd + 3 is at a multiple of 16."""
    kernel = module(engine).get_function("as_vectors")
    out = engine.zeros(8, np.float32)
    if engine.compiler._is_gcc_on_linux():
        xray(kernel, (1,), (8,), (out, np.int32(3))).assert_clean()
        report = xray(kernel, (1,), (8,), (out, np.int32(0)))
        assert [f.kind for f in report.findings] == ["misaligned"]


def test_assembly_without_thread_locals_stays_as_it_is() -> None:
    text = "\t.text\nmain:\n\tret\n\t.section\t.rodata\nx:\n\t.zero 4\n"
    for redzones in (False, True):
        assert shared_layout.laid_out(text, backwards=True, redzones=redzones) == text


def test_alignments_wider_than_a_gap_hold_in_the_checked_build() -> None:
    kernel = engine.RawKernel(ALIGNED, "far_apart")
    plain, looked_at = (engine.zeros(7, np.uint64) for _ in range(2))
    kernel((1,), (1,), (plain, np.int32(0)))
    xray(kernel, (1,), (1,), (looked_at, np.int32(0))).assert_clean()
    assert plain.tolist() == looked_at.tolist() == [0] * 6 + [7]
