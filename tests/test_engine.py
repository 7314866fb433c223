"""The language of CUDA C++ on the CPU engine, feature by feature, against the same in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine.cuda_source import source

SOURCE = cuda_text("engine")

NAMES = (
    *(f"shared_template<{t}>" for t in ("float", "double", "char", "float4", "unsigned long long")),
    *(f"shared_samples<{t}>" for t in ("float", "double", "short")),
    "deep::scaled<float>",
    "deep::scaled<int, -2>",
    "plain_cpp",
)


def kernel(cp: Any, name: str) -> Any:
    """Return a kernel of SOURCE."""
    return compiled(cp, SOURCE, NAMES).get_function(name)


GEOMETRIES = [
    ((1,), (1,)),
    ((7,), (33,)),
    ((3, 2), (8, 4)),
    ((2, 3, 4), (5, 3, 2)),
    ((1,), (1024,)),
    ((2,), (32, 32)),
    ((1, 2), (16, 8, 8)),
    ((1, 1, 3), (4, 4, 64)),
    ((300,), (2,)),
]


@on_each_device
@pytest.mark.parametrize(("grid", "block"), GEOMETRIES)
def test_every_thread_knows_its_place(cp: Any, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    (gx, gy, gz), (bx, by, bz) = (sizes + (1,) * (3 - len(sizes)) for sizes in (grid, block))
    n = gx * gy * gz * bx * by * bz
    out = cp.full((13, n), -1, np.int32)
    kernel(cp, "indices")(grid, block, (out, np.int32(n)))
    b_z, b_y, b_x, t_z, t_y, t_x = np.indices((gz, gy, gx, bz, by, bx)).reshape(6, n)
    sizes = [np.full(n, s) for s in (bx, by, bz, gx, gy, gz, 32)]
    np.testing.assert_array_equal(cp.asnumpy(out), np.stack([t_x, t_y, t_z, b_x, b_y, b_z, *sizes]))


def reversed_in_blocks(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, 64)[:, ::-1].reshape(-1)


@on_each_device
@pytest.mark.parametrize("name", ["function", "file", "dynamic", "dynamic_file", "rows", "volatile"])
def test_shared_memory(cp: Any, name: str) -> None:
    x = np.arange(5 * 64, dtype=np.int32) * 3
    out = cp.full(x.shape, -1, np.int32)
    dynamic = "dynamic" in name or name == "rows"
    kernel(cp, f"shared_{name}")((5,), (64,), (cp.asarray(x), out), shared_mem=256 if dynamic else 0)
    np.testing.assert_array_equal(cp.asnumpy(out), reversed_in_blocks(x))


@on_each_device
@pytest.mark.parametrize(
    ("c_type", "dtype"), [("float", "f4"), ("double", "f8"), ("char", "i1"), ("unsigned long long", "u8")]
)
def test_shared_memory_of_a_template_type(cp: Any, c_type: str, dtype: str) -> None:
    x = (np.arange(3 * 64) % 100).astype(dtype)
    out = cp.zeros(x.shape, x.dtype)
    kernel(cp, f"shared_template<{c_type}>")((3,), (64,), (cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), reversed_in_blocks(x))


@on_each_device
def test_shared_memory_of_vectors(cp: Any) -> None:
    x = np.arange(2 * 64 * 4, dtype=np.float32).reshape(-1, 4)
    out = cp.zeros(x.shape, np.float32)
    kernel(cp, "shared_template<float4>")((2,), (64,), (cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), x.reshape(2, 64, 4)[:, ::-1].reshape(-1, 4))


@on_each_device
@pytest.mark.parametrize(("c_type", "dtype"), [("float", "f4"), ("double", "f8"), ("short", "i2")])
def test_dynamic_shared_memory_of_a_template_type(cp: Any, c_type: str, dtype: str) -> None:
    x = np.arange(3 * 64).astype(dtype)
    out = cp.zeros(x.shape, x.dtype)
    kernel(cp, f"shared_samples<{c_type}>")((3,), (64,), (cp.asarray(x), out), shared_mem=64 * x.itemsize)
    np.testing.assert_array_equal(cp.asnumpy(out), reversed_in_blocks(x))


@on_each_device
def test_alignments_of_shared_memory(cp: Any) -> None:
    out = cp.full(6, -1, np.int32)
    kernel(cp, "alignments")((3,), (1,), (out,), shared_mem=32)
    assert not cp.asnumpy(out).any()


@on_each_device
@pytest.mark.parametrize(("height", "width"), [(16, 16), (33, 50), (1, 100)])
def test_transpose_through_shared_memory(cp: Any, height: int, width: int) -> None:
    x = np.random.default_rng(0).standard_normal((height, width)).astype(np.float32)
    out = cp.zeros((width, height), np.float32)
    grid = (-(-width // 16), -(-height // 16))
    kernel(cp, "transpose")(grid, (16, 16), (cp.asarray(x), out, np.int32(width), np.int32(height)))
    np.testing.assert_array_equal(cp.asnumpy(out), x.T)


@on_each_device
@pytest.mark.parametrize("n", [1, 31, 48, 1000, 1024])
def test_many_barriers(cp: Any, n: int) -> None:
    x = np.random.default_rng(n).integers(-100, 100, n).astype(np.int32)
    out = cp.zeros(n, np.int32)
    kernel(cp, "scan")((1,), (n,), (cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), np.cumsum(x))


@on_each_device
def test_variables_of_the_module(cp: Any) -> None:
    module = cp.RawModule(code=SOURCE, name_expressions=NAMES)
    values = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    cp.ndarray((16,), np.float32, module.get_global("weights"))[...] = cp.asarray(values)
    cp.ndarray((1,), np.int32, module.get_global("counter"))[...] = 40
    out, counts = cp.zeros(16, np.float32), cp.zeros(1, np.int32)
    for launches in (1, 2, 3):
        module.get_function("variables")((1,), (16,), (out, counts))
        assert int(cp.asnumpy(counts)[0]) == 40 + launches
    expected = values * np.resize([5, 6, 7, 8], 16).astype(np.float32) + np.resize([0.5, 1.5, 2.5], 16)
    np.testing.assert_allclose(cp.asnumpy(out), expected, rtol=1e-6, atol=1e-6)
    assert int(cp.asnumpy(cp.ndarray((1,), np.int32, module.get_global("counter")))[0]) == 43

    again = cp.RawModule(code=SOURCE, name_expressions=NAMES)  # the same source: the same module with its variables
    again.get_function("variables")((1,), (16,), (out, counts))
    assert int(cp.asnumpy(counts)[0]) == 44

    other = cp.RawModule(code=SOURCE + "\n", name_expressions=NAMES)  # it has its own variables, with initial values
    other.get_function("variables")((1,), (16,), (out, counts))
    assert int(cp.asnumpy(counts)[0]) == 1
    expected = np.resize([0.5, 1.5, 2.5], 16).astype(np.float32)
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    assert int(cp.asnumpy(cp.ndarray((1,), np.int32, module.get_global("counter")))[0]) == 44


@on_each_device
def test_functions_and_types(cp: Any) -> None:
    x = np.arange(64, dtype=np.int32)
    out = cp.zeros(64, np.int32)
    kernel(cp, "functions")((1,), (64,), (cp.asarray(x), out))
    fibonacci = [0, 1]
    while len(fibonacci) < 12:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    chosen = np.where(x % 2, np.array(fibonacci)[x % 12], -(x % 12))
    np.testing.assert_array_equal(cp.asnumpy(out), 2 * x + x + x % 8 + chosen + (x + 3) + 6)


@on_each_device
def test_templates(cp: Any) -> None:
    x = np.arange(300)
    for name, dtype, scale in (("deep::scaled<float>", np.float32, 3), ("deep::scaled<int, -2>", np.int32, -2)):
        out = cp.zeros(300, dtype)
        kernel(cp, name)((3,), (128,), (cp.asarray(x.astype(dtype)), out, np.int32(300)))
        np.testing.assert_array_equal(cp.asnumpy(out), scale * x)
    out = cp.zeros(5, np.int32)
    kernel(cp, "plain_cpp")((1,), (5,), (out,))
    assert (cp.asnumpy(out) == 7).all()


@on_each_device
def test_scalars_of_every_type(cp: Any) -> None:
    options = np.array([(3, 0.5, 0.125)], np.dtype([("width", "i4"), ("scale", "f4"), ("offset", "f8")], align=True))
    vector = np.array([(1, 2, 3, 4)], np.dtype("f4,f4,f4,f4"))
    pair = np.array([(-1.5, 2.5)], np.dtype("f2,f2"))
    values = [np.bool_(True), np.int8(-5), np.uint8(250), np.int16(-30000), np.uint16(60000), np.int32(-(2**31))]
    values += [np.uint32(2**32 - 1), np.int64(-(2**40)), np.uint64(2**63), np.float32(0.1), np.float64(0.1)]
    half, bfloat = np.float16(-0.333), np.asarray(3.14159, ml_dtypes.bfloat16)[()]
    # CuPy does not accept a scalar of ml_dtypes: its two bytes are passed as an integer.
    packed = bfloat if cp is engine else np.asarray(bfloat).view(np.uint16)[()]
    values += [half, packed, np.uint64(2**53), np.int8(-128), np.uint16(65535), options, vector, pair]
    out = cp.zeros(23, np.float64)
    kernel(cp, "scalars")((1,), (1,), (out, *values))
    expected = [float(v) for v in values[:11]] + [float(half), float(bfloat), 2.0**53, -128, 65535]
    expected += [3, 0.5, 0.125, 1, 4, -1.5, 2.5]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


@on_each_device
def test_null_pointers_and_no_parameters(cp: Any) -> None:
    out = cp.zeros(1, np.int32)
    kernel(cp, "nulls")((1,), (1,), (None, None, out))
    assert int(cp.asnumpy(out)[0]) == 3
    kernel(cp, "nulls")((1,), (1,), (cp.zeros(1, np.float32), None, out))
    assert int(cp.asnumpy(out)[0]) == 2
    kernel(cp, "no_parameters")((2,), (3,), ())


@on_each_device
def test_views_and_results_of_arithmetic_are_written_in_place(cp: Any) -> None:
    base = cp.asarray(np.arange(10, dtype=np.int32))
    kernel(cp, "increment")((1,), (32,), (base[3:], np.int32(4)))
    np.testing.assert_array_equal(cp.asnumpy(base), [0, 1, 2, 103, 104, 105, 106, 7, 8, 9])
    computed = base * 2 + 1
    view = computed[6:]
    kernel(cp, "increment")((1,), (32,), (view, np.int32(4)))
    np.testing.assert_array_equal(cp.asnumpy(computed), [1, 3, 5, 207, 209, 211, 313, 115, 117, 119])
    kernel(cp, "neighbours")((1,), (32,), (computed, computed[5:], np.int32(5)))  # two views of one array
    np.testing.assert_array_equal(cp.asnumpy(view), [313 + 3, 115 + 5, 117 + 207, 119 + 209])
    assert type(computed) is type(view) is cp.ndarray


@on_each_device
@pytest.mark.parametrize("threads", [1, 48, 64, 1000])
def test_barriers_that_vote(cp: Any, threads: int) -> None:
    x = np.random.default_rng(threads).integers(0, 10, (4, threads)).astype(np.int32)
    x[0], x[1] = 5, np.arange(threads) % 2
    out = cp.full((4, 4, threads), -1, np.int32)
    kernel(cp, "barriers")((4,), (threads,), (cp.asarray(x), out))
    got = cp.asnumpy(out)
    np.testing.assert_array_equal(got[0], np.broadcast_to((x > 3).sum(1, keepdims=True), x.shape))
    np.testing.assert_array_equal(got[1] != 0, np.broadcast_to((x > 0).all(1, keepdims=True), x.shape))
    np.testing.assert_array_equal(got[2] != 0, np.broadcast_to((x > 8).any(1, keepdims=True), x.shape))
    np.testing.assert_array_equal(got[3], np.broadcast_to((x != 0).sum(1, keepdims=True), x.shape))


@on_each_device
def test_threads_take_turns(cp: Any) -> None:
    out = cp.zeros(100, np.int32)
    kernel(cp, "in_device_function")((1,), (100,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(100))


@on_each_device
def test_clocks(cp: Any) -> None:
    out = cp.zeros(2, np.int64)
    kernel(cp, "clocks")((1,), (1,), (out,))
    assert int(out[0]) > 0
    assert int(out[1]) == 1


@on_each_device
def test_a_waiting_thread_lets_others_run(cp: Any) -> None:
    flag, out = cp.zeros(1, np.int32), cp.zeros(8, np.int32)
    kernel(cp, "hand_over")((1,), (256,), (flag, out))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(8)[::-1])


@on_each_device
def test_macros_and_includes(cp: Any, tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "factor.cuh").write_text("#pragma once\n#define FACTOR 5\n")
    code = '#include "factor.cuh"\nextern "C" __global__ void k(int *a) { a[0] = FACTOR * N + FLAG; }\n'
    module = cp.RawModule(code=code, options=(f"-I{folder}", "-DN=3", "-DFLAG", "-std=c++17"))
    out = cp.zeros(1, np.int32)
    module.get_function("k")((1,), (1,), (out,))
    assert int(out[0]) == 16


def test_macros_in_every_spelling() -> None:
    """The source's macros do not affect the engine's own headers, which have names such as N and T too."""
    code = (
        "#define T 3\n#include <cuda_fp16.h>\n#include <cooperative_groups.h>\n"
        'extern "C" __global__ void k(int *a) { a[0] = T + 10 * N + 100 * I + 1000 * A(2) + FLAG * 10000; }\n'
    )
    out = engine.zeros(1, np.int32)
    for options in (
        ("-DN=4", "-DI=5", "-DA(x)=x", "-DFLAG"),
        ("-D", "N=4", "-D", "I=5", "--define-macro=A(x)=x", "--define-macro", "FLAG=1", "--std=c++14"),
        ("-DN=9", "-UN", "-DN=4", "-DI=5", "-DA(x)=x", "-DFLAG=2", "--undefine-macro=FLAG", "-DFLAG", "-std=c++20"),
    ):
        out[0] = 0
        engine.RawKernel(code, "k", options=options)((1,), (1,), (out,))
        assert int(out[0]) == 3 + 40 + 500 + 2000 + 10000


def test_parameters_are_read_with_the_first_definition_of_a_macro() -> None:
    code = (
        "#define IN const float*\n__global__ void k(IN a, OUT b, int N) {}\n#undef IN\n#define IN int\n#define N(x) x\n"
    )
    assert source.kernels(code)["k"] == [
        source.Declared("a", "float", True, True),
        source.Declared("b", "OUT", False, False),
        source.Declared("N", "int", False, False),
    ]


def test_a_macro_of_two_lines_gives_parameters() -> None:
    code = "#define MORE \\\n  , int* counts, int n\n__global__ void k(int m MORE) {}\n"
    assert [parameter.name for parameter in source.kernels(code)["k"]] == ["m", "counts", "n"]


def test_an_edited_header_is_compiled_again(tmp_path: Path) -> None:
    code = '#include "size.cuh"\nextern "C" __global__ void k(int *a) { a[0] = SIZE; }\n'
    out = engine.zeros(1, np.int32)
    for size in (4, 5):
        (tmp_path / "size.cuh").write_text(f"#define SIZE {size}\n")
        for options in ((f"-I{tmp_path}",), ("-I", str(tmp_path)), (f"--include-path={tmp_path}",)):
            engine.RawModule(code=code, options=options).get_function("k")((1,), (1,), (out,))
            assert int(out[0]) == size


def test_includes_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inc").mkdir()
    (tmp_path / "near.cuh").write_text('#define NEAR 1\n#include "far.cuh"\n')
    (tmp_path / "inc" / "far.cuh").write_text("#define FAR 2\n")
    code = '#include "near.cuh"\nextern "C" __global__ void k(int *a) { a[0] = NEAR + FAR; }\n'
    out = engine.zeros(1, np.int32)
    engine.RawKernel(code, "k", options=("-Iinc",))((1,), (1,), (out,))
    assert int(out[0]) == 3


def test_the_hosts_headers_may_be_included_for_nvcc() -> None:
    """NVRTC has none of them (see test_engine_refusals.py)."""
    headers = "cmath cstdio ctime cfloat cstdint cassert climits algorithm limits type_traits math.h stdio.h time.h"
    code = "".join(f"#include <{name}>\n" for name in headers.split()) + (
        'extern "C" __global__ void k(float *a) {\n'
        "  assert(a != nullptr);\n"
        "  a[0] = std::fmax(fmaxf(a[1], 2.0f), std::max(1.0f, 0.5f)) + (clock() == 0 ? 1 : 0) + FLT_EPSILON * 0;\n"
        '  printf("%g\\n", a[0]);\n}\n'
    )
    out = engine.zeros(2, np.float32)
    engine.RawKernel(code, "k", backend="nvcc")((1,), (1,), (out,))
    assert float(out[0]) == 2.0


def test_what_nobody_wrote_is_nan() -> None:
    """On the CPU only: a GPU shows what an earlier kernel left."""
    code = (
        'extern "C" __global__ void k(float *a, float *b) {\n'
        "  __shared__ float s[64];\n  extern __shared__ float d[];\n"
        "  b[0] = s[0], b[1] = s[63], b[2] = d[0], b[3] = d[99];\n  __syncthreads();\n"
        "  for (int i = 0; i < 64; ++i) s[i] = d[i] = 1;\n}\n"
    )
    a, b = engine.empty((3, 5), np.float32), engine.zeros(4, np.float32)
    assert np.isnan(a).all()
    for _ in range(2):  # the second launch sees nothing of the first
        engine.RawKernel(code, "k")((3,), (1,), (a, b), shared_mem=400)
        assert np.isnan(b).all()
    assert (
        np.isnan(engine.empty(7, np.float16)).all()
        and np.isnan(engine.empty(7, engine.bfloat16).astype(np.float32)).all()
    )


def test_printf_is_shown_in_the_order_of_blocks(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        'extern "C" __global__ void k(int n) {\n  if (blockIdx.x == 0) for (volatile int i = 0; i < 300000; ++i) {}\n'
        "  int place = blockIdx.x * 10 + threadIdx.x;\n"
        '  if (threadIdx.x < 2) printf("%d %s %.2f %lld %%\\n", place, "is", n * 0.5, 1ll << 40);\n'
        "  __syncthreads();\n"
        '  if (threadIdx.x == 3) printf("[%u]\\n", blockIdx.x);\n}\n'
    )
    engine.RawKernel(code, "k")((50,), (4,), (np.int32(5),))
    lines = [f"{10 * b + t} is 2.50 {1 << 40} %" if t < 2 else f"[{b}]" for b in range(50) for t in range(3)]
    assert capfd.readouterr().out.splitlines() == lines


def test_long_output_of_a_kernel_is_complete(capfd: pytest.CaptureFixture[str]) -> None:
    code = 'extern "C" __global__ void k() { for (int i = 0; i < 100; ++i) printf("%0100d\\n", i); }\n'
    engine.RawKernel(code, "k")((1,), (64,), ())
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 6400 and lines == [f"{i % 100:0100d}" for i in range(6400)]


@on_each_device
def test_a_template_that_nobody_uses_may_name_what_there_is_not(cp: Any) -> None:
    code = """
template <typename T> __host__ __device__ T least(T a, T b) { return std::min(a, b); }
extern "C" __global__ void fill(int *out) { out[threadIdx.x] = threadIdx.x; }
"""
    out = cp.zeros(8, np.int32)
    compiled(cp, code).get_function("fill")((1,), (8,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(8))
