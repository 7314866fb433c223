"""Kernels from elsewhere are accepted as NVRTC and a GPU accept them, or refused as they refuse them."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine
from helpers.engine import libraries, nvrtc, tensor_map
from helpers.xray import xray

KERNELS = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
struct State { int values[32]; int last; };
extern __shared__ State of_file;
__global__ void never_defined(float* x);
cudaDeviceProp of_the_host;

K an_object(int* out) {
  extern __shared__ struct State state;
  const int t = threadIdx.x;
  state.values[t] = t;
  if (t == 31) state.last = 100;
  __syncthreads();
  out[t] = state.values[31 - t] + state.last;
}
K an_object_of_the_file(int* out) {
  of_file.values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = of_file.values[31 - threadIdx.x] + 100;
}
K shared_before_extern(int* out) {
  __shared__ __align__(16) extern int s[];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[31 - threadIdx.x] + 100;
}
K scopes(int* out) {
  const int t = threadIdx.x;
  out[t] = atomicCAS_block(out + t, 0, 31) + atomicCAS_system(out + t, 31, 0) - t + 100;
}
K headers(int* out) {
  const __half half = __float2half(31.f - threadIdx.x);
  const __nv_bfloat16 other = __float2bfloat16(100.f);
  out[threadIdx.x] = (int)(__half2float(half) + __bfloat162float(other));
}
K vshr(int* out) {
  const int t = threadIdx.x, a = (131 - t) << 2;
  int clamped, wrapped, left;
  asm("vshr.s32.s32.u32.clamp %0, %1, %2;" : "=r"(clamped) : "r"(-a), "r"(40));
  asm("vshr.u32.u32.u32.wrap %0, %1, %2;" : "=r"(wrapped) : "r"(a), "r"(34));
  asm("vshl.s32.u32.u32.clamp %0, %1, %2;" : "=r"(left) : "r"(a), "r"(32));
  out[t] = wrapped + clamped + 1 + left;
}
K other_lines(int* out) {  // a block of two warps, which meet at the barrier, wherever each of them stands
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x] + 68;
  } else {
    __syncthreads();
  }
}
"""
NAMES = re.findall(r"^K (\w+)\(", KERNELS, re.M)
KERNELS = KERNELS.replace("\nK ", '\nextern "C" __global__ void ')


@on_each_device
@pytest.mark.parametrize("name", NAMES)
def test_taken(name: str, cp: Any) -> None:
    out = cp.zeros(32, np.int32)
    threads = 64 if name == "other_lines" else 32
    module = compiled(cp, KERNELS, options=("-std=c++17",))
    module.get_function(name)((1,), (threads,), (out,), shared_mem=144)
    np.testing.assert_array_equal(cp.asnumpy(out), 131 - np.arange(32))


WGMMA = r"""
template <int ScaleD>
__device__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, %6, %7, %8, %9, %10;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "n"(ScaleD), "n"(1), "n"(1), "n"(0), "n"(0));
}
__device__ unsigned long long tile(const void* p) {  // 8 rows of 16 bytes follow one another, no swizzle
  const unsigned long long at = __cvta_generic_to_shared(p);
  return (at & 0x3ffff) >> 4 | 8ull << 16 | 16ull << 32;
}
extern "C" __global__ void __launch_bounds__(128) twice(float* out) {
  __shared__ __align__(128) unsigned short a[64 * 16], b[8 * 16];
  for (int i = threadIdx.x; i < 64 * 16; i += 128) a[i] = 0x3c00;
  if (threadIdx.x < 128) b[threadIdx.x] = 0x3c00;
  asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  float d[4] = {7, 7, 7, 7};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<0>(d, tile(a), tile(b));
  multiply<1>(d, tile(a), tile(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = d[0] + d[3];
}
"""


@on_each_device
def test_whether_wgmma_adds_may_be_a_number_of_the_compiler(cp: Any) -> None:
    """pranjalssh/fast.cu does so; setmaxnreg may stand in a kernel whose bounds give the threads alone."""
    out = cp.zeros(128, np.float32)
    compiled(cp, WGMMA, options=("-std=c++17", "-arch=sm_90a")).get_function("twice")((1,), (128,), (out,))
    assert (cp.asnumpy(out) == 2 * 2 * 16).all()


@on_each_device
def test_a_descriptor_of_a_pointer_that_was_only_cast(cp: Any) -> None:
    """Shared memory begins at a multiple of 4 GiB of the generic addresses, which wgmma_interface relies on."""
    code = WGMMA.replace("__cvta_generic_to_shared(p)", "(unsigned long long)p")
    assert code != WGMMA
    out = cp.zeros(128, np.float32)
    compiled(cp, code, options=("-std=c++17", "-arch=sm_90a")).get_function("twice")((1,), (128,), (out,))
    assert (cp.asnumpy(out) == 2 * 2 * 16).all()


CASTS = r"""
__device__ float word(unsigned long long at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"((unsigned)at) : "memory");
  return x;
}
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ __align__(128) float fixed[64];
  __shared__ unsigned long long bar;
  extern __shared__ __align__(128) float chosen[];
  const int t = threadIdx.x;
  fixed[t] = t, chosen[t] = 100 + t;
  __syncthreads();
  float wide;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(wide) : "l"(chosen + t) : "memory");
  const bool same = (unsigned)(size_t)(chosen + t) == (unsigned)__cvta_generic_to_shared(chosen + t);
  float sum = same + word((unsigned long long)(fixed + t)) + word((unsigned long long)(chosen + t)) + wide;
  __syncthreads();
  if (t == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "l"(&bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "l"(&bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                 :: "l"(fixed), "l"(in), "l"(&bar) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @p bra D; bra W; D: }"
               :: "l"(&bar) : "memory");
  out[blockIdx.x * 64 + t] = sum + fixed[t];
}
"""


def test_a_generic_pointer_has_the_shared_address_in_its_low_bits() -> None:
    """In each worker and in the X-ray. Several authors cast where CUDA asks for __cvta_generic_to_shared."""
    assert nvrtc.refusal(CASTS, ("-std=c++17", "-arch=sm_90a")) == ""
    kernel = engine.RawKernel(CASTS, "k", options=("-std=c++17",))
    given = engine.asarray(np.arange(64, dtype=np.float32) * 1000)
    expected = np.tile(201 + 1003 * np.arange(64, dtype=np.float32), 40)
    out = engine.zeros(40 * 64, np.float32)
    kernel((40,), (64,), (out, given), shared_mem=256)
    np.testing.assert_array_equal(engine.asnumpy(out), expected)
    out[...] = 0
    xray(kernel, (40,), (64,), (out, given), shared_mem=256).assert_clean()
    np.testing.assert_array_equal(engine.asnumpy(out), expected)


def test_options_of_nvcc_are_nvccs() -> None:
    code = 'extern "C" __global__ void k(int* x) { x[0] = 1; }'
    engine.RawModule(code=code, options=("-O3", "--expt-relaxed-constexpr"), backend="nvcc").compile()
    with pytest.raises(engine.CompileError, match="unrecognized option '-O3'"):
        engine.RawModule(code=code, options=("-O3",)).compile()


SCALARS = 'extern "C" __global__ void k(int* out, int n, float x) { out[0] = n + (int)x; }'


@pytest.mark.parametrize("number", [np.int64(-5), np.uint64(5), -5], ids=repr)
def test_long_integers_that_fit_are_taken(number: Any) -> None:
    out = engine.zeros(1, np.int32)
    engine.RawKernel(SCALARS, "k")((1,), (1,), (out, number, np.float32(1)))
    assert out[0] == int(number) + 1


def test_an_array_without_axes_is_no_scalar() -> None:
    given = engine.zeros(1, np.int32), np.int32(1), engine.asarray(np.float32(3))
    with pytest.raises(TypeError, match=r"float32 x\) of k is a scalar, .*CuPy passes the address: .*float\(x\)"):
        engine.RawKernel(SCALARS, "k")((1,), (1,), given)


@on_each_device
def test_pointers_of_a_file_are_the_devices(cp: Any) -> None:
    x = cp.zeros(1, np.int32)
    code = 'const char* s = "xy";\nextern "C" __global__ void k(int* x) { x[0] = s[1]; }'
    cp.RawModule(code=code).get_function("k")((1,), (1,), (x,))
    assert x[0] == ord("y")


def test_registers_are_not_made_up() -> None:
    kernel = engine.RawKernel(SCALARS, "k")
    assert kernel.attributes["max_threads_per_block"] == 1024 and not hasattr(kernel, "num_regs")
    with pytest.raises(AttributeError, match="num_regs is what a GPU's compiler decides"):
        kernel.num_regs  # noqa: B018


TILE = r"""
#include <cuda.h>
struct Counter {
  int value;
  __device__ Counter() {}
};
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy(const CUtensorMap* map, unsigned short* out) {
  __shared__ alignas(128) unsigned short tile[64 * 64];
  __shared__ Counter unused;
  __shared__ unsigned long long landed;
  if (threadIdx.x == 0) {
    unused.value = 0;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&landed)));
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 8192;" ::"r"(at(&landed)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2}], [%3];"
        ::"r"(at(tile)), "l"(map), "r"(0), "r"(at(&landed)) : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra AGAIN;\n}" ::"r"(at(&landed))
      : "memory");
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) {
    const int row = i / 64, column = i % 64;
    out[i] = tile[64 * row + 8 * (column / 8 ^ row % 8) + column % 8];
  }
}
extern "C" __global__ void swizzled(const __grid_constant__ CUtensorMap map, unsigned short* out) {
  copy(&map, out);
}
extern "C" __global__ void in_memory(const CUtensorMap* map, unsigned short* out) { copy(map, out); }
"""


def test_static_tiles_begin_where_swizzles_do() -> None:
    """A GPU's static shared memory begins at a multiple of 1024, so that tiles of so many bytes may ask for 128."""
    given, out = engine.array(np.arange(4096, dtype=np.uint16).reshape(64, 64)), engine.zeros((64, 64), np.uint16)
    its_map = tensor_map.encode_tiled("uint16", given.ctypes.data, (64, 64), (128,), (64, 64), swizzle=128)
    kernel = engine.RawKernel(TILE, "swizzled", options=("-std=c++17", "-arch=sm_90a"))
    kernel((1,), (64,), (its_map, out))
    assert (out == given).all()
    assert xray(kernel, (1,), (64,), (its_map, out)).clean and (out == given).all()


@pytest.mark.parametrize("dtype", ["V128", np.uint8])
def test_a_tensor_map_may_be_in_device_memory(dtype: Any) -> None:
    """A kernel then has its address, as before CUDA had `__grid_constant__`."""
    given, out = engine.array(np.arange(4096, dtype=np.uint16).reshape(64, 64)), engine.zeros((64, 64), np.uint16)
    its_map = tensor_map.encode_tiled("uint16", given.data.ptr, (64, 64), (128,), (64, 64), swizzle=128)
    kernel = engine.RawKernel(TILE, "in_memory", options=("-std=c++17", "-arch=sm_90a"))
    args = engine.asarray(its_map.view(dtype)), out
    kernel((1,), (64,), args)
    assert (out == given).all()
    out.fill(0)
    report = xray(kernel, (1,), (64,), args)
    assert report.clean and (out == given).all()
    assert {name: figures.read for name, figures in report.traffic.items()} == {"map": 0, "*map": 8192, "out": 0}


COPIES = r"""
#include <cooperative_groups.h>
#include <cuda/barrier>
extern "C" __global__ void reversed(const float4* in, float4* out) {
  __shared__ float4 s[64];
  __shared__ cuda::barrier<cuda::thread_scope_block> landed;
  if (threadIdx.x == 0) init(&landed, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(&s[threadIdx.x], &in[threadIdx.x], sizeof(float4), landed);
  landed.arrive_and_wait();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void copied(const float4* in, float4* out) {
  __shared__ float4 s[64];
  __shared__ cuda::barrier<cuda::thread_scope_block> landed;
  if (threadIdx.x == 0) init(&landed, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(cooperative_groups::this_thread_block(), s, in, cuda::aligned_size_t<16>(1024), landed);  // copied
  out[threadIdx.x] = s[threadIdx.x];  // too early
  landed.arrive_and_wait();
}
"""


@pytest.mark.skipif(libraries.folder() is None, reason="CuPy, which brings libcu++, is not installed")
def test_the_xray_of_vectors_that_a_library_copies() -> None:
    given, out = engine.asarray(np.arange(256, dtype=np.float32).reshape(64, 4)), engine.zeros((64, 4), np.float32)
    assert xray(engine.RawKernel(COPIES, "reversed", options=("-std=c++17",)), (1,), (64,), (given, out)).clean
    np.testing.assert_array_equal(engine.asnumpy(out), engine.asnumpy(given)[::-1])


@pytest.mark.skipif(libraries.folder() is None, reason="CuPy, which brings libcu++, is not installed")
def test_a_copy_in_a_librarys_function_is_at_the_kernels_line() -> None:
    """The compiler did not inline the function, and its own line would not help a reader."""
    given, out = engine.zeros((64, 4), np.float32), engine.zeros((64, 4), np.float32)
    [finding] = xray(engine.RawKernel(COPIES, "copied", options=("-std=c++17",)), (1,), (64,), (given, out)).findings
    line = {mark: 1 + number for number, text in enumerate(COPIES.splitlines()) for mark in [text.partition("// ")[2]]}
    assert f"at kernel.cu:{line['too early']}, while" in str(finding)
    assert f"at kernel.cu:{line['copied']} is in flight" in str(finding)


# ---------------------------------------------------------------- kernels that the preprocessor makes

MACROS = r"""
#define KERNEL extern "C" __global__
#define MAKE(n, v) KERNEL void n(int *o) { o[threadIdx.x] = v; }
#define FILL(T) fill_##T
#define BOUNDED(t) extern "C" __global__ void __launch_bounds__(t, 3)
#define EACH(X) X(one, 1) X(two, 2)
#define NAMED by_a_name
KERNEL void a(int *o) { o[threadIdx.x] = 10; }
KERNEL void b(int *o) { o[threadIdx.x] = 20; }
MAKE(c, 30)
EACH(MAKE)
extern "C" __global__ void FILL(int)(int *o) { o[threadIdx.x] = 40; }
BOUNDED(2 * 32) bounded(int *o) { o[threadIdx.x] = 50; }
extern "C" __global__ void NAMED(int *o) { o[threadIdx.x] = 60; }
#if 0
KERNEL void left_out(int *o) {}
#endif
OF_THE_OPTIONS void d(int *o) { o[threadIdx.x] = 70; }
"""


@on_each_device
def test_kernels_that_macros_make_and_name(cp: Any) -> None:
    options = ("-std=c++17", '-DOF_THE_OPTIONS=extern "C" __global__')
    module = cp.RawModule(code=MACROS, options=options)
    expected = {"a": 10, "b": 20, "c": 30, "one": 1, "two": 2, "fill_int": 40, "bounded": 50, "by_a_name": 60, "d": 70}
    for name, value in expected.items():
        out = cp.zeros(4, np.int32)
        kernel = module.get_function(name)
        kernel((1,), (4,), (out,))
        assert cp.asnumpy(out).tolist() == [value] * 4, name
    assert module.get_function("bounded").max_threads_per_block == 64
    if cp is engine:
        assert module.get_function("bounded").compiled().least_blocks == 3
        with pytest.raises(engine.LaunchError, match=r"no kernel 'left_out'; it has a, b, c, one, two, fill_int, "):
            module.get_function("left_out")


@pytest.mark.parametrize("how", ["quotes", "brackets"])
def test_kernels_in_a_header_of_ones_own(how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = '#pragma once\nextern "C" __global__ void own(int *o, float by) {\n  o[0] = (int)by;\n  o[5] = 1;\n}\n'
    (tmp_path / "own.cuh").write_text(own)
    monkeypatch.chdir(tmp_path)
    include, options = ('"own.cuh"', ()) if how == "quotes" else ("<own.cuh>", (f"-I{tmp_path}",))
    kernel = engine.RawKernel(f'#include {include}\nextern "C" __global__ void k(int *o) {{}}\n', "own", options)
    out = engine.zeros(6, np.int32)
    kernel((1,), (1,), (out, np.float32(3)))
    assert out.tolist() == [3, 0, 0, 0, 0, 1]
    with pytest.raises(TypeError, match=r"argument 1 \(float32 by\) of own got an int32"):
        kernel((1,), (1,), (out, np.int32(3)))


def test_a_current_folder_that_is_gone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    out = engine.zeros(1, np.int32)
    engine.RawKernel('extern "C" __global__ void k(int *o) { o[0] = 12321; }', "k")((1,), (1,), (out,))
    assert out[0] == 12321


# ---------------------------------------------------------------- what is said of what is missing

SAID = {
    "a template without its types": (
        "template <typename T> __global__ void k(T *o) {}",
        {"name_expressions": ("k",)},
        "name expression k: k is a template: write the instance, such as k<float>",
    ),
    "a function that is only declared": (
        'namespace n { __device__ float far(int a); }\nextern "C" __global__ void k(float *o) { o[0] = n::far(1); }',
        {},
        "n::far(int) is declared, but nowhere defined",
    ),
    "cuRAND's header for kernels": (
        '#include <curand_kernel.h>\nextern "C" __global__ void k(float *o) {}',
        {},
        "is cuRAND's header for kernels, which comes with the CUDA toolkit",
    ),
    "half as a parameter": ('extern "C" __global__ void k(half *o) {}', {}, "#include <cuda_fp16.h>"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_missing_is_named(name: str) -> None:
    code, how, said = SAID[name]
    with pytest.raises(engine.CompileError) as caught:
        engine.RawModule(code=code, **how).compile()
    assert said in str(caught.value) and "_Z" not in str(caught.value)


def test_cupy_s_headers_are_found_where_the_engine_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.folder.cache_clear()
    before = libraries.folder()
    libraries.folder.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", engine)
    try:
        assert libraries.folder() == before
    finally:
        libraries.folder.cache_clear()


BYTES = r"""
#ifdef COPIES
extern "C" __global__ void copy(char* to, const char* from, unsigned long long bytes) {
  const unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < bytes) to[i] = from[i];
}
#endif
"""


@on_each_device
@pytest.mark.parametrize("options", [(" -DCOPIES",), ("-D COPIES ", " -std=c++17"), (" -D", " COPIES=1")])
def test_a_kernel_for_bytes_of_any_array(cp: Any, options: tuple[str, ...]) -> None:
    """Char is what C calls a byte, as thinc's hash of rows does; cupy-knn has a blank before an option."""
    kernel = cp.RawKernel(BYTES, "copy", options=options)
    for dtype in (np.float32, np.uint64, np.complex64):
        given = cp.asarray(np.arange(20).astype(dtype))
        out = cp.zeros(20, dtype)
        kernel((2,), (128,), (out, given, np.uint64(given.nbytes)))
        np.testing.assert_array_equal(cp.asnumpy(out), np.arange(20).astype(dtype))


@on_each_device
def test_an_array_has_its_device(cp: Any) -> None:
    x = cp.zeros(3)
    assert x.device == cp.cuda.Device(0) and x[1:].device.id == 0
    assert x.device.attributes["MaxThreadsPerBlock"] == 1024


@on_each_device
@pytest.mark.parametrize("name", ["div", "exit", "gamma", "index", "rand", "random", "select", "time"])
@pytest.mark.parametrize("by", ['extern "C" ', ""])
def test_kernels_of_names_that_a_c_library_has(cp: Any, name: str, by: str) -> None:
    code = f"{by}__global__ void {name}(int *o) {{ o[threadIdx.x] = threadIdx.x + 7; }}"
    module = cp.RawModule(code=code, name_expressions=None if by else (name,))
    out = cp.zeros(32, np.int32)
    module.get_function(name)((1,), (32,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(32) + 7)
