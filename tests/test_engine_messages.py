"""For a source that does not compile, the engine shows the kernel's own line, and names what it lacks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import CompileError, LaunchError, messages

KERNEL = 'extern "C" __global__ void k(float *a) {{\n{body}\n}}\n'


def refusal(code: str, **how: Any) -> list[str]:
    """Return the lines of the message with which the engine refuses a source."""
    with pytest.raises(CompileError) as caught:
        engine.RawModule(code=code, **how).compile()
    return str(caught.value).splitlines()


# ---------------------------------------------------------------- dynamic shared memory


DYNAMIC = """
extern "C" __global__ void fill(float *a, int at) {
  extern __shared__ float s[];
  s[threadIdx.x + at] = 1;  // fill
  a[threadIdx.x] = s[threadIdx.x + at];
}
extern "C" __global__ void none(float *a, size_t address) { *(float *)address = a[0]; }
"""


@pytest.mark.parametrize("at", [0, 1000])
def test_a_forgotten_shared_mem(at: int) -> None:
    kernel, a = engine.RawModule(code=DYNAMIC).get_function("fill"), engine.zeros(32, np.float32)
    with pytest.raises(LaunchError, match="the launch gave 0 bytes of dynamic shared memory") as caught:
        kernel((1,), (32,), (a, np.int32(at)))
    assert f"byte {4 * at} of dynamic shared memory (extern __shared__)" in str(caught.value)
    assert "shared_mem=bytes" in str(caught.value) and "kernel.cu:4" in str(caught.value)
    with pytest.raises(LaunchError, match="of dynamic shared memory, which has 128 bytes"):
        kernel((1,), (32,), (a, np.int32(at + 32)), shared_mem=128)
    kernel((1,), (32,), (a, np.int32(at)), shared_mem=4 * (at + 32))
    assert (a == 1).all()


def test_a_wild_pointer_is_not_taken_for_shared_memory() -> None:
    kernel = engine.RawModule(code=DYNAMIC).get_function("none")
    with pytest.raises(LaunchError, match="address 0x24680, which is far from every array"):
        kernel((1,), (1,), (engine.zeros(8, np.float32), np.uint64(0x24680)))


IN_MACROS = cuda_text("engine_messages_in_macros")


@on_each_device
def test_extern_shared_in_a_macro(cp: Any) -> None:
    module = compiled(cp, IN_MACROS, ("rotated<double>",))
    a = cp.asarray(np.arange(64, dtype=np.float32))
    module.get_function("reversed")((1,), (64,), (a,), shared_mem=256)
    assert cp.asnumpy(a).tolist() == list(range(63, -1, -1))
    b = cp.asarray(np.arange(64, dtype=np.float64))
    module.get_function("rotated<double>")((1,), (64,), (b,), shared_mem=512)
    assert cp.asnumpy(b).tolist() == [*range(1, 64), 0]


def test_extern_shared_in_a_macro_that_the_engine_cannot_follow() -> None:
    code = "#define SHARED(T, name) extern __shared__ T name[]\nSHARED(float, s);\n" + KERNEL.format(
        body="  a[0] = s[0];"
    )
    first, second, *_ = refusal(code)
    assert first.startswith("kernel.cu:2: error: this macro declares an extern __shared__ array outside of a function")
    assert second == "     2 | SHARED(float, s);"
    code = "#define SHARED extern __shared__\n" + KERNEL.format(body="  SHARED float s[];\n  a[0] = s[0];")
    (line,) = refusal(code)
    assert "a macro that holds extern __shared__" in line and "extern __shared__ float s[];" in line


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize("header", ["cuda_egl_interop.h", "cub/nothing.cuh", "cuda/nothing", "texture_types.h"])
def test_a_header_of_cuda_that_the_engine_lacks(header: str) -> None:
    first, second, *_ = refusal(f"\n#include <{header}>\n" + KERNEL.format(body=""))
    assert first.startswith(f"kernel.cu:2: error: <{header}> is a header of CUDA that the CPU engine does not have")
    assert "No such file" not in first and second == f"     2 | #include <{header}>"
    for known in ("cuda_fp16.h", "mma.h", "cooperative_groups.h", "cooperative_groups/reduce.h"):
        assert f" {known}, " in first


def test_the_headers_that_are_named_compile() -> None:
    names = messages.available_headers()
    assert not [name for name in names if "engine" in name]
    engine.RawModule(code="".join(f"#include <{name}>\n" for name in names) + KERNEL.format(body="")).compile()


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("<cublas_v2.h>", "belongs to a library that the host calls"),
        ("<curand_kernel.h>", "is cuRAND's header for kernels"),
        ("<cutlass/cutlass.h>", "belongs to CUTLASS"),
        ("<torch/extension.h>", "belongs to PyTorch's host code"),
        ('"mine.cuh"', "mine.cuh was not found. Your own headers are looked up in the current folder"),
    ],
)
def test_a_header_of_others(header: str, says: str) -> None:
    first, second, *_ = refusal(f"#include {header}\n" + KERNEL.format(body=""))
    assert first.startswith("kernel.cu:1: error: ") and says in first
    assert second == f"     1 | #include {header}"


# ---------------------------------------------------------------- braces


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (KERNEL.format(body="  if (threadIdx.x == 0) {\n    a[0] = 1;"), 2),
        (KERNEL.format(body="  for (int i = 0; i < 4; ++i) {\n    if (i) {\n      a[i] = 1;\n  }"), 3),
        ('extern "C" __global__ void k(float *a) {\n  a[0] = 1;\n\n' + KERNEL.replace("k(", "q(").format(body=""), 1),
        ("// {\n#define TWICE {{\n" + KERNEL.format(body='  a[0] = "{"[0]; {'), 4),
        (KERNEL.format(body="#if N > 4\n  if (a) {\n#else\n  {\n#endif\n  }\n  {"), 8),
        ('#line 40 "mine.cu"\n' + KERNEL.format(body="  do {\n  a[0] = 1;"), 41),
    ],
)
def test_a_missing_closing_brace(code: str, line: int) -> None:
    first, second = refusal(code)
    file = "mine.cu" if "#line" in code else "kernel.cu"
    assert first == f"{file}:{line}: error: the brace {{ that opens here is never closed: a }} is missing"
    assert second.startswith(f"{line:>6} | ") and "{" in second


def test_a_brace_too_many() -> None:
    first, second = refusal(KERNEL.format(body="  a[0] = 1; }"))
    assert first.startswith("kernel.cu:3: error: this brace closes nothing") and second == "     3 | }"


def test_balanced_braces_are_not_blamed() -> None:
    """An error that mentions braces, in a source whose braces match."""
    first, *_ = refusal(KERNEL.format(body="  a[0] = 1\n#ifdef NOTHING\n  {\n#endif"))
    assert re.match(r"kernel\.cu:[236]: error: expected", first), first
    first, *_ = refusal("#define BEGIN \\\n  { \\\n  {\n#define END \\\n  }\n" + KERNEL.format(body="  a[0] = 1"))
    assert re.match(r"kernel\.cu:[78]: error: expected", first), first


# ---------------------------------------------------------------- static assertions


def test_a_static_assertion_of_the_source() -> None:
    code = (
        "template <int N>\n__device__ int f() {\n"
        '  static_assert(N % 32 == 0, "whole warps");\n  return N;\n}\n'
        "template <int N>\n__global__ void k(int *a) {\n  a[0] = f<N>();\n}\n"
    )
    lines = refusal(code, name_expressions=("k<64>", "k<33>"))
    assert lines[0].startswith("kernel.cu:3: error: static") and "whole warps" in lines[0]
    assert lines[0].endswith(" [in k<33>]")
    assert lines[1] == '     3 |   static_assert(N % 32 == 0, "whole warps");'
    assert any(line.startswith("kernel.cu:8: note: ") for line in lines)


def test_a_static_assertion_of_a_header() -> None:
    body = "  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 15, half, nvcuda::wmma::row_major> f;\n  (void)f;"
    first, second, *_ = refusal("#include <mma.h>\n" + KERNEL.format(body=body))
    assert first.startswith("kernel.cu:3: error: static") and re.search(r"\(mma\.h:\d+\)$", first)
    assert "wmma" in first and "15, half" in second


# ---------------------------------------------------------------- what the engine does not have


@pytest.mark.parametrize(
    ("before", "body", "line", "says"),
    [
        ("__global__ void child(float *a) {}\n", "  child<<<1, 32>>>(a);", 3, "dynamic parallelism"),
        ("__device__ void two(float *a) {\n  k<<<1, 32>>>(a);\n}\n", "", 2, "kernels are launched from Python"),
        ("texture<float, 2> t;\n", "  a[0] = tex2D(t, 1, 2);", 1, "has no textures"),
        ("", "  a[0] = tex1Dfetch<float>((cudaTextureObject_t)a, 1);", 2, "has no textures"),
        ("", "  surf2Dwrite(a[0], (cudaSurfaceObject_t)a, 1, 2);", 2, "has no surfaces"),
    ],
)
def test_what_the_engine_does_not_have(before: str, body: str, line: int, says: str) -> None:
    lines = refusal(before + KERNEL.format(body=body), options=("-dc",))
    assert lines[0].startswith(f"kernel.cu:{line}: error: ") and says in lines[0]
    assert len([text for text in lines if "error:" in text]) == 1, lines


def test_what_the_engine_does_not_have_is_blamed_only_where_it_is_used() -> None:
    code = "// tex2D\n#define LAUNCH child<<<1, 1>>>()\n" + KERNEL.format(body="  a[0] = nothing;")
    first, *_ = refusal(code)
    assert re.match(r"kernel\.cu:4: error: .*nothing", first)


# ---------------------------------------------------------------- host declarations next to kernels


BESIDE = """
__device__ void run(float *a, int n, cudaStream_t stream = 0, cudaEvent_t done = 0);
__device__ cudaError_t check(const cudaDeviceProp &of, cudaMemcpyKind, cudaGraphExec_t *, cudaIpcMemHandle_t *);
struct Plan {
  cudaStream_t stream;
  cudaPitchedPtr pitched;
  cudaExtent extent;
  cudaMemPool_t pool;
  cudaIpcMemHandle_t handle;
  cudaMemLocation where;
};
extern "C" __global__ void k(int *a) {
  a[0] = cudaSuccess;
  a[1] = cudaErrorIllegalAddress;
  a[2] = cudaErrorLaunchFailure;
  a[3] = cudaMemcpyDeviceToHost;
  a[4] = sizeof(Plan);
}
"""


@on_each_device
def test_types_of_the_runtime_api(cp: Any) -> None:
    a = cp.zeros(5, np.int32)
    compiled(cp, BESIDE).get_function("k")((1,), (1,), (a,))
    assert cp.asnumpy(a).tolist() == [0, 700, 719, 2, 144]


# ---------------------------------------------------------------- names that NVRTC leaves to the source


OWN_NAMES = cuda_text("engine_messages_own_names")


@on_each_device
def test_names_that_the_source_declares_itself(cp: Any) -> None:
    a, b = cp.asarray(np.array([3, 5, 0, 0], np.uint64)), cp.asarray(np.array([100, 0], np.int64))
    compiled(cp, OWN_NAMES).get_function("k")((1,), (1,), (a, b, np.uint32(9)))
    assert cp.asnumpy(a).tolist() == [3 + 2**40, 10, 109, 7]
    assert cp.asnumpy(b).tolist() == [14, -2]


def test_a_kernel_with_the_size_of_its_blocks() -> None:
    """A GPU's launch counts clusters then, so this stays on the engine."""
    code = 'extern "C" __global__ void __block_size__((32, 1, 1)) k(int *a) {\n  a[threadIdx.x] = threadIdx.x;\n}\n'
    a = engine.zeros(32, np.int32)
    engine.RawModule(code=code).get_function("k")((1,), (32,), (a,))
    assert (a == np.arange(32)).all()
