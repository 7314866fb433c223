"""What NVRTC refuses is looked for without a compiler's preprocessor where the engine's own says the same: it has to,
token by token, or to leave the source to the compiler."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.attention import kernel
from helpers.engine import compiler, preprocessor, refusals
from helpers.engine.cuda_source.source import blank_comments

OPTIONS = [*refusals.PREPROCESSOR, "-std=c++17"]
KERNELS = sorted(
    str(path.relative_to(kernel.KERNELS))
    for path in kernel.KERNELS.rglob("*.cu")
    if "#include <cute/" not in path.read_text()
)


def tokens(text: str) -> list[str]:
    """Without what is in strings; the compiler leaves out `#pragma once`."""
    text = re.sub(r"^#(?!\s*pragma\s+(?:no)?unroll).*$", "", blank_comments(text), flags=re.M)
    return re.findall(r"\w+|[^\w\s]", re.sub(r'"\s*"', "", text))


def resolved(code: str) -> str | None:
    return preprocessor.resolved(code, OPTIONS, compiler.preprocess)


# Read without the compiler.
PLAIN = {
    "no directive": "int f(int x) { return x; }",
    "a number": "#define N 64\nfloat a[N]; int b = -N;",
    "one macro in another": "#define M (N + 1)\n#define N 64\nint a[M];\n#undef N\n#define N 3\nint b[M];",
    "macros in a circle": "#define a b c\n#define b a\nint a, b;",
    "its own name": "#define f f + 1\nint x = f;",
    "a macro that is nothing": "#define inlined\ninlined int f();\nint a = -inlined-1;",
    "no macro in a number": "#define e5 7\n#define x 3\nfloat f = 1e5, g = 1.e5f + 0x10 + x;",
    "no macro in a string": "#define N 3\nconst char *s = \"N\", c = 'N'; // N\nint n = /* N */ N;",
    "signs side by side": "#define MINUS -1\nint a = -MINUS, b = 1 -MINUS;",
    "given once": "#ifndef N\n#define N 1\n#endif\n#ifndef N\n#define N 2\n#endif\nint n = N;",
    "branches": "#if 0\nint a;\n#elif 1\nint b;\n#elif 1\nint c;\n#else\nint d;\n#endif\nint e;",
    "branches in branches": "#if 0\n#if 1\nint a;\n#else\nint b;\n#endif\n#else\n#ifdef N\nint c;\n"
    "#else\nint d;\n#endif\n#endif",
    "who compiles": "#ifdef __CUDACC_RTC__\nint a;\n#endif\n#ifndef __CUDACC__\nint main() {}\n#endif",
    "which architecture": "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\nint a;\n#else\nint b;\n#endif",
    "which language": "#if __cplusplus < 202002\nint a;\n#endif\n#if __GNUC__ || __clang__\nint b;\n#endif",
    "defined without brackets": "#define N\n#if defined N && !defined M\nint a;\n#endif",
    "a name that is nothing": "#if NOTHING\nint a;\n#endif\n#if NOTHING == 0\nint b;\n#endif",
    "what binds": "#if 1 + 2 * 3 == 7 && !0 || 0\nint a;\n#endif\n#if 1 == 1 == 1\n"
    "int b;\n#endif\n#if 2 < 1 < 1\nint c;\n#endif",
    "from the left": "#if 8 - 4 - 2 == 2 && 16 / 4 / 2 == 2 && 100 % 7 % 2 == 0\nint a;\n#endif",
    "not before equal": "#if !1 == 0\nint a;\n#endif\n#if -1 < 0\nint b;\n#endif\n#if !(2 == 3)\nint c;\n#endif",
    "and gives one": "#if (2 && 3) == 1\nint a;\n#endif\n#if (0 || 5) == 1\nint b;\n#endif",
    "hexadecimal, suffixes": "#if 0x10 == 16 && 5L == 5\nint a;\n#endif",
    "macros in a condition": "#define D 128\n#define V (D % 4 == 0)\n#if V\nint a;\n#endif\n"
    "#define D 3\n#if V\nint b;\n#endif",
    "unroll": "void f() {\n#pragma unroll\nfor (;;) {}\n#pragma unroll 4  // four\nfor (;;) {}\n}",
    "lines of a file": '#line 7 "a.cu"\nint a;\n#line 9\nint b;',
    "a #define on several lines": "#define SUM 1 + \\\n  2 + \\\n  3\nint a = SUM;",
    "a comment behind a #define": "#define N 3  // keys\n#define M 4  /* rows */\nint a[N][M];",
    "a comment on several lines": "/* one\n two */\nint a;\nint /* N\n N */ b;",
    "called macros": "#define F(x) x + 1\nint a = F(2);\nint b;\nint c = F(F(3)) + F((4, 5));",
    "strings and names made by macros": '#define G(N, T) T a##N[N]; const char *s##N = "x" #N;\nG(3, int)\n'
    "G(4, float)\nint z;",
    "as many parameters as one likes": "#define V(...) f(__VA_ARGS__)\n#define W(a, ...) V(a) V(__VA_ARGS__)\n"
    "int a = W(1, 2, 3);",
    "a called macro behind another": "#define F(x) int x {\n#define OPEN F(a)\nOPEN }\nint b;",
    "a called macro of other values": "#define N 3\n#define F(x) x * N\nint a = F(1);\n#undef N\n"
    "#define N 4\nint b = F(1);",
    "a kernel made by a macro": "#define K(name, n) __global__ void name() { f<n>(); }\nK(a, 1)\nK(b, 2)\n#undef K",
}

# What the compiler alone is to say.
ASKED = {
    "arguments in several lines": "#define F(x) x\nint a = F(\n  2);",
    "arguments in the next line": "#define F(x) int x;\nF\n(a)",
    "arguments behind a directive": "#define F(x) int x;\nF\n#line 3\n(a)",
    "a macro that ends with another's name": "#define F(x) int x;\n#define G() F\nG()\n(a)",
    "a macro with parameters in a condition": "#define F(x) x\n#if F(1)\nint f() {}\n#endif",
    "defined by a macro": "#define D defined(N)\n#if D\nint a;\n#endif",
    "an include": '#include "mine.cuh"',
    "an include of the system's": "#include <cstdio>",
    "an include by a macro": "#define H <cstdio>\n#include H",
    "whether there is a header": "#if __has_include(<cstdio>)\nint a;\n#endif",
    "a line that goes on": "int a; // \\\nint f() {}\nint b;",
    "a directive that goes on": "#if 1 \\\n  && 0\nint a;\n#endif",
    "a string that goes on": 'const char *s = "a\\\n";',
    "a space behind the backslash": "#define N 1 \\ \n+ 2\nint n = N;",
    "a comment in a #define that goes on": "#define N 1 /* a\nb */ + 2\nint n = N;",
    "a directive behind a comment": "/* a\nb */ #define N 1\nint n = N;",
    "no directive behind a comment": "int a; /* a\nb */ #define N 1",
    "a raw string": 'const char *s = R"(/* " )";',
    "a string with a prefix": '#define L 3\nauto s = L"a";',
    "digits in groups": "int n = 1'000; int m = 2'000;",
    "its line": "#if __LINE__ == 1\nint a;\n#endif",
    "a counter": "int a[__COUNTER__ + 1];",
    "another #": "%:define N 1\nint n = N;",
    "#pragma by a macro": "#define N 4\nvoid f() {\n#pragma unroll N\nfor (;;) {}\n}",
    "#pragma that brings a macro back": '#define N 1\n#pragma push_macro("N")\nint n = N;',
    "_Pragma": '_Pragma("unroll") int n;',
    "an error": "#error no\nint f() {}",
    "an operator with a name": "#if 1 and 0\nint a;\n#endif",
    "true": "#if true\nint a;\n#endif",
    "numbers without sign": "#if -1 > 0u\nint a;\n#endif",
    "an octal number": "#if 010 == 8\nint a;\n#endif",
    "a character": "#if 'a' == 97\nint a;\n#endif",
    "shifts": "#if 1 << 2 == 4\nint a;\n#endif",
    "a choice": "#if 1 ? 0 : 1\nint a;\n#endif",
    "a division of a negative number": "#if -7 / 2 == -3\nint a;\n#endif",
    "a division by nothing": "#if 1 / 0\nint a;\n#endif",
    "a group that does not end": "#if 1\nint a;",
    "a letter of another alphabet": "int größe;",
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_sources_are_as_the_compiler_leaves_them(name: str) -> None:
    found = resolved(f"{PLAIN[name]}\n")
    assert found is not None
    assert tokens(found) == tokens(compiler.preprocess(f"{PLAIN[name]}\n", OPTIONS))


@pytest.mark.parametrize("name", ASKED)
def test_other_sources_are_left_to_the_compiler(name: str) -> None:
    assert resolved(f"{ASKED[name]}\n") is None


@pytest.mark.parametrize("file", KERNELS)
def test_kernels_are_plain(file: str) -> None:
    text = refusals.for_preprocessor(kernel.source(file), [])
    found = resolved(text)
    if found is None:  # a #pragma unroll by a macro
        assert re.search(r"#pragma unroll [A-Z]", text)
    else:
        assert tokens(found) == tokens(compiler.preprocess(text, OPTIONS))


# Macros and conditions decide whether these are refused: the source, and the line that is blamed (0: none).
HIDDEN = {
    "a function behind a brace of a macro": ("#define OPEN {\nint f() OPEN return 1; }", 2),
    "a type of a macro": ("#define T int\n\nT n = 3;", 3),
    "__device__ by a macro": ("#define D __device__\nD int f() { return 1; }", 0),
    "no __device__ by a macro": ("#define D_EVICE\nD_EVICE int f() { return 1; }", 2),
    "a name like a header's macro": ("#define WORD_T int\nWORD_T f() { return 1; }", 2),
    "a name like a header's macro that is none": ("WORD_T f() { return 1; }", 0),
    "a function made by a macro": ("#define F(name) int name() { return 1; }\n\nF(f)", 3),
    "a kernel made by a macro": ("#define F(name) __global__ void name() {}\n\nF(f)", 0),
    "a branch that is read": ("#if N == 64\nint f() { return 1; }\n#endif", 2),
    "a branch that is not": ("#if N == 32\nint f() { return 1; }\n#endif", 0),
    "the other branch": ("#if N == 32\n__device__ int n;\n#else\nint n;\n#endif", 4),
    "shared memory by a macro": ("#define S __shared__\n__global__ void k() {\n  S int a = 3;\n}", 3),
    "a header in a branch": ("#if N == 64\n#include <cstdio>\n#endif", 2),
    "a header in a branch that is not read": ("#if N == 32\n#include <cstdio>\n#endif", 0),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_macros_hide_is_found(name: str) -> None:
    code, line = HIDDEN[name]
    said = refusals.refusal(f"{code}\n", "#define N 64\n", "kernel.cu", ["-std=c++17"])
    assert said.startswith(f"kernel.cu:{line}: error: ") if line else said == ""


def test_no_compiler_is_asked_of_a_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = compiler.preprocess

    def counted(text: str, options: list[str]) -> Any:
        asked.append(text)
        return real(text, options)

    monkeypatch.setattr(compiler, "preprocess", counted)
    for number in range(3):
        code = kernel.source("07_mma.cu") + f"__device__ int another{number};\n"
        assert refusals.refusal(code, "#define HEAD_DIM 64\n", "kernel.cu", ["-std=c++17"]) == ""
    assert asked in ([], [""])  # once, for its own macros
    assert "another9" in refusals.refusal(f"{code}int another9;\n", "", "kernel.cu", ["-std=c++17"])
    assert len(asked) > 1
