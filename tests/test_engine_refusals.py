"""The engine refuses what NVRTC refuses: the common forms, each with its line. If NVRTC is installed it must refuse
them too, so that no form here is legal CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.attention import kernel
from helpers.engine import compiler, nvrtc, refusals

K = 'extern "C" __global__ void k'
HOST = "is a __host__ function, and NVRTC compiles for the device alone: write __device__"

HEADERS = ("iostream", "vector", "cstdio", "stdio.h", "cmath", "math.h", "cstdint", "stdint.h", "algorithm", "limits")
HEADERS += ("cfloat", "float.h", "type_traits", "string.h", "stdlib.h", "array", "tuple", "functional", "time.h")

# name: (source, the line with the error, part of its message)
FORMS: dict[str, tuple[str, int, str]] = {
    "a function of __host__": (
        f"__host__ int f() {{ return 1; }}\n{K}(int *o) {{ o[0] = f(); }}",
        1,
        HOST,
    ),
    "a function of __host__ that nobody calls": (f"\n__host__ int f() {{ return 1; }}\n{K}(int *o) {{}}", 2, HOST),
    "a declaration of __host__": (f"__host__ int f();\n{K}(int *o) {{}}", 1, HOST),
    "a template of __host__": (f"template <class T>\n__host__ T f() {{ return 1; }}\n{K}(int *o) {{}}", 2, HOST),
    "a method of __host__": (f"struct S {{\n  __host__ int f() {{ return 1; }}\n}};\n{K}(int *o) {{}}", 2, HOST),
    "a kernel of __host__": ('extern "C" __host__ __global__ void k(int *o) {}', 1, HOST),
    "a variable of __host__": (f"__host__ int n = 3;\n{K}(int *o) {{ o[0] = n; }}", 1, "a variable is not __host__"),
    "a lambda of __device__": (
        f"{K}(int *o) {{\n  auto f = [] __device__(int x) {{ return x; }};\n  o[0] = f(1);\n}}",
        2,
        "a lambda with __device__",
    ),
    "a main that launches": (f"{K}(int *o) {{}}\nint main() {{\n  k<<<1, 1>>>(0);\n}}", 3, "launched from Python"),
    "a main that allocates": (f"{K}(int *o) {{}}\nint main() {{\n  int *p;\n  cudaMalloc(&p, 4);\n}}", 4, "cudaMalloc"),
    **{
        f"<{header}>": (f"#include <{header}>\n{K}(int *o) {{ o[0] = 1; }}", 1, f"<{header}> is a header of the host")
        for header in HEADERS
    },
    "thread_local": (f"{K}(int *o) {{\n  thread_local int n;\n  o[0] = n;\n}}", 2, "thread_local"),
    "initialised __shared__": (f"{K}(int *o) {{\n  __shared__ int a = 3;\n  o[0] = a;\n}}", 2, "a is in shared memory"),
    "an initialised __shared__ array": (
        f"{K}(int *o) {{\n  __shared__ int a[2] = {{1, 2}};\n  o[0] = a[0];\n}}",
        2,
        "cannot be initialised where it is declared",
    ),
    "__shared__ in braces": (
        f"{K}(int *o) {{\n  __shared__ int a[2]{{}};\n  o[0] = a[0];\n}}",
        2,
        "a is in shared memory",
    ),
    "a write to __constant__": (f"__constant__ int c;\n{K}(int *o) {{\n  c += o[0];\n}}", 3, "c is __constant__"),
    "a counter in __constant__": (f"__constant__ int c;\n{K}(int *o) {{\n  o[0] = c++;\n}}", 3, "c is __constant__"),
    "__constant__ in a function": (
        f"{K}(int *o) {{\n  __constant__ int c = 3;\n  o[0] = c;\n}}",
        2,
        "neither __device__ nor",
    ),
    "__device__ in a function": (
        f"{K}(int *o) {{\n  __device__ int c = 3;\n  o[0] = c;\n}}",
        2,
        "neither __device__ nor",
    ),
    "an array of unknown size": (f"{K}(int *o, int n) {{\n  int a[n];\n  a[0] = 1;\n  o[0] = a[0];\n}}", 2, "variable"),
    "a __shared__ array of unknown size": (
        f"{K}(int *o, int n) {{\n  __shared__ int a[n];\n  a[0] = 1;\n  o[0] = a[0];\n}}",
        2,
        "",
    ),
    "arithmetic on void*": (f"{K}(void *o) {{\n  *(int *)(o + 4) = 1;\n}}", 2, "void"),
    "throw": (f"{K}(int *o) {{\n  throw 1;\n}}", 2, "exception"),
    "try": (f"{K}(int *o) {{\n  try {{ o[0] = 1; }} catch (int) {{ o[0] = 2; }}\n}}", 2, "exception"),
    "typeid": (f"{K}(int *o) {{\n  o[0] = typeid(int).name()[0];\n}}", 2, "typeid"),
    "a kernel that returns a value": ('extern "C" __global__ int k(int *o) {\n  return 1;\n}', 1, "those return void"),
    "a kernel that returns a value behind": (
        'extern "C" __global__ auto k(int *o) -> int {\n}',
        1,
        "those return void",
    ),
    "a kernel that says not what": ('extern "C" __global__ auto k(int *o) {}', 1, "those return void"),
    "atomicMax of float": (f"{K}(float *o) {{\n  atomicMax(o, 1.0f);\n}}", 2, "atomicMax"),
    "atomicMin of double": (f"{K}(double *o) {{\n  atomicMin(o, 1.0);\n}}", 2, "atomicMin"),
    "atomicAdd of long long": (f"{K}(long long *o) {{\n  atomicAdd(o, 1LL);\n}}", 2, "atomicAdd"),
    "atomicAdd of unsigned long": (f"{K}(unsigned long *o) {{\n  atomicAdd(o, 1UL);\n}}", 2, "atomicAdd"),
    "atomicAdd of short": (f"{K}(short *o) {{\n  atomicAdd(o, 1);\n}}", 2, "atomicAdd"),
    "atomicAdd of bool": (f"{K}(bool *o) {{\n  atomicAdd(o, true);\n}}", 2, "atomicAdd"),
    "atomicSub of float": (f"{K}(float *o) {{\n  atomicSub(o, 1.0f);\n}}", 2, "atomicSub"),
    "atomicExch of double": (f"{K}(double *o) {{\n  atomicExch(o, 1.0);\n}}", 2, "atomicExch"),
    "atomicCAS of float": (f"{K}(float *o) {{\n  atomicCAS(o, 1.0f, 2.0f);\n}}", 2, "atomicCAS"),
    "atomicCAS of short": (f"{K}(short *o) {{\n  atomicCAS(o, (short)1, (short)2);\n}}", 2, "atomicCAS"),
    "atomicInc of int": (f"{K}(int *o) {{\n  atomicInc(o, 5);\n}}", 2, "atomicInc"),
    "atomicAnd of float": (f"{K}(float *o) {{\n  atomicAnd(o, 1.0f);\n}}", 2, "atomicAnd"),
    "a write through const": (f"{K}(const int *o) {{\n  o[0] = 1;\n}}", 2, ""),
    "a write to threadIdx": (f"{K}(int *o) {{\n  threadIdx.x = 3;\n}}", 2, ""),
    "float4 + float4": (f"{K}(float4 *o) {{\n  o[0] = o[1] + o[2];\n}}", 2, "operator+"),
    "three numbers for a float4": (f"{K}(float4 *o) {{\n  o[0] = make_float4(1, 2, 3);\n}}", 2, "make_float4"),
    "__shfl": (f"{K}(int *o) {{\n  o[0] = __shfl(o[1], 2);\n}}", 2, "__shfl"),
    "half without its header": (f"{K}(float *o) {{\n  half h = 1;\n}}", 2, "half"),
    "std::vector": (f"{K}(int *o) {{\n  std::vector<int> v;\n}}", 2, "vector"),
    "cudaMalloc": (f"{K}(int *o) {{\n  cudaMalloc(&o, 4);\n}}", 2, "cudaMalloc"),
}


@pytest.mark.parametrize("name", FORMS)
def test_refused(name: str) -> None:
    code, line, says = FORMS[name]
    with pytest.raises(engine.CompileError) as caught:
        engine.RawModule(code=f"{code}\n", options=("-std=c++17",)).compile()
    message = str(caught.value)
    assert f"kernel.cu:{line}: error: " in message and says in message, message
    assert f"{line:>6} | {code.splitlines()[line - 1]}" in message
    if nvrtc.version() is not None:
        assert nvrtc.refusal(f"{code}\n", ("-std=c++17",)), "NVRTC takes it"


# Declarations without a memory space are the device's. name: text before the kernel, and o[0] = ..., its value.
UNMARKED: dict[str, tuple[str, str, int]] = {
    "a function": ("int f(int x) { return x; }", "f(1)", 1),
    "a template": ("template <class T> T f(T x) { return x; }", "f(2)", 2),
    "a constexpr function": ("constexpr int f(int x) { return x; }", "f(3)", 3),
    "a static function": ("static inline int f() { return 4; }", "f()", 4),
    "a function in a namespace": ("namespace n {\nint f() { return 5; }\n}", "n::f()", 5),
    "a function of C": ('extern "C" int f(int x) { return x; }', "f(6)", 6),
    "a recursive function": ("int f(int n) { return n > 0 ? n + f(n - 1) : 0; }", "f(3)", 6),
    "an operator": ("struct S { int v; };\nS operator+(S a, S b) { return S{a.v + b.v}; }", "(S{3} + S{4}).v", 7),
    "a method": ("struct S { int f() { return 8; } };", "S().f()", 8),
    "a virtual method": ("struct S { virtual int f() { return 9; } };", "S().f()", 9),
    "a constructor and a destructor": ("struct S { int v; S(int x) : v(x) {} ~S() {} };", "S(10).v", 10),
    "a declaration": ("int f(); __device__ int f() { return 11; }", "f()", 11),
    "a pointer to a function": ("int f(int n) { return n; }\nint (*g)(int) = f;", "g(12)", 12),
    "main": ("int main() { return 0; }", "13", 13),
    "main with arguments": ("int main(int argc, char **argv) { return argc; }", "14", 14),
    "a variable": ("int n = 15;", "n++", 15),
    "a static variable": ("static int n;", "n + 16", 16),
    "an array": ("float table[4] = {1, 17};", "table[1]", 17),
    "a variable that is never used": ("unsigned int n[2];", "18", 18),
    "a variable in a namespace": ("namespace n { int v = 19; }", "n::v", 19),
    "a variable in a class": ("struct S { static int n; };\nint S::n = 20;", "S::n", 20),
    "a lambda": ("auto f = [](int x) { return x; };", "f(21)", 21),
    "an object": ("struct S { int v = 22; };\nS s;", "s.v", 22),
    "a local static": ("int f() { static int n = 23; return n++; }", "f()", 23),
}


@on_each_device
@pytest.mark.parametrize("name", UNMARKED)
def test_what_says_nothing_of_where_it_lives_is_taken(cp: Any, name: str) -> None:
    before, value, expected = UNMARKED[name]
    out = cp.zeros(1, np.int32)
    code = f"{before}\n{K}(int *o) {{ o[0] = {value}; }}\n"
    cp.RawModule(code=code, options=("-std=c++17",)).get_function("k")((1,), (1,), (out,))
    assert out[0] == expected


KERNELS = r"""
template <typename T, T (*F)(const T &)> __global__ void apply(T *o) { o[threadIdx.x] = F(o[threadIdx.x]); }
__device__ int twice(const int &x) { return 2 * x; }
extern "C" __global__ auto behind(int *o) -> void { o[threadIdx.x] += 1; }
using Nothing = void;
extern "C" __global__ __device__ Nothing alias(int *o) { o[threadIdx.x] += 10; }
"""


@on_each_device
def test_forms_of_kernels(cp: Any) -> None:
    names = ("apply<int, twice>",)
    module = cp.RawModule(code=KERNELS, options=("-std=c++17",), name_expressions=names)
    out = cp.asarray(np.arange(4, dtype=np.int32))
    for name in (*names, "behind", "alias"):
        module.get_function(name)((1,), (4,), (out,))
    assert cp.asnumpy(out).tolist() == [11, 13, 15, 17]


LEGAL = cuda_text("engine_refusals_legal")


@on_each_device
def test_what_is_legal_is_taken(cp: Any) -> None:
    out = cp.zeros(2, np.int32)
    cp.RawModule(code=LEGAL, options=("-std=c++17",)).get_function("k")((1,), (1,), (out,), shared_mem=16)
    assert cp.asnumpy(out).tolist() == [4 + 4 + 2 + 4 + 5 + 2 + 1 + 5 + 2 + 7 + 1, 3 + 5 + 1 + 16 + 1]


# Macros and conditions decide whether these are refused: the source, and the line with the error (0: none).
HIDDEN = {
    "a function behind a brace of a macro": ("#define OPEN {\n__host__ int f() OPEN return 1; }", 2),
    "__host__ by a macro": ("#define H __host__\n\nH int f() { return 1; }", 3),
    "__host__ and __device__ by a macro": ("#define HD __host__ __device__\nHD int f() { return 1; }", 0),
    "a function made by a macro": ("#define F(name) __host__ int name() { return 1; }\n\nF(f)", 3),
    "a kernel made by a macro": ("#define F(name) __global__ void name() {}\n\nF(f)", 0),
    "a branch that is read": ("#if N == 64\n__host__ int f() { return 1; }\n#endif", 2),
    "a branch that is not": ("#if N == 32\n__host__ int f() { return 1; }\n#endif", 0),
    "the other branch": ("#if N == 32\n__device__ int n;\n#else\n__host__ int n;\n#endif", 4),
    "shared memory by a macro": ("#define S __shared__\n__global__ void k() {\n  S int a = 3;\n}", 3),
    "a header in a branch": ("#if N == 64\n#include <cstdio>\n#endif", 2),
    "a header in a branch that is not read": ("#if N == 32\n#include <cstdio>\n#endif", 0),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_macros_hide_is_found(name: str) -> None:
    code, line = HIDDEN[name]
    message = refusals.refusal(f"{code}\n", "#define N 64\n", "kernel.cu", ["-std=c++17"])
    assert message.startswith(f"kernel.cu:{line}: error: ") if line else message == ""


def test_no_preprocessor_is_asked_of_a_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = compiler.preprocess

    def counted(text: str, options: list[str]) -> Any:
        asked.append(text)
        return real(text, options)

    monkeypatch.setattr(compiler, "preprocess", counted)
    for number in range(3):
        code = kernel.source("06_wmma.cu") + f"int another{number};\n"
        assert refusals.refusal(code, "#define HEAD_DIM 64\n", "kernel.cu", ["-std=c++17"]) == ""
    assert not asked
    assert "another9" in refusals.refusal(f"{code}__host__ int another9();\n", "", "kernel.cu", ["-std=c++17"])
    assert len(asked) == 1


def test_a_host_header_is_refused_whatever_the_options_say_of_functions() -> None:
    """CuPy passes --device-as-default-execution-space itself; passing it again changes nothing."""
    code = f"#include <stdint.h>\nint f(int x) {{ return x + 1; }}\n{K}(int *o) {{ o[0] = f(1); }}"
    for again in ("-default-device", "--device-as-default-execution-space"):
        with pytest.raises(engine.CompileError, match=r"<stdint\.h> is a header of the host"):
            engine.RawModule(code=code, options=(again,)).compile()


BOUNDED = r"""
#define WARPS 2
constexpr int THREADS = 32 * WARPS;
extern "C" __global__ void __launch_bounds__(THREADS, 1) plain(int *o) { o[threadIdx.x] = 1; }
extern "C" __global__ __launch_bounds__(BLOCK) void defined(int *o) { o[threadIdx.x] = 2; }
template <int N> __global__ void __launch_bounds__(N) templated(int *o) { o[threadIdx.x] = 3; }
"""


@on_each_device
def test_launch_bounds(cp: Any) -> None:
    options = ("-std=c++17", "-DBLOCK=96")
    module = cp.RawModule(code=BOUNDED, options=options, name_expressions=("templated<32>",))
    refused = engine.LaunchError if cp is engine else Exception
    for name, most in (("plain", 64), ("defined", 96)):
        kernel = module.get_function(name)
        assert kernel.max_threads_per_block == most
        out = cp.zeros(1024, np.int32)
        kernel((1,), (most,), (out,))
        assert (cp.asnumpy(out) > 0).sum() == most
        with pytest.raises(refused):
            kernel((1,), (most + 32,), (out,))
    if cp is engine:
        with pytest.raises(engine.LaunchError, match="compiled for 64 at most, by its __launch_bounds__"):
            module.get_function("plain")((1,), (8, 9), (cp.zeros(1024, np.int32),))


# ---------------------------------------------------------------- NVRTC first


needs_nvrtc = pytest.mark.skipif(nvrtc.version() is None, reason="NVRTC is not installed")


@pytest.fixture
def asked_first() -> Any:
    nvrtc.check_first()
    yield
    nvrtc.check_first(False)


@needs_nvrtc
@pytest.mark.usefixtures("asked_first")
def test_nvrtc_is_asked_first() -> None:
    code = "const float c = 2;\n__device__ float d = c * 3;\n__device__ double e = sqrt(4.0);\n"
    code += f"{K}(float *o) {{ o[0] = d; }}\n"
    with pytest.raises(engine.CompileError) as caught:
        engine.RawModule(code=code).compile()
    message = str(caught.value)
    assert "NVRTC refuses this source, as it would for a GPU" in message
    said = "error: dynamic initialization is not supported for a __device__ variable"
    assert f"kernel.cu:2: {said}\n     2 | __device__ float d = c * 3;" in message
    assert f"kernel.cu:3: {said}" in message
    nvrtc.check_first(False)
    out = engine.zeros(1, np.float32)
    engine.RawKernel(code, "k")((1,), (1,), (out,))
    assert out[0] == 6


@needs_nvrtc
@pytest.mark.usefixtures("asked_first")
def test_nvrtc_takes_what_is_right_and_its_answer_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.empty(1)
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    code = "#include <mma.h>\ntemplate <typename T> __global__ void set(T *o) {\n  o[0] = N;\n}\n"
    how = {"options": ("-std=c++17", "-DN=3"), "name_expressions": ("set<float>",)}
    out = engine.zeros(1, np.float32)
    engine.RawModule(code=code, **how).get_function("set<float>")((1,), (1,), (out,))
    assert out[0] == 3
    (kept,) = tmp_path.glob("nvrtc-*.txt")
    assert kept.read_text() == ""
    nvrtc.refusal.cache_clear()
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("asked again"))
    engine.RawModule(code=code, **how).compile()


@needs_nvrtc
@pytest.mark.usefixtures("asked_first")
def test_nvrtc_is_asked_of_lines_by_their_own_names() -> None:
    code = f'#line 7 "mine.cu"\n{K}(float *o) {{\n  o[0] = nothing;\n}}\n'
    with pytest.raises(
        engine.CompileError, match=r"mine.cu:8: error: identifier .nothing. is undefined\n +8 \|   o\[0\]"
    ):
        engine.RawModule(code=code).compile()
