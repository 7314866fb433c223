"""From a .cu file to a checked launch: helpers/attention/kernel.py, on this machine's device."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_files import cuda_text

from helpers.attention import kernel
from helpers.device import ON_GPU, cp
from helpers.engine import CompileError, LaunchError, compiler
from helpers.engine.cuda_source import structs
from helpers.xray import xray

CODE = cuda_text("kernel_launch")
f32, i32 = np.float32, np.int32


def scale() -> kernel.Kernel:
    return kernel.load(CODE, "scale")


def test_a_launch() -> None:
    x, out = cp.asarray(np.arange(100, dtype=f32)), cp.zeros(100, f32)
    scale()((4,), (32,), (x, out, i32(100), f32(0.5)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(100) * 0.5)
    scale()([4], [32], [x, out, 50, np.asarray(2, f32)])  # lists, a Python int, a 0-dimensional array
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(100) * np.where(np.arange(100) < 50, 2, 0.5))


def test_a_template_and_defines() -> None:
    x, out = cp.asarray(np.arange(9, dtype=np.int16)), cp.zeros(9, np.int16)
    kernel.load(CODE, "repeat<short, 3>")((1,), (32,), (x, out, 9))
    np.testing.assert_array_equal(cp.asnumpy(out), 3 * np.arange(9))
    code = 'extern "C" __global__ void k(int *a) { a[0] = WIDTH * 10 + HEIGHT; }\n'
    out = cp.zeros(1, i32)
    kernel.load(code, "k", defines={"WIDTH": 4, "HEIGHT": 2})((1,), (1,), (out,))
    assert int(out[0]) == 42
    assert kernel.options({"A": 1, "B": "x"}) == ("-std=c++17", "-DA=1", "-DB=x")


def test_a_module_of_ones_own() -> None:
    module = cp.RawModule(code=CODE, name_expressions=("repeat<float, 2>",))
    x, out = cp.ones(3, f32), cp.zeros(3, f32)
    for code in (None, CODE):
        kernel.typed(module, "repeat<float, 2>", code)((1,), (3,), (x, out, 3))
        assert (cp.asnumpy(out) == 2).all()
    with pytest.raises(
        ValueError, match=r"the source has no kernel 'missing'; its kernels: scale, repeat, many, dynamic"
    ):
        kernel.typed(module, "missing")


def test_parameters_are_read_from_the_source() -> None:
    found = [(p.name, p.kind, p.dtype, p.is_const) for p in kernel.load(CODE, "many").parameters]
    assert found == [
        ("a", "s", "uint8", False),
        ("b", "s", "int64", False),
        ("c", "s", "float64", False),
        ("d", "s", "bool", False),
        ("e", "p", "void", True),
        ("f", "S", "float32", False),
        ("g", "p", "uint32", False),
        ("h", "s", "uint64", False),
    ]


def test_every_kind_of_argument() -> None:
    out = cp.zeros(1, np.uint32)
    vector = np.array([(1, 2, 3, 4)], np.dtype("f4,f4,f4,f4"))
    args = (
        np.uint8(1),
        10,
        np.float64(100),
        np.bool_(True),
        None,
        vector,
        out,
        np.uint64(1000),
    )
    kernel.load(CODE, "many")((1,), (1,), args)
    assert int(out[0]) == 1 + 10 + 100 + 1 + 1 + 4 + 1000
    args = (2**8 - 1, -1, 0.0, np.bool_(False), out, *args[5:])
    kernel.load(CODE, "many")((1,), (1,), args)
    assert int(out[0]) == 255 - 1 + 4 + 1000


def good() -> tuple[Any, ...]:
    return cp.ones(64, f32), cp.zeros(64, f32), i32(64), f32(2)


@pytest.mark.parametrize(
    ("index", "value", "error", "says"),
    [
        (0, np.ones(64, f32), TypeError, r"argument 0 \(const float32\* in\) of scale is a NumPy array.*cp\.asarray"),
        (0, 3, TypeError, r"argument 0 .* expected a device array; got int 3"),
        (
            0,
            lambda: cp.ones(64, np.float64),
            TypeError,
            r"dtype is float64, the kernel reads float32.*astype\(cp\.float32\)",
        ),
        (
            1,
            lambda: cp.ones((8, 16), f32)[:, ::2],
            ValueError,
            r"argument 1 \(float32\* out\) .*a view with gaps.*ascontiguousarray",
        ),
        (1, lambda: cp.ones((8, 8), f32).T, ValueError, r"shape \(8, 8\), strides \(4, 32\) bytes"),
        (2, f32(64), TypeError, r"argument 2 \(int32 n\) of scale got a float32; write cp\.int32\(64\)"),
        (2, np.int64(2**31), TypeError, "does not fit int32"),
        (2, 64.0, TypeError, r"got a Python float \(CuPy passes a Python float as 8 bytes of float64"),
        (2, 2**31, TypeError, "2147483648 does not fit int32"),
        (2, -(2**31) - 1, TypeError, "does not fit int32"),
        (2, True, TypeError, "got a bool"),
        (2, "64", TypeError, r"is a scalar; got str '64'"),
        (3, 2.0, TypeError, r"argument 3 \(float32 factor\) of scale got a Python float.*write cp\.float32\(2\.0\)"),
        (3, 2, TypeError, r"got a Python int \(CuPy passes a Python int as int64.*write cp\.float32\(2\)"),
        (3, np.float64(2), TypeError, "got a float64"),
        (3, None, TypeError, "is a scalar"),
    ],
)
def test_a_wrong_argument(index: int, value: Any, error: type[Exception], says: str) -> None:
    args = list(good())
    args[index] = value() if callable(value) else value
    with pytest.raises(error, match=says):
        scale()((2,), (32,), tuple(args))
    assert not cp.asnumpy(args[1]).any() or index == 1, "nothing was launched"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (lambda: good()[:3], r"scale takes 4 arguments, got 3: missing float32 factor\. \(CuPy does not count them"),
        (lambda: (*good(), 1), r"scale takes 4 arguments, got 5\. .*scale\(const float32\* in, float32\* out, int32 n"),
        (lambda: (), "got 0: missing const float32. in, float32. out, int32 n, float32 factor"),
        (lambda: good()[0], "args is of type .*: expected a tuple with one value for each parameter of scale"),
    ],
)
def test_a_wrong_number_of_arguments(args: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        scale()((2,), (32,), args())


def test_a_null_pointer_is_none() -> None:
    kernel.load(CODE, "scale")((1,), (32,), (None, None, 0, f32(1)))


@pytest.mark.parametrize("size", [1000, 12 * 1024, 20 * 1024, 40 * 1024])
def test_dynamic_shared_memory_is_opted_into(size: int) -> None:
    out = cp.zeros(size, f32)
    kernel.load(CODE, "dynamic")((1,), (256,), (out, size), shared_mem=4 * size)
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(size)[::-1])


def test_more_shared_memory_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"dynamic needs 1,048,576 bytes of dynamic shared memory and 0 static"):
        kernel.load(CODE, "dynamic")((1,), (32,), (cp.zeros(4, f32), 4), shared_mem=1 << 20)


def test_attributes() -> None:
    assert scale().attributes["shared_size_bytes"] == 0
    assert scale().attributes["max_threads_per_block"] == 1024


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"no kernel file '99_lost\.cu' in kernels/; there are: 01_naive\.cu"):
        kernel.load("99_lost.cu", "lost")


def test_includes_are_pasted_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.cu").write_text('// first\n  #include "part.cuh"\n#include <cuda_fp16.h>\nlast\n')
    (tmp_path / "part.cuh").write_text('#pragma once\n#include "deep.cuh"\npart\n')
    (tmp_path / "deep.cuh").write_text("deep\n")
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    assert kernel.source("main.cu").splitlines() == [
        '#line 1 "main.cu"',
        "// first",
        '#line 1 "part.cuh"',
        "",
        '#line 1 "deep.cuh"',
        "deep",
        '#line 3 "part.cuh"',
        "part",
        '#line 3 "main.cu"',
        "#include <cuda_fp16.h>",
        "last",
    ]
    assert kernel.source("deep.cuh") == '#line 1 "deep.cuh"\ndeep\n#line 1 "kernel.cu"\n', "and then one's own text"


def test_a_header_with_pragma_once_is_pasted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at its first inclusion; lines keep their numbers. A header without it is pasted each time."""
    (tmp_path / "main.cu").write_text('#include "a.cuh"\n#include "b.cuh"\n#include "twice.cuh"\nmain\n')
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "common.cuh"\n#include "twice.cuh"\na\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "common.cuh"\nb\n')
    (tmp_path / "common.cuh").write_text("#pragma once\ncommon\n")
    (tmp_path / "twice.cuh").write_text("twice\n")
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    text = kernel.source("main.cu")
    assert [line for line in text.splitlines() if line and line[0] != "#"] == [
        *("common", "twice", "a", "b", "twice", "main")
    ]
    assert "#pragma" not in text
    place, places = ["", 0], {}
    for line in text.splitlines():
        if directive := re.match(r'#line (\d+) "(.*)"', line):
            place = [directive[2], int(directive[1])]
        else:
            places[line] = tuple(place)
            place[1] += 1
    assert (places["b"], places["a"], places["main"]) == (("b.cuh", 3), ("a.cuh", 4), ("main.cu", 4))


def test_a_text_is_read_again_when_a_file_of_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.cu").write_text('#include "part.cuh"\n#include "later.cuh"\nmain\n')
    (tmp_path / "part.cuh").write_text("old\n")
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    long_ago = time.time() - 60
    for file in tmp_path.iterdir():
        os.utime(file, (long_ago, long_ago))
    first = kernel.source("main.cu")
    assert kernel.source("main.cu") is first
    (tmp_path / "part.cuh").write_text("new\n")
    assert kernel.source("main.cu") == first.replace("old", "new")
    (tmp_path / "part.cuh").write_text("set\n")  # with the same size, and perhaps within the clock's resolution
    assert kernel.source("main.cu") == first.replace("old", "set")
    (tmp_path / "later.cuh").write_text("later\n")
    assert "\nlater\n" in kernel.source("main.cu")
    (tmp_path / "main.cu").unlink()
    with pytest.raises(FileNotFoundError, match=r"no kernel file 'main\.cu'"):
        kernel.source("main.cu")


def test_an_error_names_the_file_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text(
        '#include "part.cuh"\nextern "C" __global__ void k(int *a) {\n  a[0] = part() + lost;\n}\n'
    )
    (tmp_path / "part.cuh").write_text("__device__ int part() {\n  return 1;\n}\n")
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    with pytest.raises(Exception, match=r"broken\.cu[:(]3\)?: error: .*lost") as caught:
        kernel.load("broken.cu", "k")
    assert re.search("CompileE", type(caught.value).__name__)


def test_kernels_of_a_source_are_compiled_together() -> None:
    names = ("repeat<short, 3>", "repeat<float, 2>", "scale")
    found = kernel.load_all(CODE, names)
    assert tuple(found) == names
    assert ON_GPU or len({id(one.function.module) for one in found.values()}) == 1
    assert kernel.load_all(CODE, names)["scale"] is found["scale"]
    x, out = cp.asarray(np.arange(9, dtype=f32)), cp.zeros(9, f32)
    found["repeat<float, 2>"]((1,), (32,), (x, out, 9))
    np.testing.assert_array_equal(cp.asnumpy(out), 2 * np.arange(9))
    found["scale"]((1,), (32,), (x, out, 9, f32(4)))
    np.testing.assert_array_equal(cp.asnumpy(out), 4 * np.arange(9))


@pytest.mark.skipif(ON_GPU, reason="on a GPU every kernel that is loaded is compiled")
def test_a_kernel_that_is_only_looked_at_is_built_for_the_checked_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = compiler.build

    def counted(*how: Any, checked: str = "", **more: Any) -> Any:
        built.append(checked)
        return build(*how, checked=checked, **more)

    monkeypatch.setattr(compiler, "build", counted)
    code = CODE + f"// {time.time_ns()}\n"
    out = cp.zeros(20000, f32)
    with kernel.built_when_launched():
        looked_at = kernel.load(code, "dynamic")
    assert built == []
    report = xray(looked_at, (1,), (64,), (out, i32(20000)), 80000)  # more than launches may request by default
    report.assert_clean()
    assert built == ["profiled"] and int(out[0]) == 19999
    out[:] = 0
    looked_at((1,), (64,), (out, i32(20000)), shared_mem=80000)
    assert built == ["profiled", ""] and int(out[0]) == 19999


@pytest.mark.skipif(ON_GPU, reason="on a GPU every kernel that is loaded is compiled")
def test_what_is_wrong_with_a_kernel_that_is_only_looked_at() -> None:
    """The X-ray reports it, also a load outside of the block and a limit that a launch would be refused for."""
    wrong = CODE.replace("factor * in[i]", "factory * in[i]")
    with kernel.built_when_launched():
        looked_at = kernel.load(wrong, "scale")
        too_much = kernel.load(CODE, "dynamic")
    x = cp.zeros(4, f32)
    with pytest.raises(CompileError, match="factory"):
        xray(looked_at, (1,), (32,), (x, x, i32(4), f32(1)))
    with pytest.raises(CompileError, match="factory"):
        kernel.load(wrong, "scale")
    with pytest.raises(LaunchError, match="at most 232,448 bytes are left"):
        xray(too_much, (1,), (32,), (x, i32(4)), 1 << 20)


def test_a_kernel_is_compiled_once() -> None:
    assert kernel.load(CODE, "scale") is scale()
    assert kernel.load(CODE, "scale", defines={"X": 1}) is not scale()


# ---------------------------------------------------------------- structs by value


STRUCTS = r"""
#include <cuda_fp16.h>
struct Strides { long long batch, row; };  // a comment; with a semicolon
struct Params {
  Strides q, k;
  bool causal;
  const float *bias;  // at the next multiple of 8
  int n = 3, sizes[3];
  half small;
  float4 wide;
  float scale;
};
extern "C" __global__ void sum(const float *x, const Params params, float *out) {
  const Params &p = params;
  out[0] = x[0] + p.q.batch + p.q.row + p.k.batch + p.k.row + p.causal + (p.bias ? p.bias[1] : 0.0f);
  out[1] = p.n + p.sizes[0] + p.sizes[1] + p.sizes[2] + __half2float(p.small) + p.wide.w + p.scale;
}
"""
STRIDES = np.dtype([("batch", "i8"), ("row", "i8")])
FIELDS = [
    ("q", STRIDES),
    ("k", STRIDES),
    ("causal", "?"),
    ("bias", "u8"),
    ("n", "i4"),
    ("sizes", "i4", 3),
    ("small", "f2"),
    ("wide", "f4", 4),
    ("scale", "f4"),
]


def params(dtype: np.dtype, shape: tuple[int, ...] = ()) -> np.ndarray:
    value = np.zeros(shape, dtype)
    one = value.reshape(-1)[:1]
    one["q"]["batch"], one["q"]["row"], one["k"]["batch"], one["k"]["row"] = 1, 10, 100, 1000
    one["causal"], one["n"], one["sizes"], one["small"], one["scale"] = True, 5, (10, 20, 30), 0.5, 0.25
    one["wide"][0, 3] = 100
    return value


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_struct_by_value(shape: tuple[int, ...]) -> None:
    typed = kernel.load(STRUCTS, "sum")
    layout = typed.parameters[1].layout
    # wide must be at a multiple of 16, which align=True does not do for an array of floats.
    assert layout == np.dtype(
        {
            "names": [f[0] for f in FIELDS],
            "formats": [f[1] if len(f) == 2 else f[1:] for f in FIELDS],
            "offsets": [0, 16, 32, 40, 48, 52, 64, 80, 96],
            "itemsize": 112,
        }
    )
    out, bias = cp.zeros(2, f32), cp.asarray(np.array([1, 2], f32))
    value = params(layout, shape)
    value["bias"] = bias.data.ptr if hasattr(bias.data, "ptr") else bias.ctypes.data
    typed((1,), (1,), (cp.ones(1, f32), value, out))
    assert cp.asnumpy(out).tolist() == [1 + 1111 + 1 + 2, 5 + 60 + 0.5 + 100 + 0.25]


SMALL = r"""struct Inner { char tag; int n; };
struct Small { Inner a; float b[2]; double c; };
extern "C" __global__ void k(Small s, float *out) { out[0] = s.a.tag + s.a.n + s.b[0] + s.b[1] + (float)s.c; }
"""
INNER = np.dtype([("tag", "i1"), ("n", "i4")], align=True)
RIGHT = np.dtype([("a", INNER), ("b", "f4", 2), ("c", "f8")], align=True)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros((), [("a", INNER), ("b", "f4", 2), ("c", "f4")]), "field 'c' is float32; the kernel reads float64"),
        (np.zeros((), [("a", INNER), ("b", "f4", 3), ("c", "f8")]), r"'b' is float32\[3\]; .* reads float32\[2\]"),
        (np.zeros((), [("a", INNER), ("b", "f4", 2)]), "it has no field 'c'"),
        (np.zeros((), [*RIGHT.descr, ("d", "i4")]), "a field '.*', which the kernel's struct does not have"),
        (np.zeros((), [("a", [("tag", "i1"), ("n", "i4")]), ("b", "f4", 2), ("c", "f8")]), "'a.n' begins at byte 1; "),
        (np.zeros((), [("a", [("n", "i4"), ("tag", "i1")]), ("b", "f4", 2), ("c", "f8")]), "'a.tag' begins at byte 4"),
        (np.zeros((), [("a", [("n", "i4")]), ("b", "f4", 2), ("c", "f8")]), "it has no field 'a.tag'"),
        (np.zeros((), [("a", "i8"), ("b", "f4", 2), ("c", "f8")]), "field 'a' is int64; .* a struct of tag, n"),
        (np.zeros((), np.dtype({"names": list("abc"), "formats": [INNER, ("f4", 2), "f8"], "itemsize": 32})), "bytes"),
        (np.zeros(24, np.uint8), r"size 1 with its fields; got one of shape \(24,\)"),
        (np.zeros(2, RIGHT), r"got one of shape \(2,\)"),
        (np.zeros((), "V24"), "it is void192; the kernel reads a struct of a, b, c"),
        (np.zeros(1, RIGHT)[0], "NumPy array of size 1 with its fields; got void"),
        (None, "got NoneType None"),
        (3, "got int 3"),
    ],
)
def test_a_wrong_struct(value: Any, says: str) -> None:
    out = cp.zeros(1, f32)
    with pytest.raises(TypeError, match=rf"argument 0 \(Small s\) of k.*{says}"):
        kernel.load(SMALL, "k")((1,), (1,), (value, out))
    assert not cp.asnumpy(out).any()


def test_a_right_struct() -> None:
    value, out = np.zeros(1, RIGHT), cp.zeros(1, f32)
    value[0] = ((1, 20), (300, 4000), 50000)
    kernel.load(SMALL, "k")((1,), (1,), (value, out))
    assert int(out[0]) == 54321


def test_a_device_array_is_no_struct() -> None:
    with pytest.raises(TypeError, match="of a device array a kernel gets the address"):
        kernel.load(SMALL, "k")((1,), (1,), (cp.zeros(24, np.uint8), cp.zeros(1, f32)))


@pytest.mark.parametrize(
    "body",
    [
        "int a : 4;",
        "int a; int get() { return a; }",
        "int a[N];",
        "Other o;",
        "static int a; int b;",
        "int a; union { int b; };",
    ],
)
def test_a_struct_that_is_not_plain_is_not_understood(body: str) -> None:
    assert structs.dtype_of_struct(f"struct S {{ {body} }};\n", "S") is None


def test_structs_in_other_words() -> None:
    code = """
#line 7 "part.cuh"
typedef struct { unsigned char a; unsigned long long int_b; std::uint16_t c; } Named;
namespace n { struct alignas(16) Big { float *p, q; volatile int *const r; Named named[2][3]; }; }
template <typename T> struct Of { int a; };
struct Twice { int a; }; struct Twice { int b; };
struct Declared;
"""
    named = structs.dtype_of_struct(code, "struct Named")
    assert named == np.dtype([("a", "u1"), ("int_b", "u8"), ("c", "u2")], align=True)
    big = structs.dtype_of_struct(code, "n::Big")
    assert big.itemsize == 176 and big["named"].shape == (2, 3)
    assert [big.fields[name][1] for name in big.names] == [0, 8, 16, 24]
    assert [structs.dtype_of_struct(code, name) for name in ("Of", "Twice", "Declared", "Unknown")] == [None] * 4


def test_a_struct_that_is_not_understood_is_compared_by_size() -> None:
    code = SMALL.replace("double c;", "double c; __device__ double twice() const { return 2 * c; }")
    value, out = np.zeros(1, RIGHT), cp.zeros(1, f32)
    typed = kernel.load(code, "k")
    assert typed.parameters[0].layout is None
    value[0] = ((1, 20), (300, 4000), 50000)
    typed((1,), (1,), (value, out))
    assert int(out[0]) == 54321
    if not ON_GPU:  # the size is not known there
        with pytest.raises(TypeError, match="parameter 's' of k is a struct of 24 bytes; got ndarray of 8"):
            typed((1,), (1,), (np.zeros(1, "i8"), out))
