"""One-line programs, and NVRTC's verdict on each with CuPy's options: the engine's verdict is the same.

The table has NVRTC 12.9's verdicts, for machines without NVRTC; if it is installed, it is asked too. Differences have
their reasons.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers import engine
from helpers.engine import nvrtc, options

# In the body of `extern "C" __global__ void k(int *o)`.
TAKEN = (
    "o[0] = 0b11;",
    "o[0] = 0x1p3;",
    "o[0] = u8'a' + u'a';",
    "o[0] = alignof(o);",
    "o[0] = __func__[0] + __PRETTY_FUNCTION__[0];",
    "if (__builtin_expect(o[0], 1)) o[1] = 1;",
    "if (o[0]) __builtin_unreachable();",
    "if (o[0]) [[likely]] o[1] = 1;",
    "if (o[0] and o[1]) o[2] = 1;",
    "if (int a = o[0]; a) o[1] = a;",
    "union { struct { int a, b; }; long c; } u; u.c = 1; o[0] = u.a;",
    "int a __attribute__((aligned(16))) = 1; o[0] = a;",
    "int a{1.5f}; o[0] = a;",
    "float f = o[0]; int a{f}; o[0] = a;",
    "unsigned a[2] = {-1, o[0]}; o[0] = a[0];",
    'char *s = "a"; o[0] = s[0];',
    'const char *s = R"(x)"; o[0] = s[0];',
    "enum E : int; o[0] = sizeof(E);",
    "static_assert(true); o[0] = 1;",
    "int a[2] = {1, 2}; auto [x, y] = a; o[0] = x + y;",
    "auto g = [](int x) -> int { if (x) return 1; }; o[0] = g(1);",
    "long double a = o[0]; o[1] = (int)a;",
    'asm volatile(""); o[0] = 1;',
    "int *p = new int(3); o[0] = *p; delete p;",
    "int *p = (int *)malloc(4); free(p);",
    'o[0] = printf("%d", 1);',
    "assert(o[0] == 0);",
    "o[0] = unsigned(3);",
    "o[0] = min(1, 2u);",
    "o[0] = max(1.0f, 2.0);",
    "o[0] = sqrt(2.0f) + pow(2.0f, 3);",
    "o[0] = isnan(1.0f) + isfinite(1.0f) + signbit(1.0f);",
    "o[0] = exp10f(1);",
    "int *p = NULL; o[0] = p == 0;",
    "size_t a = 1; ptrdiff_t b = 2; o[0] = a + b;",
    "clock_t a = clock(); o[0] = a;",
    "wchar_t a = 1; o[0] = a;",
    "decltype(nullptr) a = nullptr; o[0] = a == nullptr;",
    "memcpy(o, o + 1, 4); memset(o, 0, 4);",
    "cudaError_t e = cudaSuccess; o[0] = e;",
    "dim3 d(1); uint3 t = threadIdx; uchar4 c = make_uchar4(1, 2, 3, 4); o[0] = d.x + t.x + c.x;",
    "o[0] = warpSize + __CUDA_ARCH__ + __ldg(o);",
    "int a = std::move(o[1]); o[0] = std::forward<int>(a);",
    "typedef unsigned int uint32_t; uint32_t a = 1; o[0] = a;",
    "enum { INT_MAX = 5 }; o[0] = INT_MAX;",
    "struct S { int EOF; } s{3}; o[0] = s.EOF;",
    "float INFINITY = 3; o[0] = INFINITY;",
    "int index = 1, time = 2, rand = 3; o[0] = index + time + rand;",
)
REFUSED = (
    "struct P { int a, b; }; P p{.a = 1, .b = 2}; o[0] = p.a;",
    "struct P { int a, b; }; P p = {.b = 2}; o[0] = p.b;",
    "int a[3] = {[1] = 5}; o[0] = a[1];",
    "auto g = []<typename T>(T x) { return x; }; o[0] = g(3);",
    "enum class C { a, b }; using enum C; o[0] = (int)a;",
    "for (int z = 0; int x : {1, 2, 3}) o[0] = x + z;",
    "struct B { int x : 3 = 2; }; o[0] = B().x;",
    "o[0] = (1 <=> 2) < 0;",
    "struct P { int a, b; }; P p(1, 2); o[0] = p.a;",
    "o[0] = o[1] ?: 3;",
    "o[0] = ({ int a = 3; a; });",
    "__typeof__(o[0]) a = 3; o[0] = a;",
    "int n = o[0]; int a[n]; o[1] = a[0];",
    "int a[0]; o[0] = sizeof(a);",
    "int a[warpSize]; o[0] = a[0];",
    "switch (o[0]) { case 1 ... 3: o[1] = 1; }",
    "struct F { int n; int a[]; }; o[0] = sizeof(F);",
    "struct P { int a, b; }; P p = (P){1, 2}; o[0] = p.a;",
    "int *p = (int[]){1, 2}; o[0] = p[0];",
    "o[0] = 3uz;",
    "struct S { static int operator()(int x) { return x; } }; o[0] = S{}(1);",
    "int g(int x) { return x; } o[0] = g(1);",
    "void *p = &&a; goto *p; a: o[0] = 1;",
    "o[0] = __COUNTER__;",
    "o[0] = __builtin_popcount(o[0]);",
    "__builtin_memcpy(o, o + 1, 4);",
    "o[0] = __builtin_inff();",
    "__int128 a = o[0]; o[1] = (int)a;",
    "__float128 a = o[0]; o[1] = (int)a;",
    "_Float16 a = o[0]; o[1] = (int)a;",
    "_Complex float a = 1; o[0] = 1;",
    "register int a = 1; o[0] = a;",
    "int *p = 5; o[0] = *p;",
    "return o[0];",
    "nothing(o);",
    "o[0] = unsigned int(3);",
    "o[0] = sizeof(void);",
    "o[0] = max(1.0f, 2);",
    "o[0] = min(1L, 2);",
    "o[0] = pow(2, 3);",
    "o[0] = sqrt(4);",
    "o[0] = abs(3u);",
    "swap(o[0], o[1]);",
    "o[0] = isnormal(1.0f);",
    "o[0] = div(4, 2).quot;",
    "memmove(o, o + 1, 4);",
    'o[0] = strlen("a");',
    "int *p = (int *)alloca(16); o[0] = p[0];",
    "__shared__ int a = 1;",
    "void *p = o; p = p + 1;",
    "half h = 1; o[0] = h;",
    "uint32_t a = 1; o[0] = a;",
    "int64_t a = 1; o[0] = a;",
    "uint8_t a = 1; o[0] = a;",
    "uint a = 1; o[0] = a;",
    "uchar a = 1; o[0] = a;",
    "ssize_t a = 1; o[0] = a;",
    "float a = -INFINITY; o[0] = a;",
    "float a = NAN; o[0] = a;",
    "o[0] = FLT_MAX;",
    "o[0] = INT_MAX;",
    "o[0] = SIZE_MAX != 0;",
    "o[0] = CHAR_BIT;",
    "o[0] = M_PI;",
    "o[0] = EOF;",
    "o[0] = std::min(1, 2);",
    "o[0] = std::sqrt(2.0f);",
    "o[0] = std::abs(-2);",
    "std::swap(o[0], o[1]);",
    "o[0] = std::is_same<int, int>::value;",
    "std::size_t a = 1; o[0] = a;",
    "std::nullptr_t a = nullptr; o[0] = a == nullptr;",
    "struct S { int a, b; }; o[0] = offsetof(S, b);",
    "o[0] = rand();",
    "o[0] = time(0);",
    "exit(1);",
    "abort();",
    'fprintf(stderr, "a");',
    'puts("a");',
    'char b[9]; sprintf(b, "a");',
)
# Before a kernel.
TAKEN_BEFORE = (
    "#define READ int t = threadIdx.x; \\\n  int s = t\n__device__ int f() { READ; return s; }",
    "__device__ int c = 2; __device__ int *d = &c + 1;",
    "__constant__ float4 d = {1, 2, 3, 4};",
    "__device__ dim3 d(1, 2, 3);",
    "#include <cuda_fp16.h>\n__constant__ __half d[2];",
    "struct S { int v; constexpr S(int x) : v(x) {} };\nS s(3);",
    "struct S { int v; S() {} };\nS s;",
    "struct S { int v = 3; };\nS s;",
    "int n = 3; int &r = n;",
    "int f() { static int n = 3; return n; }",
    "int f(int i) { static const int t[2] = {1, 2}; return t[i]; }",
    "int n = 3 > 2 ? 4 : 5;",
    "int n = sizeof(float4);",
    "int f(int x) { return x; }\nint (*g)(int) = f;",
    '__constant__ char s[] = "abc";',
    "void f() noexcept {} void g() throw() {}",
    'int f(int n, ...) { return n; }\nextern "C" { int g() { return 1; } }',
    "template <class T> T f(T x) { return x * INFINITY + std::min(x, x); }",
    "template <class T> struct S { T f() { return uint32_t(1); } };",
    "#ifndef M_PI\n#define M_PI 3\n#endif\nint n = M_PI;",
    "#include <cuda/std/cstdint>\nuint32_t n = UINT32_MAX;",
    "#include <cuda/std/climits>\nint n = INT_MAX;",
    "#include <cuda_runtime.h>",
    "using namespace std;",
)
REFUSED_BEFORE = (
    "int f() { return 3; }\nint n = f();",
    "float f() { return 2; }\nconst float d = f();",
    "__device__ int c = 2; __device__ int d = c;",
    "__constant__ float d = __int_as_float(0x7f800000);",
    "__constant__ float4 d = make_float4(1, 2, 3, 4);",
    "struct S { int v; S(int x) : v(x) {} };\nS s(3);",
    "int *p = new int;",
    "int f(int a) { static int n = a; return n; }",
    "auto f(auto x) { return x; }",
    "void f(x) int x; {}",
    "consteval int f() { return 1; }",
    "char8_t c = 0;",
    "void f() throw(int) {}",
    "void f() { try { } catch (...) { } }",
    "template <class T> T f(T x, uint32_t y) { return x; }",
    "template <class T> struct S { uint32_t f; };",
    "#include <assert.h>",
    "#include <math.h>",
    "using std::min;",
    "using namespace std;\nvoid f(int *a) { swap(a[0], a[1]); }",
)
# Where the engine differs: the program, NVRTC's verdict, and the reason.
DIFFERENT = {
    "void k2(int *o) { goto x; int a = 1; x: o[0] = a; }": (True, "no C++, and undefined where it is taken"),
    "int f(int *o) { return o > 0; }": (True, "no C++: a pointer is no number"),
    "__device__ double d = sqrt(2.0);": (False, "a host's compiler counts sqrt of a number as a number"),
    "const float c = 2; __device__ float d = c * 2;": (False, "and a const float as one"),
    "#include <cuda_fp16.h>\n__device__ __half d = 1.0f;": (False, "the engine's half is constexpr"),
    "struct S { int v; S() { v = 3; } };\nS s;": (False, "a constructor without arguments is not looked into"),
    "#include <cuda.h>": (False, "nvcc has it, and sources for both include it for the types of its functions"),
    "#include <cuda/std/algorithm>": (False, "later versions of libcu++ have it"),
}


def _program(body: str, before: str = "") -> str:
    return f'{before}\nextern "C" __global__ void k(int *o) {{ {body} }}\n'


def _is_taken(code: str) -> str:
    try:
        engine.RawModule(code=code, options=("-std=c++17",)).compile()
    except engine.CompileError as error:
        return str(error)
    return ""


PROGRAMS = {
    **{body: (_program(body), True) for body in TAKEN},
    **{body: (_program(body), False) for body in REFUSED},
    **{before: (_program("o[0] = 1;", before), True) for before in TAKEN_BEFORE},
    **{before: (_program("o[0] = 1;", before), False) for before in REFUSED_BEFORE},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "0")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_engine_says_what_nvrtc_says(name: str) -> None:
    code, taken = PROGRAMS[name]
    if nvrtc.version() is not None:
        refused = nvrtc.refusal(code, ("-std=c++17",))
        assert (refused == "") == taken, f"NVRTC says otherwise: {refused or 'it takes it'}"
    message = _is_taken(code)
    assert (message == "") == taken, message or "the engine takes it"
    if message:
        assert "engine_" not in message, message


def test_what_differs_has_a_reason_and_differs() -> None:
    for before, (taken, why) in DIFFERENT.items():
        code = _program("o[0] = 1;", before)
        assert why
        if nvrtc.version() is not None:
            assert (nvrtc.refusal(code, ("-std=c++17",)) == "") == taken, before
        assert (_is_taken(code) == "") != taken, before


NAMES: dict[str, tuple[str, Any]] = {
    "INFINITY": ("float a = -INFINITY;", "__int_as_float(0x7f800000), or include <math_constants.h> for CUDART_INF_F"),
    "uint32_t": ("uint32_t a = 1;", "write unsigned int, or include <cuda/std/cstdint>"),
    "int64_t": ("int64_t a = 1;", "write long long, or include <cuda/std/cstdint>"),
    "INT_MAX": ("int a = INT_MAX;", "include <cuda/std/climits>"),
    "FLT_MAX": ("float a = FLT_MAX;", "include <cuda/std/cfloat>"),
    "M_PI": ("float a = M_PI;", "CUDART_PI_F"),
    "half": ("half a;", "half comes with a header: #include <cuda_fp16.h>"),
    "std::min": ("int a = std::min(1, 2);", "min and max are built in: leave std:: out"),
    "std::is_same": (
        "bool a = std::is_same<int, int>::value;",
        "include <cuda/std/type_traits> and write cuda::std::is_same",
    ),
    "__int128": ("__int128 a;", "options=('--device-int128',)"),
    "__builtin_popcount": ("int a = __builtin_popcount(1);", "write __popc"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_without_its_header_is_told_with_what_to_write(name: str) -> None:
    body, hint = NAMES[name]
    message = _is_taken(_program(f"\n  {body}\n"))
    assert message.startswith("kernel.cu:3: error: ") and name.removeprefix("std::") in message and hint in message
    assert f"     3 |   {body}" in message and message.count("error:") == 1, message


# ---------------------------------------------------------------- options

OPTIONS_TAKEN = """--gpu-architecture=sm_90 --gpu-architecture=compute_90 -arch=sm_90a -arch=compute_90a --device-c -dc
--device-w -dw --relocatable-device-code=true -rdc=true -rdc=false --extensible-whole-program -ewp --device-debug -G
-dopt=on --dopt=on -dlto --dlink-time-opt -gen-opt-lto --gen-opt-lto -optix-ir --optix-ir --generate-line-info -lineinfo
--ptxas-options=-v -Xptxas=-v -maxrregcount=32 --maxrregcount=32 -ftz=true --ftz=false -prec-sqrt=true --prec-sqrt=true
-prec-div=false --prec-div=false -fmad=true --fmad=true -use_fast_math --use_fast_math -extra-device-vectorization
--extra-device-vectorization -modify-stack-limit=true --modify-stack-limit=true --define-macro=X --undefine-macro=X
--include-path=/tmp -no-source-include --no-source-include -std=c++14 --std=c++14 -std=c++17 --std=c++17 -std=c++20
--std=c++20 -std=c++11 -std=c++03 -builtin-move-forward=true --builtin-move-forward=false
-builtin-initializer-list=true --builtin-initializer-list=false --disable-warnings -w -restrict --restrict
--device-as-default-execution-space -default-device -device-int128 --device-int128 --optimization-info=inline
-opt-info=inline --version-ident=true --display-error-number -err-no --no-display-error-number -no-err-no
-diag-error=177 --diag-error=177 -diag-suppress=177 --diag-suppress=177,550 -diag-warn=177 --diag-warn=177
--brief-diagnostics=true -brief-diag=true -split-compile=0 --split-compile=0 -fdevice-syntax-only
--fdevice-syntax-only -minimal --minimal -no-cache --no-cache -pch --pch -pch-messages=true --pch-verbose=true
-instantiate-templates-in-pch=true -device-stack-protector=true --device-stack-protector=false --Ofast-compile=max
--Ofast-compile=0 -Ofc=max --jump-table-density=101 -jtd=101 -frandom-seed=x --frandom-seed=x -DX -DX=1 -UX
-I/tmp""".split()  # noqa: SIM905
OPTIONS_REFUSED = """-gpu-architecture=sm_90 --arch=sm_90 -device-c --dc -relocatable-device-code=true --rdc=true
-extensible-whole-program --ewp -device-debug --G -dopt --dopt -dopt=off --dlto -generate-line-info --lineinfo
-ptxas-options=-v --Xptxas=-v -ftz --ftz -fmad --prec-div -prec-sqrt -define-macro=X -undefine-macro=X
-include-path=/tmp --include=x --nsi -std=c++23 --std=c++26 -disable-warnings --w -device-as-default-execution-space
--default-device --device-float128 -optimization-info=inline --opt-info=inline -version-ident=true
-display-error-number --err-no -diag-error --diag-suppress -brief-diagnostics=true --brief-diag=true -split-compile
-Ofast-compile=max --Ofc=max -jump-table-density=101 -maxrregcount -fdevice-time-trace -O3 --O3 -O0 --optimize=3
--expt-relaxed-constexpr --extended-lambda -m64 --threads=2 -Werror -Wall --help --version -v --keep -lto
-fno-exceptions --DX --UX --I/tmp -ccbin=gcc -Xcompiler=-O3 --source-in-ptx --unknown unknown""".split()  # noqa: SIM905

# NVRTC 12.9 accepts them, and compiles all later programs of the process with them.
KEPT_BY_NVRTC = ("-restrict", "--restrict")


@pytest.mark.parametrize("every, taken", [(OPTIONS_TAKEN, True), (OPTIONS_REFUSED, False)], ids=["taken", "refused"])
def test_options_are_taken_as_nvrtc_takes_them(
    every: list[str], taken: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # -pch writes a compiled header here
    for option in every:
        if nvrtc.version() is not None and option not in KEPT_BY_NVRTC:
            said = nvrtc.refusal(f"// {option}\n", (option,))
            assert (said == "") == taken, f"{option}: {said}"
        try:
            options.for_host((option,))
        except engine.CompileError as error:
            assert not taken and f"unrecognized option {option!r}" in str(error), f"{option}: {error}"
        else:
            assert taken, option


def test_options_that_come_in_two_and_files_that_come_first(tmp_path: Any) -> None:
    (tmp_path / "first.h").write_text("#define VALUE 7\n__device__ int twice(int x) { return 2 * x; }\n")
    given = (f"-include={tmp_path / 'first.h'}", "-Xptxas", "-v", "-D", "MORE=1")
    out = engine.zeros(1, "int32")
    engine.RawKernel(_program("o[0] = twice(VALUE) + MORE;"), "k", given)((1,), (1,), (out,))
    assert out[0] == 15


def test_nvrtc_has_integers_of_128_bits_where_an_option_says_so() -> None:
    code = _program("__int128 a = o[0]; o[0] = (int)(a * 3);")
    out = engine.ones(1, "int32")
    engine.RawKernel(code, "k", ("--device-int128",))((1,), (1,), (out,))
    assert out[0] == 3
    assert nvrtc.refusal(code, ("--device-int128",)) == ""
