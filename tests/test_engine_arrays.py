"""The engine's arrays compared with CuPy's: byte order, memory order, dtypes, null pointers, readable arguments."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine
from helpers.attention import flash_attention
from helpers.device import ON_GPU
from helpers.engine import tensor_map
from helpers.xray import xray

at = sys.modules["helpers.engine.array"].at  # `engine.array` is CuPy's function

COPY = 'extern "C" __global__ void copy(const float* a, float* o) { o[threadIdx.x] = a[threadIdx.x]; }'

# ------------------------------------------------------------------------------------------------- byte order

BIG = [">f4", ">f2", ">f8", ">i2", ">i4", ">u8", ">c8"]


@on_each_device
@pytest.mark.parametrize("dtype", BIG)
def test_numbers_of_other_machines_are_converted(cp: Any, dtype: str) -> None:
    host = np.arange(1, 7, dtype=dtype).reshape(2, 3)
    for made in (cp.asarray(host), cp.array(host), cp.array(host.T), cp.ascontiguousarray(cp.asarray(host))):
        assert made.dtype.isnative and made.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(cp.asnumpy(cp.asarray(host)), host)
    assert cp.array([1, 2, 3], dtype=dtype).dtype.isnative


@on_each_device
def test_kernels_read_numbers_of_other_machines(cp: Any) -> None:
    host, out = np.arange(1, 5, dtype=">f4"), cp.zeros(4, cp.float32)
    compiled(cp, COPY).get_function("copy")((1,), (4,), (cp.asarray(host), out))
    np.testing.assert_array_equal(cp.asnumpy(out), [1, 2, 3, 4])
    total = cp.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
    assert float(total(cp.asarray(host))) == 10
    twice = cp.ElementwiseKernel("T x", "T y", "y = x + x", "twice")
    np.testing.assert_array_equal(cp.asnumpy(twice(cp.asarray(host))), [2, 4, 6, 8])


@on_each_device
@pytest.mark.parametrize("dtype", [">f4", "O", "U3", "S2", "M8[s]", "m8[s]", np.dtype([("a", "O")])], ids=str)
def test_what_no_device_has(cp: Any, dtype: Any) -> None:
    made: dict[str, Callable[[], Any]] = {
        "empty": lambda: cp.empty(3, dtype),
        "zeros": lambda: cp.zeros(3, dtype),
        "like": lambda: cp.empty_like(cp.zeros(3), dtype),
        "astype": lambda: cp.zeros(3).astype(dtype),
        "asarray": lambda: cp.asarray(cp.zeros(3), dtype),
    }
    if cp is engine:  # CuPy accepts any dtype for existing memory
        made["ndarray"] = lambda: cp.ndarray((3,), dtype, cp.cuda.alloc(96))
    for name, make in made.items():
        with pytest.raises(ValueError, match="Unsupported dtype"):
            pytest.fail(f"{name} made {make()!r}")


def test_other_byte_orders_by_a_view_reach_no_kernel() -> None:
    """CuPy accepts any dtype in a view, and a kernel would then read other numbers."""
    given, out = engine.ones(4, np.float32), engine.zeros(4, np.float32)
    copy_ = compiled(engine, COPY).get_function("copy")
    with pytest.raises(TypeError, match=r"argument 0 .*\(>f4\) are in the order of other machines"):
        copy_((1,), (4,), (given.view(">f4"), out))
    with pytest.raises(TypeError, match=r"x: its byte order \(>f4\) is not this machine's"):
        engine.ElementwiseKernel("T x", "T y", "y = x", "same")(given.view(">f4"))
    with pytest.raises(TypeError, match=r"x: its byte order \(>f4\) is not this machine's"):
        engine.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")(given.view(">f4"))


BY_VALUE = """
struct Pair { int a; float b; };
extern "C" __global__ void by_value(float x, Pair p, float4 v, float* out) { out[0] = x + p.a + p.b + v.w; }
"""


def test_values_in_other_byte_orders_are_refused() -> None:
    """CuPy passes their bytes unchanged."""
    kernel, out = engine.RawKernel(BY_VALUE, "by_value"), engine.zeros(1, np.float32)
    good = np.array(1, "f4"), np.array((2, 3), "i4,f4"), np.array([0, 0, 0, 4], "f4")
    kernel((1,), (1,), (*good, out))
    assert out[0] == 10
    for number, wrong in enumerate((np.array(1, ">f4"), np.array((2, 3), "i4,>f4"), np.array([0, 0, 0, 4], ">f4"))):
        args = [*good, out]
        args[number] = wrong
        with pytest.raises(TypeError, match=f"argument {number} .* are in the order of other machines"):
            kernel((1,), (1,), tuple(args))


# ------------------------------------------------------------------------------------------------- what a kernel reads

READS = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void reads(const int4* i4, const float* f, const __nv_bfloat16* b, const half* h,
                                 const unsigned char* u8, const int* i, const half2* h2, const float4* f4,
                                 const unsigned short* u16, const bool* t, int* out) {
  out[0] = i4[0].x;
  out[1] = (int)__bfloat162float(b[0]);
}
"""
RIGHT = ("int32", "float32", "bfloat16", "float16", "uint8", "int32", "float16", "float32", "uint16", "bool", "int32")


def bits_of(dtype: str) -> Any:
    return engine.zeros(64, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize(
    "number, dtypes",
    [
        (0, "float16 bfloat16 uint16 float32 float64 uint8 complex64 complex128 uint64"),
        (1, "uint8"),
        (2, "uint16 int16 uint8"),
        (3, "uint16 int16 uint8"),
        (4, "bool int8"),
        (5, "uint32 uint8"),
        (6, "uint32 float32 bfloat16 int32"),
        (7, "float16 complex64 complex128 uint32 int64"),
        (8, "float16 bfloat16 int16"),
        (9, "uint8 int8"),
    ],
)
def test_bits_that_are_meant(number: int, dtypes: str) -> None:
    for dtype in dtypes.split():
        args = [bits_of(d) for d in RIGHT]
        args[number] = bits_of(dtype)
        compiled(engine, READS).get_function("reads")((1,), (1,), tuple(args))


def test_bits_are_read_as_they_are() -> None:
    args = [bits_of(d) for d in RIGHT]
    args[0] = engine.asarray(np.arange(8, dtype=np.float16))
    args[2] = engine.asarray(np.full(4, 7, ml_dtypes.bfloat16)).view(np.uint16)
    compiled(engine, READS).get_function("reads")((1,), (1,), tuple(args))
    np.testing.assert_array_equal(engine.asnumpy(args[10])[:2], [0x3C000000, 7])


@pytest.mark.parametrize(
    "number, dtype, says",
    [
        (0, "int64", r"\(const int4\* i4\) .* int64, the kernel reads int32 \(its type is int4\); .*view\(cp.int32\)"),
        (1, "float64", r"give it array\.astype\(cp\.float32\)$"),
        (1, "float16", r"give it array\.astype\(cp\.float32\)$"),
        (
            1,
            "int32",
            r"astype\(cp\.float32\), where its values are meant, or array\.view\(cp\.float32\), where its bits",
        ),
        (2, "float16", r"array\.astype\(ml_dtypes\.bfloat16\), where its values are meant, or array\.view\("),
        (2, "float32", r"give it array\.astype\(ml_dtypes\.bfloat16\)$"),
        (3, "bfloat16", r"the kernel reads float16; "),
        (5, "int64", r"give it array\.astype\(cp\.int32\)$"),
        (5, "float32", r"view\(cp\.int32\), where its bits are"),
        (7, "float64", r"the kernel reads float32 \(its type is float4\)"),
    ],
)
def test_numbers_that_are_taken_for_others(number: int, dtype: str, says: str) -> None:
    args = [bits_of(d) for d in RIGHT]
    args[number] = bits_of(dtype)
    with pytest.raises(TypeError, match=says):
        compiled(engine, READS).get_function("reads")((1,), (1,), tuple(args))


# ------------------------------------------------------------------------------------------------- addresses

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "*": lambda x: x * 1,
    "copy": lambda x: x.copy(),
    "copy in F": lambda x: x.copy(order="F"),
    "np.array": lambda x: np.array(x, subok=True),
    "transposed": lambda x: (x.swapaxes(0, 1) * 1).swapaxes(0, 1),
    "astype": lambda x: x.astype(np.float32).astype(np.uint16),
    "astype of turned": lambda x: x.T.astype(np.float32).astype(np.uint16).T,
    "a function": lambda x: engine.concatenate([x[:9], x[9:]]),
    "an index": lambda x: x[np.arange(64)],
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "deep copy": copy.deepcopy,
    "+=": lambda x: x.__iadd__(0),
}
FIRST = 'extern "C" __global__ void first(const unsigned short* const* table, int* out) { out[0] = table[0][65]; }'


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_operations_make_has_addresses(name: str) -> None:
    made = OPERATIONS[name](engine.array(np.arange(4096, dtype=np.uint16).reshape(64, 64)))
    for address in (made.ctypes.data, made.data.ptr):
        there = at(address)
        assert there is not None and there.nbytes == made.nbytes and there.ctypes.data == address
    its_map = tensor_map.encode_tiled("uint16", made.ctypes.data, (64, 64), (128,), (64, 64), swizzle=128)
    assert tensor_map.described(its_map).shape == (64, 64)
    if made.flags.c_contiguous:
        out = engine.zeros(1, np.int32)
        table = engine.asarray(np.array([made.ctypes.data], np.uint64))
        compiled(engine, FIRST).get_function("first")((1,), (1,), (table, out))
        assert out[0] == 65


def test_an_address_lives_as_long_as_its_array() -> None:
    made = engine.ones(5) * 2
    address = made.ctypes.data
    assert at(address) is not None
    del made
    assert at(address) is None


@on_each_device
def test_an_array_without_elements_is_a_null_pointer(cp: Any) -> None:
    code = 'extern "C" __global__ void is_null(const float* a, int* o) { o[0] = a == nullptr; }'
    kernel, some = cp.RawKernel(code, "is_null"), cp.zeros(3, cp.float32)
    for given, expected in ((cp.zeros(0, cp.float32), 1), (cp.zeros((3, 0, 2), cp.float32), 1), (some[:0], 0)):
        out = cp.zeros(1, cp.int32)
        assert (given.data.ptr == 0) == expected
        kernel((1,), (1,), (given, out))
        assert int(out[0]) == expected
    assert cp.cuda.alloc(0).ptr == 0


def test_who_reads_an_array_without_elements() -> None:
    empty, out = engine.zeros(0, np.float32), engine.zeros(4, np.float32)
    with pytest.raises(engine.LaunchError, match=r"a null pointer; a has no elements at kernel.cu:1"):
        compiled(engine, COPY).get_function("copy")((1,), (1,), (empty, out))
    assert not xray(compiled(engine, COPY).get_function("copy"), (1,), (1,), (empty, out)).clean


# ------------------------------------------------------------------------------------------------- CuPy's methods


@on_each_device
def test_set_and_get(cp: Any) -> None:
    there = cp.zeros((2, 3), cp.float32)
    there.set(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(there.get(), np.arange(6).reshape(2, 3))
    out = np.zeros((2, 3), np.float32)
    assert there.get(out=out) is out and out[1, 2] == 5 and cp.asnumpy(there, out=out) is out
    assert there.T.get().flags.c_contiguous and there.get(order="F").flags.f_contiguous
    for wrong, error in (
        ([1, 2], TypeError),
        (np.zeros((2, 3)), TypeError),
        (np.zeros((3, 2), np.float32), ValueError),
        (there, TypeError),
    ):
        with pytest.raises(error):
            there.set(wrong)


def test_memory_of_the_host_does_not_pose_as_a_gpus() -> None:
    assert not hasattr(engine.zeros(3), "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="describes GPU memory"):
        engine.zeros(3).__cuda_array_interface__  # noqa: B018


def test_dlpack() -> None:
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = engine.from_dlpack(host)
    assert type(made) is engine.ndarray and (made == host).all() and not np.shares_memory(made, host)
    same = engine.from_dlpack(made)
    assert type(same) is engine.ndarray and np.shares_memory(same, made)
    assert np.shares_memory(np.from_dlpack(made), made)
    with pytest.raises(TypeError, match="takes an array with __dlpack__; got list"):
        engine.from_dlpack([1, 2])


# ------------------------------------------------------------------------------------------------- memory order


@on_each_device
def test_orders(cp: Any) -> None:
    """Arrays have the orders that CuPy documents: a kernel gets only the pointer."""
    box = cp.asarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    turned, host = box.transpose(1, 0, 2), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for made in (cp.array(turned), cp.empty_like(turned), cp.ones_like(turned, np.int32), turned.astype(np.int32)):
        assert made.strides == turned.strides == (16, 48, 4)
    assert cp.empty_like(turned, shape=(5, 2)).flags.c_contiguous
    for made in (
        turned * 2,
        turned.T + turned.T,
        cp.where(turned.T > 3, turned.T, 0),
        cp.sqrt(turned.T),
        cp.maximum(turned, 3),
        turned.copy(),
        cp.asarray(turned, order="C"),
        cp.asarray(turned, order="A"),
        cp.asarray(box[:, :, ::2], order="C"),
        cp.array(host.transpose(1, 0, 2)),
        cp.ascontiguousarray(turned),
    ):
        assert made.flags.c_contiguous
    assert cp.copy(turned).strides == turned.strides and cp.asfortranarray(turned).flags.f_contiguous
    assert cp.asarray(turned) is turned and cp.asarray(box[0, 0], order="F").data.ptr == box.data.ptr
    assert cp.ascontiguousarray(cp.asarray(3.0)).shape == (1,)
    np.testing.assert_array_equal(cp.asnumpy(turned * 2), 2 * host.transpose(1, 0, 2))


@on_each_device
def test_copies_that_are_asked_for_or_refused(cp: Any) -> None:
    there = cp.zeros((2, 3), cp.float32)
    assert cp.array(there, copy=False) is there and cp.array(there, copy=None) is there and cp.asarray(there) is there
    assert cp.array(there) is not there and cp.asarray(there, copy=True) is not there
    assert cp.asarray(there, cp.float64).dtype == cp.float64
    for refused in (lambda: cp.array(there, cp.float64, copy=False), lambda: cp.asarray(there, order="F", copy=False)):
        with pytest.raises(ValueError, match="Unable to avoid copy"):
            refused()
    with pytest.raises(ValueError, match="order not understood"):
        cp.array(there, order="Q")
    with pytest.raises(NotImplementedError):
        cp.array(there, subok=True)


@on_each_device
def test_out_is_what_comes_back(cp: Any) -> None:
    a, out = cp.ones(3, cp.float32), cp.zeros(3, cp.float32)
    assert cp.add(a, a, out=out) is out
    same = out
    same *= 2
    assert same is out and cp.asnumpy(out).tolist() == [4, 4, 4]


# ------------------------------------------------------------------------------------------------- attention


@pytest.mark.skipif(ON_GPU, reason="the engine's arrays")
@pytest.mark.parametrize("stage", ["flash_mma", "hopper"])
def test_attention_of_what_operations_make(stage: str) -> None:
    """Also through tensor maps; and for NumPy arrays in the other byte order."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 70, 2, 64)).astype(np.float16) for _ in range(3))
    expected = engine.asnumpy(flash_attention(*map(engine.asarray, (q, k, v)), stage=stage))
    made = engine.asarray(q).copy(), engine.asarray(k) * 1, np.array(engine.asarray(v), subok=True)
    np.testing.assert_array_equal(engine.asnumpy(flash_attention(*made, stage=stage)), expected)
    swapped = (a.astype(">f2") for a in (q, k, v))
    np.testing.assert_array_equal(np.asarray(flash_attention(*swapped, stage=stage)), expected)
