"""What the tests of Hopper's instructions share: instructions as functions, tiles, tensor maps whose arrays live."""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

import numpy as np

from helpers import engine
from helpers.attention import compile_report
from helpers.engine import tensor_map
from helpers.engine.nvrtc import cupy_options

OPTIONS = ("-std=c++17", "-arch=sm_90a")

HEAD = r"""
#line 1 "head.cuh"
#include <cuda_fp16.h>
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
#define MAP const __grid_constant__ TensorMap
__device__ __forceinline__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(const void *b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect(const void *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(const void *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory");
}
__device__ __forceinline__ void wait(const void *b, int parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
               "bra again;\ndone:\n}" :: "r"(at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(const void *to, const TensorMap &map, const void *b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :: "r"(at(to)), "l"(&map), "r"(at(b)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store(const TensorMap &map, const void *from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               :: "l"(&map), "r"(at(from)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void bulk_add(float *to, const void *from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Of a tile of rows of 64 halves with the 128-byte swizzle: eight rows are 1024 bytes; panel: of the next 64 columns.
__device__ __forceinline__ unsigned long long tile(const void *p, int step = 0, int panel = 0) {
  return (unsigned long long)(((at(p) & 0x3ffff) + step) >> 4) | (unsigned long long)(panel >> 4) << 16 |
         (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(adds));
}
__device__ __forceinline__ void hold(float (&d)[4]) {
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
"""

_KEPT: list[Any] = []  # a map holds an address alone


def map_of(array: Any, box: tuple[int, ...], swizzle: int = 128) -> np.ndarray:
    """A tensor map of a device array, which is kept alive. box: the innermost dimension first.

    uint8, uint16: of any type of one byte, of two.
    """
    _KEPT.append(array)
    dims, strides = array.shape[::-1], array.strides[-2::-1]
    if not isinstance(array, engine.ndarray):
        return _by_the_driver(array.dtype.name, array.data.ptr, dims, strides, box, swizzle)
    return tensor_map.encode_tiled(array.dtype.name, array.ctypes.data, dims, strides, box, swizzle=swizzle)


def _by_the_driver(
    dtype: str, address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> np.ndarray:
    """The same of an array on a GPU, by cuTensorMapEncodeTiled."""
    room = np.zeros(192, np.uint8)
    start = -room.ctypes.data % 64
    kind = {"uint8": 0, "uint16": 1, "float16": 6, "float32": 7, "bfloat16": 9}[dtype]
    rank = len(dims)
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    error = encode(
        ctypes.c_void_p(room.ctypes.data + start),
        kind,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        {0: 0, 32: 1, 64: 2, 128: 3}[swizzle],
        2,
        0,
    )
    assert error == 0, error
    return room[start : start + 128].view("V128").copy()


def halves(*shape: int, seed: int = 0, cp: Any = engine) -> Any:
    """Small whole numbers in float16, on the device."""
    return cp.asarray(np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float16))


@functools.cache
def refused_by_ptxas(code: str, options: tuple[str, ...] = OPTIONS) -> str:
    """What NVRTC and ptxas say against a source for sm_90a: an error, or a warning that a build should fail on.

    "" where they take it, or are not installed.
    """
    try:
        compile_report.nvrtc_version()
    except compile_report.NvrtcMissing:
        return ""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        given = tuple(option for option in options if not option.startswith("-arch"))
        try:
            nvrtc.compileProgram(program, cupy_options(given, "sm_90a"))
        except nvrtc.NVRTCError as error:
            return f"{error}:\n{nvrtc.getProgramLog(program).strip()}"
        return "\n".join(re.findall(r".*\bC75\d\d\b.*", nvrtc.getProgramLog(program)))
    finally:
        nvrtc.destroyProgram(program)
