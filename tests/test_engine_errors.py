"""An error in a kernel on the CPU engine is a Python exception that names thread, line and array element."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import platform
import re
from typing import Any

import numpy as np
import pytest
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import CompileError, LaunchError, failures, runtime, structures, symbols
from helpers.engine.structures import Reason

SOURCE = cuda_text("engine_errors")


def line_of(marker: str) -> int:
    """Return the line of SOURCE that ends with `// marker`."""
    return next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// {marker}"))


@functools.cache
def module() -> Any:
    return engine.RawModule(code=SOURCE)


def launch(name: str, grid: Any, block: Any, args: tuple[Any, ...], **how: Any) -> None:
    module().get_function(name)(grid, block, args, **how)


def failure(name: str, grid: Any, block: Any, args: tuple[Any, ...], **how: Any) -> str:
    """Return the message of a launch that fails, after which the engine still works."""
    with pytest.raises(LaunchError) as caught:
        launch(name, grid, block, args, **how)
    a = engine.empty(32, np.float32)
    launch("good", (1,), (32,), (a,))
    np.testing.assert_array_equal(a, np.arange(32))
    return str(caught.value)


def assert_says(message: str, *parts: str, marker: str = "") -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    if marker:
        line = line_of(marker)
        assert f"kernel.cu:{line}" in message, message
        assert message.endswith(f"\n{line:>6} | {SOURCE.splitlines()[line - 1]}"), message


f32, i32 = np.float32, np.int32
# Only x86 processors report which access it was.
WRITE, READ = ("write to", "read of") if platform.machine() in ("x86_64", "AMD64") else ("access to", "access to")


def test_a_wild_write() -> None:
    a = engine.zeros(100, f32)
    message = failure("write_wild", (3,), (32,), (a, i32(10)))
    assert_says(message, f"illegal {WRITE} a[700], which has 100 elements", marker="write_wild")
    assert_says(message, "[write_wild, block (2,0,0), thread (6,0,0); SIG")


def test_a_wild_read_in_two_dimensions() -> None:
    a, b = engine.zeros((8, 4), f32), engine.zeros(1, f32)
    message = failure("read_wild", (2, 2), (4, 2), (a, b, i32(-20_000)))
    assert_says(message, f"illegal {READ} a[-20000], which has 32 elements", marker="read_wild")
    assert_says(message, "block (0,0,0), thread (2,1,0)")


@pytest.mark.parametrize("size", [64, 128, 1024, 4096, 64 * 1000])
def test_just_past_the_end(size: int) -> None:
    """Arrays whose size is a multiple of 256 bytes end at a guard; others have up to 255 bytes of slack."""
    a, b = engine.ones(size, f32), engine.zeros(2, f32)
    launch("read_wild", (1,), (4, 2), (a, b, i32(size - 1)))
    message = failure("read_wild", (1,), (4, 2), (a, b, i32(size)))
    assert_says(message, f"a[{size}], which has {size:,} elements", marker="read_wild")


def test_far_away() -> None:
    message = failure("absolute", (1,), (1,), (engine.zeros(8, f32), np.uint64(0x24680)))
    assert_says(message, f"illegal {WRITE} address 0x24680, which is far from every array", marker="absolute")


@pytest.mark.parametrize(("size", "at"), [(1000, 1000), (1000, 1003), (7, 63), (100, -1), (100, -7), (1024, -1)])
def test_a_write_into_the_slack_beside_an_array(size: int, at: int) -> None:
    """There is no guard, so it is noticed after the launch; a checked run then finds the access."""
    for a in (engine.zeros(size, f32), engine.ones(size, f32) + 1):
        if at < 0 and size % 1024 == 0:
            failure("write_one", (1,), (1,), (a, i32(at)))  # there is a guard
            continue
        message = failure("write_one", (1,), (1,), (a, i32(at)))
        assert_says(message, f"illegal write to a[{at}], which has {size:,} elements at kernel.cu:")
        assert_says(message, "[write_one, block (0,0,0), thread (0,0,0)]")
        launch("write_one", (1,), (1,), (a, i32(size - 1)))  # and is restored
        assert a[-1] == 1


ADD = """
extern "C" __global__ void add(const {0}* a, const {0}* b, {0}* c) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  c[i] = a[i] + b[i];
}}
extern "C" __global__ void copy(const {0}* a, {0}* c) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  c[i] = a[i];
}}
"""


@pytest.mark.parametrize("c_type, dtype", [("float", f32), ("int", i32), ("__half", np.float16), ("char", np.int8)])
def test_no_condition_keeps_the_index_inside(c_type: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every learner's first mistake, when n is not a multiple of the block: each array has its own memory around it."""
    module = engine.RawModule(code="#include <cuda_fp16.h>\n" + ADD.format(c_type))
    add, copy = map(module.get_function, ("add", "copy"))
    for n, blocks in ((63, 1), (127, 2)):  # one thread too many
        with pytest.raises(engine.LaunchError) as raised:
            add((blocks,), (64,), (engine.ones(n, dtype), engine.ones(n, dtype), engine.zeros(n, dtype)))
        error = raised.value
        assert (error.array, error.index, error.line, error.block, error.thread) == (
            "c",
            n,
            5,
            (blocks - 1, 0, 0),
            (63, 0, 0),
        )
    monkeypatch.setattr(engine.RawKernel, "explain_overrun", None)  # avoids a second run of each
    for n in range(1, 301):
        a, b = engine.ones(n, dtype), engine.ones(n, dtype)
        for block in (32, 64, 128, 256):
            c = engine.zeros(n, dtype)
            for kernel, args in ((add, (a, b, c)), (copy, (a, c))):
                with pytest.raises(engine.LaunchError) if n % block else contextlib.nullcontext():
                    kernel((-(-n // block),), (block,), args)


def test_null_pointers() -> None:
    b = engine.zeros(1, f32)
    assert_says(failure("read_wild", (1,), (4, 2), (None, b, i32(0))), "a null pointer", marker="read_wild")
    message = failure("read_wild", (1,), (4, 2), (None, b, i32(25)))
    assert_says(message, "address 100: a null pointer and an index", marker="read_wild")


def test_the_fields_of_an_error() -> None:
    """A program can read why and where a launch failed without parsing the message."""
    a, b = engine.zeros(100, f32), engine.zeros(1, f32)

    def error(name: str, grid: Any, block: Any, args: tuple[Any, ...], **how: Any) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            launch(name, grid, block, args, **how)
        return pickle.loads(pickle.dumps(caught.value))

    wild = error("write_wild", (3,), (32,), (a, i32(10)))
    assert (wild.reason, wild.file, wild.line) == (Reason.ILLEGAL_ACCESS, "kernel.cu", line_of("write_wild"))
    assert (wild.block, wild.thread, wild.array, wild.index) == ((2, 0, 0), (6, 0, 0), "a", 700)
    assert wild.address == a.data.ptr + 2800 and not wild.is_null

    slack = error("write_one", (1,), (1,), (a, i32(-1)))
    assert (slack.reason, slack.array, slack.index, slack.thread) == (wild.reason, "a", -1, (0, 0, 0))
    assert "write_one" in SOURCE.splitlines()[slack.line - 1]

    null = error("read_wild", (1,), (4, 2), (None, b, i32(25)))
    assert null.is_null and null.reason == Reason.ILLEGAL_ACCESS and (null.array, null.address) == (None, 100)

    shared = error("past_dynamic", (1,), (32,), (engine.zeros(32, f32), i32(33)), shared_mem=128)
    assert (shared.array, shared.index, shared.line) == ("dynamic shared memory", 33, line_of("past_dynamic"))

    barrier = error("two_barriers", (1,), (64,), (engine.zeros(64, f32),))
    assert barrier.reason in failures.DIVERGENCE and barrier.line in (
        line_of("first barrier"),
        line_of("second barrier"),
    )
    assert barrier.array is None and not barrier.is_null

    refused = error("good", (1,), (2048,), (a,))
    assert refused.reason is None and refused.line is None


def test_the_line_of_an_inlined_function_and_of_an_intrinsic() -> None:
    a, b = engine.zeros(64, f32), engine.zeros(2, f32)
    assert_says(failure("through_function", (1,), (1,), (a, b, i32(64))), "a[64]", marker="load")
    assert_says(failure("through_intrinsic", (1,), (1,), (a, b, i32(64))), "a[64]", marker="through_intrinsic")
    a = engine.zeros(64, i32)
    assert_says(failure("through_atomic", (1,), (1,), (a, i32(64))), "a[64]", marker="through_atomic")


def test_the_line_of_a_call_into_a_library() -> None:
    message = failure("through_library", (1,), (1,), (engine.zeros(4096, np.uint8), i32(8192)))
    assert_says(message, "a[4096], which has 4,096 elements", marker="through_library")
    assert_says(failure("through_printf", (1,), (1,), (i32(8),)), "address 8: a null pointer", marker="through_printf")


def test_array_computed_by_numpy_is_guarded_too() -> None:
    a, b = engine.ones(64, f32) * 2, engine.zeros(1, f32)
    assert_says(failure("read_wild", (1,), (4, 2), (a, b, i32(64))), "a[64], which has 64 elements", marker="read_wild")
    view = a[16:32]
    launch("read_wild", (1,), (4, 2), (view, b, i32(47)))
    assert b[0] == 2
    assert_says(failure("read_wild", (1,), (4, 2), (view, b, i32(48))), "a[48], which has 16 elements")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors read any address")
def test_a_misaligned_vector() -> None:
    a = engine.zeros(64, f32)
    launch("misaligned", (1,), (1,), (a, i32(4)))
    assert_says(failure("misaligned", (1,), (1,), (a, i32(1))), "misaligned address", "float4", marker="misaligned")


@pytest.mark.skipif(
    not engine.compiler.sys.platform.startswith("linux"), reason="static arrays are guarded on Linux alone"
)
def test_past_the_end_of_static_shared_memory() -> None:
    out = engine.zeros(32, f32)
    launch("past_static", (1,), (32,), (out, i32(32)))
    message = failure("past_static", (1,), (32,), (out, i32(33)))
    assert_says(message, "byte 256 of __shared__ tile, which has 256 bytes", "thread (31,0,0)", marker="past_static")
    assert_says(failure("past_static", (2,), (32,), (out, i32(100_000))), "of __shared__ tile", marker="past_static")


def test_past_the_end_of_dynamic_shared_memory() -> None:
    out = engine.zeros(32, f32)
    launch("past_dynamic", (1,), (32,), (out, i32(31)), shared_mem=128)
    message = failure("past_dynamic", (1,), (32,), (out, i32(33)), shared_mem=128)
    assert_says(message, "byte 132 of dynamic shared memory, which has 128 bytes", marker="past_dynamic")
    launch("past_dynamic", (1,), (1,), (out, i32(0)), shared_mem=8)
    assert out[0] == 1


def test_stack_overflow() -> None:
    out = engine.zeros(1, i32)
    launch("overflow", (2,), (64,), (out, i32(100)))
    message = failure("overflow", (2,), (64,), (out, i32(100_000)))
    assert_says(message, "local arrays do not fit the engine's stack of 256 KB", "[overflow, block (0,0,0)")
    assert_says(failure("large_local", (1,), (2,), (out, i32(5))), "do not fit the engine's stack of 256 KB")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors do not stop for it")
def test_integer_division() -> None:
    a = engine.asarray(np.array([0, -(2**31)], i32))
    launch("divide", (1,), (1,), (a, i32(2)))
    assert a[0] == -(2**30)
    for by, quotient in ((0, -1), (-1, -(2**31))):
        launch("divide", (1,), (1,), (a, i32(by)))
        assert a[0] == quotient


def test_two_different_barriers() -> None:
    message = failure("two_barriers", (1,), (64,), (engine.zeros(2, f32),))
    first, second = line_of("first barrier"), line_of("second barrier")
    assert_says(message, "barrier divergence", f"waits in __syncthreads() at kernel.cu:{first}", f"kernel.cu:{second}")


def test_a_warp_that_waits_for_lanes_that_never_come() -> None:
    message = failure("one_sided", (1,), (32,), (engine.zeros(32, i32),))
    assert_says(
        message, "deadlock in warp 0", "in __shfl_sync with mask 0xffffffff", "lanes 0xffff0000", marker="one_sided"
    )
    message = failure("other_mask", (1,), (64,), (engine.zeros(32, i32),))
    assert_says(
        message, "deadlock in warp 0", "mask 0xffffffff, and lanes 0x000000ff of that mask", marker="other_mask"
    )


def test_lanes_in_different_operations() -> None:
    message = failure("different", (1,), (32,), (engine.zeros(2, i32),))
    shuffle, ballot = line_of("different shuffle"), line_of("different ballot")
    assert_says(message, "the lanes of a warp meet in different operations")
    assert_says(message, f"in __ballot_sync at kernel.cu:{ballot}", f"in __shfl_sync at kernel.cu:{shuffle}")


def test_a_mask_without_the_own_lane() -> None:
    message = failure("not_named", (1,), (32,), (engine.zeros(32, i32),))
    assert_says(message, "lane 16 calls __shfl_sync with mask 0x0000ffff, which does not name the lane itself")
    assert_says(message, "thread (16,0,0)", marker="not_named")


def test_assertions_and_traps() -> None:
    a = engine.zeros(100, i32)
    launch("asserting", (3,), (32,), (a, i32(96)))
    a[40] = -1
    message = failure("asserting", (3,), (32,), (a, i32(96)))
    assert_says(message, "assertion failed: i < n && a[i] >= 0", "block (1,0,0), thread (8,0,0)", marker="asserting")
    assert_says(failure("trapping", (9,), (3,), (i32(4),)), "__trap()", "block (4,0,0)", marker="trapping")


def test_assertions_can_be_switched_off() -> None:
    code = 'extern "C" __global__ void k(int *a) { assert(a[0] == 1); a[1] = 5; }\n'
    for header in ("", "#include <assert.h>\n", "#define NDEBUG\n#include <cassert>\n"):
        a = engine.zeros(2, i32)
        how = {"options": () if "NDEBUG" in header else ("-DNDEBUG",), "backend": "nvcc" if header else "nvrtc"}
        engine.RawKernel(header + code, "k", **how)((1,), (1,), (a,))
        assert a[1] == 5


def test_the_first_failing_block_is_told() -> None:
    a = engine.zeros(64, f32)
    for first in (0, 3, 17):
        messages = {failure("each_block_fails", (40,), (32,), (a, i32(first))) for _ in range(8)}
        assert len(messages) == 1
        assert_says(messages.pop(), f"a[{64 + first}]", f"block ({first},0,0), thread (5,0,0)")


def test_what_was_printed_before_the_failure_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    failure("prints_then_fails", (1,), (1,), (engine.zeros(1, i32),))
    assert capfd.readouterr().out == "before\n"


def test_three_hundred_failing_launches() -> None:
    a, b = engine.zeros(64, f32), engine.zeros(64, i32)
    cases = [
        ("write_wild", (a, i32(11)), 96),
        ("two_barriers", (a,), 64),
        ("overflow", (b, i32(100_000)), 64),
        ("one_sided", (b,), 32),
        ("asserting", (b, i32(0)), 1024),
        ("different", (b,), 64),
    ]
    for turn in range(300):
        name, args, threads = cases[turn % len(cases)]
        with pytest.raises(LaunchError):
            launch(name, (4,), (threads,), args)
    launch("good", (1,), (64,), (a,))
    np.testing.assert_array_equal(a, np.arange(64))


# ---------------------------------------------------------------- what the compiler says


def compile_error(code: str, **how: Any) -> str:
    with pytest.raises(CompileError) as caught:
        engine.RawModule(code=code, **how).compile()
    return str(caught.value)


def test_a_compile_error_shows_the_line() -> None:
    code = 'extern "C" __global__ void k(float *a) {\n  float b = 1;\n\ta[0] = b + undeclared;\n}\n'
    lines = compile_error(code).splitlines()
    assert re.match(r"kernel\.cu:3: error: .*undeclared", lines[0])
    assert lines[1] == "     3 |     a[0] = b + undeclared;"
    assert "^" in lines[2]


def test_a_compile_error_follows_line_directives() -> None:
    code = '#line 1 "mine.cu"\n\nextern "C" __global__ void k(float *a) {\n#line 70 "other.cuh"\n  a[0] = 1\n}\n'
    message = compile_error(code)
    assert re.search(r"other\.cuh:7[01]: error: ", message), message
    assert "| }" in message or "a[0] = 1" in message


def test_an_error_in_a_template_names_its_line() -> None:
    code = "template <typename T>\n__global__ void k(T *a) {\n  a[0].field = 1;\n}\n"
    message = compile_error(code, name_expressions=("k<float>",))
    assert "kernel.cu:3: error: " in message and "a[0].field = 1;" in message


def test_a_missing_header_and_an_error_in_a_users_header(tmp_path: Any) -> None:
    assert "kernel.cu:1: " in compile_error('#include "nowhere.cuh"\n')
    (tmp_path / "broken.cuh").write_text("__device__ int f() {\n  return nothing;\n}\n")
    message = compile_error('#include "broken.cuh"\n', options=(f"-I{tmp_path}",))
    assert re.search(r"broken\.cuh:2: error: .*nothing", message), message


def test_unknown_inline_ptx_is_refused() -> None:
    code = 'extern "C" __global__ void k(int *a) {\n  asm volatile("vote.any.u32 %0, 1;" : "=r"(a[0]));\n}\n'
    with pytest.raises(engine.LaunchError, match=r"kernel\.cu:2: .*not know the instruction vote\.any\.u32"):
        engine.RawKernel(code, "k")((1,), (1,), (engine.zeros(1, np.int32),))
    engine.RawModule(code='// asm("x")\nextern "C" __global__ void k() { /* asm("x") */ }\n').compile()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-Dn=1", "--frobnicate"), "unrecognized option '--frobnicate': NVRTC does not take it either"),
        (("-D",), "the option -D comes last and has no value"),
        (("-lcublas",), "unrecognized option '-lcublas'"),
    ],
)
def test_wrong_options(options: tuple[str, ...], says: str) -> None:
    assert says in compile_error('extern "C" __global__ void k() {}\n', options=options)


def test_options_as_one_string() -> None:
    with pytest.raises(TypeError, match=r"options is a tuple of strings, not one string: options=\('-DN=1',\)"):
        engine.RawModule(code="", options="-DN=1").compile()


def test_options_for_a_gpu_have_no_effect() -> None:
    options = ("--use_fast_math", "-lineinfo", "--gpu-architecture=sm_90", "--maxrregcount=64", "-G", "--std=c++20")
    engine.RawModule(code='extern "C" __global__ void k() {}\n', options=options).compile()


def test_unknown_kernels() -> None:
    with pytest.raises(LaunchError, match=r"the source has no kernel 'bad'; it has write_wild, read_wild"):
        module().get_function("bad")
    with pytest.raises(LaunchError, match=r"no kernel 'k'; it has no __global__ function"):
        engine.RawModule(code="__device__ int f() { return 1; }\n").get_function("k")
    code = "template <typename T> __global__ void k(T *a) {}\n"
    with pytest.raises(LaunchError, match=r"k is a template: name an instance in name_expressions, such as 'k<float>'"):
        engine.RawModule(code=code, name_expressions=("k<int>",)).get_function("k")
    with pytest.raises(LaunchError, match="the preprocessor leaves it out, or a namespace holds it"):
        engine.RawModule(code="namespace a { __global__ void k() {} }\n").get_function("k")
    message = compile_error(code, name_expressions=("k<int>", "q<int>"))
    assert re.match(r"name expression q<int>: .*q", message) and len(message.splitlines()) == 1


@pytest.mark.skipif(not engine.compiler.sys.platform.startswith("linux"), reason="symbols are read from ELF")
def test_a_kernel_without_extern_c() -> None:
    """A kernel can be found by its mangled name, as on a GPU."""
    code = "__global__ void k(int *a) { a[0] = 5; }\n"
    with pytest.raises(LaunchError, match=r"k is not declared extern \"C\".*'_Z1kPi' only.*name_expressions=\('k',\)"):
        engine.RawModule(code=code).get_function("k")
    a = engine.zeros(1, i32)
    engine.RawModule(code=code, name_expressions=("k",)).get_function("k")((1,), (1,), (a,))
    assert a[0] == 5


def test_unknown_variables() -> None:
    loaded = engine.RawModule(code="__constant__ float c[4]; static __device__ int s; __global__ void k() { s = 1; }\n")
    assert loaded.get_global("c").nbytes == 16
    for name in ("s", "nothing", "k"):
        with pytest.raises(LaunchError, match=f"no variable '{name}' that is neither static nor const"):
            loaded.get_global(name)


def test_a_function_without_a_body() -> None:
    code = 'extern "C" __device__ int helper(int);\nextern "C" __global__ void k(int *a) { a[0] = helper(1); }\n'
    assert compile_error(code) == "helper is declared, but nowhere defined"
    said = compile_error("template <int N> __global__ void k(int *a);\n", name_expressions=("k<3>",))
    assert said.endswith("k<3>(int*) is declared, but nowhere defined: a header of prototypes is no source")


@pytest.mark.skipif(not engine.compiler.sys.platform.startswith("linux"), reason="sizes are read from ELF")
def test_too_much_static_shared_memory() -> None:
    code = (
        'extern "C" __global__ void k(float *a) {{\n  __shared__ float s[{n}];\n  s[threadIdx.x] = a[0];\n'
        "  __syncthreads();\n  a[0] = s[5];\n}}\n"
    )
    assert engine.RawKernel(code.format(n=12288), "k").shared_size_bytes == 49152
    with pytest.raises(
        CompileError, match=r"k declares 49,156 bytes of static __shared__ memory; .* 49,152 \(0xc000\)"
    ):
        engine.RawModule(code=code.format(n=12289)).get_function("k")


def test_too_much_dynamic_shared_memory() -> None:
    kernel = module().get_function("past_dynamic")
    out = engine.zeros(4, f32)
    with pytest.raises(LaunchError, match=r"shared_mem = 60,000 bytes.*max_dynamic_shared_size_bytes = 60000 before"):
        kernel((1,), (4,), (out, i32(0)), shared_mem=60_000)
    kernel.max_dynamic_shared_size_bytes = 60_000
    kernel((1,), (4,), (out, i32(3)), shared_mem=60_000)
    assert (out == 1).all()
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    kernel((1,), (4,), (out, i32(3)), shared_mem=227 * 1024)
    for size in (227 * 1024 + 1, -1):
        with pytest.raises(LaunchError, match="is refused: at most 232,448 bytes"):
            kernel.max_dynamic_shared_size_bytes = size
    with pytest.raises(LaunchError, match="shared_mem = -4"):
        kernel((1,), (4,), (out, i32(0)), shared_mem=-4)


# ---------------------------------------------------------------- launches that are refused


@pytest.mark.parametrize(
    ("grid", "block", "error", "says"),
    [
        ((1,), (1025,), LaunchError, r"a block of \(1025, 1, 1\) has 1,025 threads; a GPU takes 1,024 at most"),
        ((1,), (32, 33), LaunchError, "1,056 threads"),
        ((1,), (1, 1, 65), LaunchError, r"block\.z = 65: a GPU takes 1 to 64"),
        ((-1,), (1,), LaunchError, r"grid\.x = -1: a GPU takes 1 to 2,147,483,647"),
        ((1, 65536), (1,), LaunchError, r"grid\.y = 65,536: a GPU takes 1 to 65,535"),
        ((2**31,), (1,), LaunchError, r"grid\.x = 2,147,483,648"),
        ((1,), (-3,), LaunchError, r"block\.x = -3"),
        (1, (1,), TypeError, r"grid is the number 1: expected a tuple of one to three sizes; write \(1,\)"),
        ((1,), 32, TypeError, r"block is the number 32: .*; write \(32,\)"),
        ((1, 1, 1, 1), (1,), TypeError, "grid is .*: expected a tuple of one to three sizes"),
        ((), (1,), TypeError, "grid is .*: expected a tuple of one to three sizes"),
        ((1.5,), (1,), TypeError, "grid holds 1.5, a float: expected whole numbers; // divides"),
        ([1], (1,), TypeError, r"grid is \[1\], a list: CuPy takes a tuple; write \(1,\)"),
        ((1,), (True,), TypeError, "block holds True, a bool: expected whole numbers"),
    ],
)
def test_wrong_grids_and_blocks(grid: Any, block: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        launch("good", grid, block, (engine.zeros(1, f32),))


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((), TypeError, "read_wild takes 3 arguments, got 0: missing const float32"),
        (
            (None, None),
            TypeError,
            r"got 2: missing int32 at\. .*The signature is read_wild\(const float32\* a, float32\* b",
        ),
        ((None, None, i32(0), 1), TypeError, "takes 3 arguments, got 4"),
        ([None, None, 0.5], TypeError, r"argument 2 \(int32 at\) of read_wild got a Python float.*cp.int32\(0.5\)"),
        ((None, None, f32(1)), TypeError, r"argument 2 \(int32 at\) of read_wild got a float32"),
        ((None, None, np.int64(1 << 40)), TypeError, "1099511627776 does not fit int32"),
        ((None, None, True), TypeError, "got a bool"),
        ((None, None, 2**31), TypeError, "2147483648 does not fit int32"),
        ((None, None, "1"), TypeError, r"is a scalar; got str '1'; write cp.int32\(...\)"),
        ((None, None, None), TypeError, "is a scalar"),
        ((np.zeros(3, f32), None, 0), TypeError, r"argument 0 \(const float32\* a\).* is a NumPy array.*cp.asarray"),
        ((5, None, 0), TypeError, "expected a device array; got int 5"),
        ((None, np.float64, 0), TypeError, r"dtype is float64, the kernel reads float32; .*astype\(cp.float32\)"),
        (7, TypeError, "args is of type int: expected a tuple with one value for each parameter of read_wild"),
    ],
)
def test_wrong_arguments(args: Any, error: type[Exception], says: str) -> None:
    if isinstance(args, tuple):  # a type stands for an array of it
        args = tuple(engine.zeros(3, a) if isinstance(a, type) else a for a in args)
    with pytest.raises(error, match=says):
        launch("read_wild", (1,), (1,), args)


def test_right_arguments() -> None:
    a, b = engine.ones(4, f32), engine.zeros(1, f32)
    for at in (3, i32(3), np.asarray(3, i32)):
        b[...] = 0
        launch("read_wild", (1,), (4, 2), [a, b, at])
        assert b[0] == 1


def test_wrong_structs() -> None:
    code = (
        "struct S { int a; float b; };\n"
        'extern "C" __global__ void k(S s, float4 v, int *out) { out[0] = s.a + (int)v.w; }\n'
    )
    kernel, out = engine.RawKernel(code, "k"), engine.zeros(1, i32)
    s, v = np.array((3, 0.5), "i4,f4"), np.array([1, 2, 3, 4], f32)
    kernel((1,), (1,), (s, v, out))
    assert out[0] == 7
    with pytest.raises(TypeError, match="parameter 's' of k is a struct of 8 bytes; got int32 of 4"):
        kernel((1,), (1,), (i32(1), v, out))
    with pytest.raises(TypeError, match="parameter 'v' of k is a struct of 16 bytes; got float32 of 4"):
        kernel((1,), (1,), (s, f32(1), out))


# ---------------------------------------------------------------- the engine's interface


def test_what_the_engine_is_not() -> None:
    with pytest.raises(AttributeError, match=r"the CPU engine has no 'RawUfunc': it has the part of CuPy .*cp.asnumpy"):
        engine.RawUfunc  # noqa: B018


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: engine.RawModule(), TypeError, "exactly one of code and path"),
        (lambda: engine.RawModule(code="", path="x.cubin"), TypeError, "exactly one of code and path"),
        (lambda: engine.RawModule(path="x.cubin"), TypeError, "only a GPU runs; give the source as code="),
        (lambda: engine.RawModule(code=b"x"), TypeError, "code must be the source text, a str; got bytes"),
        (lambda: engine.empty((-1, 2)), ValueError, "negative dimensions"),
        (lambda: engine.empty((1 << 60,), f32), MemoryError, "out of memory: no 4611686018427387904 bytes"),
        (lambda: engine.empty((1 << 44,), f32), MemoryError, "out of memory: no 70368744177664 bytes"),
        (lambda: engine.cuda.Device(1), ValueError, "one device, number 0; got 1"),
        (
            lambda: engine.cuda.get_elapsed_time(engine.cuda.Event(), engine.cuda.Event()),
            ValueError,
            "must be recorded",
        ),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


# ---------------------------------------------------------------- what Python and the engine's C++ both declare


def test_structs_that_do_not_match_the_engine() -> None:
    lib = runtime.library()
    structures.check(lib)

    class Old:
        """An engine of another version, whose launch has an additional field."""

        @staticmethod
        def engine_size_of(name: bytes) -> int:
            return lib.engine_size_of(name) + (8 if name == b"EngineLaunch" else 0)

    size = ctypes.sizeof(structures.LaunchRequest)
    with pytest.raises(
        RuntimeError, match=rf"does not match .* C\+\+: EngineLaunch: {size} in Python, {size + 8} in C"
    ):
        structures.check(Old)


def test_every_reason_has_words() -> None:
    """They are distinct, and contain the fields."""
    said = set()
    for reason in list(structures.Reason)[1:]:
        failure = structures.Failure(reason=reason, file=b"k.cu", line=7, other_file=b"l.cu", other_line=8)
        failure.name, failure.other_name, failure.message, failure.lanes = b"__shfl_sync", b"bar", b"assertion", 5
        failure.count = 3
        said.add(
            failures.describe(failure, (64, 1, 1), lambda address: f"a[{address}]", lambda address: f"full[{address}]")
        )
    assert len(said) == len(structures.Reason) - 1
    assert "illegal read of a[0]" in said and "assertion" in said
    assert any("deadlock in warp 0: thread (0,0,0) waits at k.cu:7 in __shfl_sync" in text for text in said)


def test_lines_that_are_kept_are_those_of_the_library() -> None:
    """The file next to a library is rewritten if it is missing or broken."""
    path = engine.RawModule(code=SOURCE).get_function("read_wild").compiled().library.path
    read, kept = symbols._read_lines(path), path.with_suffix(".lines")
    assert all(read) or platform.system() == "Darwin"  # whose libraries are not ELF
    for torn in (None, "[", None):
        if torn is None:
            kept.unlink(missing_ok=True)
        else:
            kept.write_text(torn)
        for _ in range(2):
            symbols._lines.cache_clear()
            assert symbols._lines(path) == read
        assert kept.is_file()
