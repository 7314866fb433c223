"""Kernels from other projects are accepted or refused as by NVRTC and a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import libraries, nvrtc, tensor_map
from helpers.xray import xray

KERNELS = cuda_text("engine_foreign")
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


WGMMA = cuda_text("engine_foreign_wgmma")


@on_each_device
def test_whether_wgmma_adds_may_be_a_number_of_the_compiler(cp: Any) -> None:
    """pranjalssh/fast.cu does so; setmaxnreg is allowed if a kernel's bounds give only the threads."""
    out = cp.zeros(128, np.float32)
    compiled(cp, WGMMA, options=("-std=c++17", "-arch=sm_90a")).get_function("twice")((1,), (128,), (out,))
    assert (cp.asnumpy(out) == 2 * 2 * 16).all()


@on_each_device
def test_a_descriptor_of_a_pointer_that_was_only_cast(cp: Any) -> None:
    """Shared memory begins at a multiple of 4 GiB in generic addresses; wgmma_interface relies on that."""
    code = WGMMA.replace("__cvta_generic_to_shared(p)", "(unsigned long long)p")
    assert code != WGMMA
    out = cp.zeros(128, np.float32)
    compiled(cp, code, options=("-std=c++17", "-arch=sm_90a")).get_function("twice")((1,), (128,), (out,))
    assert (cp.asnumpy(out) == 2 * 2 * 16).all()


CASTS = cuda_text("engine_foreign_casts")


def test_a_generic_pointer_has_the_shared_address_in_its_low_bits() -> None:
    """In each worker and in the X-ray. Several authors cast where CUDA requires __cvta_generic_to_shared."""
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


TILE = cuda_text("engine_foreign_tile")


def test_static_tiles_begin_where_swizzles_do() -> None:
    """A GPU's static shared memory begins at a multiple of 1024, so an alignment of 128 suffices for such tiles."""
    given, out = engine.array(np.arange(4096, dtype=np.uint16).reshape(64, 64)), engine.zeros((64, 64), np.uint16)
    its_map = tensor_map.encode_tiled("uint16", given.ctypes.data, (64, 64), (128,), (64, 64), swizzle=128)
    kernel = engine.RawKernel(TILE, "swizzled", options=("-std=c++17", "-arch=sm_90a"))
    kernel((1,), (64,), (its_map, out))
    assert (out == given).all()
    assert xray(kernel, (1,), (64,), (its_map, out)).clean and (out == given).all()


@pytest.mark.parametrize("dtype", ["V128", np.uint8])
def test_a_tensor_map_may_be_in_device_memory(dtype: Any) -> None:
    """A kernel then gets its address, as before CUDA had `__grid_constant__`."""
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


COPIES = cuda_text("engine_foreign_copies")


@pytest.mark.skipif(libraries.folder() is None, reason="CuPy, which brings libcu++, is not installed")
def test_the_xray_of_vectors_that_a_library_copies() -> None:
    given, out = engine.asarray(np.arange(256, dtype=np.float32).reshape(64, 4)), engine.zeros((64, 4), np.float32)
    assert xray(engine.RawKernel(COPIES, "reversed", options=("-std=c++17",)), (1,), (64,), (given, out)).clean
    np.testing.assert_array_equal(engine.asnumpy(out), engine.asnumpy(given)[::-1])


@pytest.mark.skipif(libraries.folder() is None, reason="CuPy, which brings libcu++, is not installed")
def test_a_copy_in_a_librarys_function_is_at_the_kernels_line() -> None:
    """The compiler did not inline the function, and the library's line would not help a reader."""
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


# ---------------------------------------------------------------- messages about missing features

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
    """Char is C's name for a byte, as in thinc's hash of rows; cupy-knn has a blank before an option."""
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
