"""The X-ray's copies of a launch's arrays: views with gaps, and arrays that share memory, give the launch's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import engine
from helpers.attention import kernel
from helpers.attention.ladder import tensor_maps
from helpers.engine.xray import mirrors
from helpers.xray import Report, xray

CODE = r"""#line 1 "k.cu"
extern "C" __global__ void shift(const float *in, float *out, int n) {
  int i = threadIdx.x;
  if (i < n) out[i] = in[i];
}
extern "C" __global__ void strided(const float *in, float *out, int n, int step) {
  int i = threadIdx.x;
  if (i < n) out[step * i] = in[step * i] + 1.0f;
}
extern "C" __global__ void halves(const unsigned short *in, float *out, int n) {
  int i = threadIdx.x;
  if (i < n) out[i] = in[2 * i + 1];
}
extern "C" __global__ void reaching(const float *in, float *out, int n) {
  int i = threadIdx.x;
  if (i < n) out[i] = in[i + 16] + 1.0f;
}
struct Size { int n; float by; };
extern "C" __global__ void sized(const float *in, float *out, const Size size) {
  int i = threadIdx.x;
  if (i < size.n) out[i] = in[i] * size.by;
}
"""
Arrays = tuple[np.ndarray, ...]  # the memory, and the arguments that are views of it


def numbers(n: int) -> Any:
    return engine.asarray(np.arange(n, dtype=np.float32))


def both(name: str, arrays: Callable[[], Arrays], *rest: Any, n: int = 32) -> Report:
    """Return the report of a launch, after comparing its results with the launch's."""
    launched, seen = arrays(), arrays()
    function = engine.RawModule(code=CODE).get_function(name)
    function((1,), (n,), (*launched[1:], *rest))
    report = xray(function, (1,), (n,), (*seen[1:], *rest))
    np.testing.assert_array_equal(seen[0], launched[0])
    return report


def overlapping(begin: int, end: int) -> Arrays:
    a = numbers(32)
    return a, a[begin : begin + 8], a[end : end + 8]


def test_arrays_that_overlap() -> None:
    report = both("shift", lambda: overlapping(0, 1), np.int32(8))
    race = report.findings[0]
    assert [f.kind for f in report.findings] == ["race"] and race.line == race.other_line == 3
    assert race.message.startswith("read of in[1] by") and race.count == 7
    assert list(report.traffic) == ["in, out"]
    assert (report.traffic["in, out"].read, report.traffic["in, out"].written) == (32, 32)
    assert report.fetches["in"].tolist() == [1] * 8 and report.fetches["out"].tolist() == [1] * 7 + [0]
    # One sector of 8 words, and two if they begin at a word that is not a multiple of 8.
    assert report.traffic["in, out"].sectors == 3


@pytest.mark.parametrize("places", [(0, 8), (8, 0), (0, 12), (12, 3)])
def test_parts_of_one_array_that_do_not_overlap(places: tuple[int, int]) -> None:
    report = both("shift", lambda: overlapping(*places), np.int32(8))
    report.assert_clean()
    assert {name: (f.read, f.written) for name, f in report.traffic.items()} == {"in": (32, 0), "out": (0, 32)}


def test_the_distance_of_two_parts_is_kept() -> None:
    """A pointer to one array reaches the other, 16 elements further, in a launch and here."""
    report = both("reaching", lambda: overlapping(0, 16), np.int32(8))
    report.assert_clean()
    assert (report.traffic["out"].read, report.traffic["out"].written) == (32, 32)


def test_the_same_place_at_two_lengths() -> None:
    def arrays(lengths: Sequence[int]) -> Arrays:
        a = numbers(16)
        return a, a[: lengths[0]], a[: lengths[1]]

    for lengths in ((4, 16), (16, 4), (16, 16)):
        report = both("shift", lambda lengths=lengths: arrays(lengths), np.int32(16))
        assert [f.kind for f in report.findings] == [], lengths
        assert {name: f.size for name, f in report.fetches.items()} == dict(zip(("in", "out"), lengths, strict=True))


@pytest.mark.parametrize("order", [1, -1])
def test_a_view_with_gaps(order: int) -> None:
    def arrays() -> Arrays:
        a, out = numbers(64).reshape(8, 8), engine.full((8, 8), np.nan, dtype=np.float32)
        return out, a[::order, 3], out[::order, 5]

    report = both("strided", arrays, np.int32(8), np.int32(8 * order))
    report.assert_clean()
    assert report.fetches["in"].tolist() == [1] * 8
    assert report.traffic["out"].written == 32


def test_elements_of_a_view_that_nobody_writes() -> None:
    def arrays() -> Arrays:
        out = engine.full((8, 8), np.nan, dtype=np.float32)
        return out, numbers(64).reshape(8, 8)[:, 0], out[:, 0]

    report = both("strided", arrays, np.int32(6), np.int32(8))
    assert [str(f) for f in report.findings] == [
        "never written: 2 of 8 elements of out were never written, the first is out[6]"
    ]


def test_past_the_end_of_a_view_with_gaps() -> None:
    a, out = numbers(64).reshape(8, 8), engine.zeros((9, 8), dtype=np.float32)
    function = engine.RawModule(code=CODE).get_function("strided")
    report = xray(function, (1,), (32,), (a[:, 3], out[:, 5], np.int32(9), np.int32(8)))
    assert [(f.kind, f.array, f.index) for f in report.findings] == [("out of bounds", "in", 64)]
    assert "read of in[64], which has 57 elements" in report.findings[0].message


def test_one_memory_with_elements_of_two_sizes() -> None:
    def arrays() -> Arrays:
        a = numbers(16)
        return a, a.view(np.uint16), a

    report = both("halves", arrays, np.int32(16))
    report.assert_clean()
    assert report.fetches["in"].tolist() == [0, 1] * 16 and "out" not in report.fetches


def test_an_array_in_numpys_memory() -> None:
    def arrays() -> Arrays:
        a = numbers(9) + 1  # NumPy's results have their own memory
        return a, a[:8], a[1:]

    assert [f.kind for f in both("shift", arrays, np.int32(8)).findings] == ["race"]


def test_a_struct_by_value() -> None:
    size = np.zeros(1, np.dtype([("n", "i4"), ("by", "f4")], align=True))
    size[0] = 5, 0.5
    both("sized", lambda: overlapping(0, 8), size).assert_clean()
    a = numbers(32)
    loaded = kernel.load(CODE, "sized")
    xray(loaded, (1,), (32,), (a[:8], a[8:16], size)).assert_clean()
    assert a[8:16].tolist() == [0, 0.5, 1, 1.5, 2, 13, 14, 15]
    with pytest.raises(TypeError, match="parameter 'size' of sized is a struct of 8 bytes; got int32 of 4"):
        xray(loaded, (1,), (32,), (a[:8], a[8:16], np.int32(5)))


# ------------------------------------------------------------------------------------------------ arrays of a GPU


class OnGpu:
    """A stand-in for a CuPy array, as far as the X-ray uses it, in a NumPy array's memory."""

    def __init__(self, shape: Any, dtype: Any, memptr: Any, strides: Any = None) -> None:
        self.host = np.ndarray(shape, dtype, memptr.mem.host.data, memptr.offset, strides)
        self.shape, self.dtype, self.strides, self.itemsize = (
            shape,
            self.host.dtype,
            self.host.strides,
            np.dtype(dtype).itemsize,
        )
        self.data = SimpleNamespace(mem=memptr.mem, ptr=memptr.mem.ptr + memptr.offset)

    def __setitem__(self, at: Any, value: np.ndarray) -> None:
        self.host[at] = value


def test_arrays_of_a_gpu_keep_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def pointer(mem: Any, offset: int) -> Any:
        return SimpleNamespace(mem=mem, offset=offset)

    fake = SimpleNamespace(
        ndarray=OnGpu,
        uint8=np.uint8,
        cuda=SimpleNamespace(MemoryPointer=pointer),
        asnumpy=lambda a: a.host.copy(),
        asarray=lambda a: a,
    )
    monkeypatch.setattr(mirrors, "cupy", lambda: fake)
    function, strided = (SimpleNamespace(name=name, code=CODE, options=()) for name in ("shift", "strided"))
    for places, kinds in (((3, 4), ["race"]), ((3, 20), []), ((20, 3), [])):
        memory = SimpleNamespace(host=np.arange(64, dtype=np.float32), ptr=1 << 20)
        a, b = (OnGpu((8,), np.float32, pointer(memory, 4 * place)) for place in places)
        report = xray(function, (1,), (32,), (a, b, np.int32(8)))
        assert [f.kind for f in report.findings] == kinds
        expected = np.arange(64, dtype=np.float32)
        for i in range(8):
            expected[places[1] + i] = expected[places[0] + i]
        np.testing.assert_array_equal(memory.host, expected)
        assert report.traffic[list(report.traffic)[-1]].sectors == (
            4 if kinds else 2
        )  # each from a word in the middle of a sector
    memory = SimpleNamespace(host=np.arange(64, dtype=np.float32), ptr=1 << 20)
    a, b = (OnGpu((8,), np.float32, pointer(memory, 4 * place), (-32,)) for place in (7 * 8 + 1, 7 * 8 + 2))
    xray(strided, (1,), (32,), (a, b, np.int32(8), np.int32(-8)))
    np.testing.assert_array_equal(memory.host[2::8], np.arange(64)[1::8] + 1)


@pytest.mark.parametrize("columns", [64, 128])
def test_a_tensor_map_of_a_gpu_keeps_its_swizzle(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(host=np.arange(64 * columns, dtype=np.uint8), ptr=1 << 20)
    fake = SimpleNamespace(
        ndarray=OnGpu,
        uint8=np.uint8,
        cuda=SimpleNamespace(
            MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem, offset=offset),
            UnownedMemory=lambda *_: memory,
        ),
        asnumpy=lambda a: a.host.copy(),
    )
    monkeypatch.setattr(mirrors, "cupy", lambda: fake)
    made = tensor_maps.Made("uint8", memory.ptr, (columns, 64, 1, 1), (columns,) * 3, (columns, 8, 1, 1), columns)
    monkeypatch.setattr(mirrors.hooks, "tensor_of", lambda argument: made if argument == "map" else None)
    (copied,) = mirrors.Mirrors(["map"]).args
    described = engine.tensor_map.described(copied)
    assert described is not None and (described.swizzle, described.box) == (columns, made.box)


def test_a_kernel_is_looked_at_as_it_was_compiled() -> None:
    code = """#include <stdlib.h>
extern "C" __global__ void fill(int *out) {
  int own[4];
  for (int i = 0; i < 4; ++i) own[i] = i;
  out[threadIdx.x] = own[threadIdx.x % 4];
}
"""
    out = engine.zeros(32, np.int32)
    kernel = engine.RawModule(code=code, backend="nvcc").get_function("fill")  # NVRTC has no host headers
    assert xray(kernel, (1,), (32,), (out,)).clean
    np.testing.assert_array_equal(out, np.arange(32) % 4)


def test_each_build_for_a_look_starts_with_variables_of_its_own() -> None:
    code = """__device__ int launches;
extern "C" __global__ void count(int *out) { out[0] = ++launches; }
"""
    for _ in range(2):
        out = engine.zeros(1, np.int32)
        engine.RawModule(code=code).get_function("count").filled("zero")((1,), (1,), (out,))
        assert out[0] == 1


def test_a_look_that_leaves_everything_as_it_was() -> None:
    """Before a launch on the same arrays: only the launch may change them and the module's variables."""
    code = """__device__ float factor = 2;
extern "C" __global__ void grow(float *x, const float *y) {
  x[threadIdx.x] = x[threadIdx.x] * factor + y[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) factor += 1;
}
"""
    module = engine.RawModule(code=code)
    kernel, factor = module.get_function("grow"), engine.ndarray((), np.float32, module.get_global("factor"))
    owner = numbers(8)
    x, y, made = owner[:4], owner[4:], numbers(4) * 1
    for args in ((x, y), (x.data, y.data.ptr), (made, y)):
        before = owner.copy(), made.copy(), float(factor)
        assert xray(kernel, (1,), (4,), args, write_back=False).clean
        assert (owner == before[0]).all() and (made == before[1]).all() and float(factor) == before[2]
    kernel((1,), (4,), (x, y))
    np.testing.assert_array_equal(owner, [4, 7, 10, 13, 4, 5, 6, 7])
    assert float(factor) == 3
    assert xray(kernel, (1,), (4,), (x, y)).clean and x[0] == 16 and float(factor) == 4


def test_what_a_look_writes_past_an_end_is_gone_in_the_next() -> None:
    """Copies use recycled storage. It counts as used bytes only while an X-ray has it."""
    code = """extern "C" __global__ void peek(int *a, int *out, int writes) {
  if (writes) a[4] = 7;
  out[0] = a[4];
}
"""
    kernel, a = engine.RawModule(code=code).get_function("peek"), engine.zeros(4, np.int32)
    pool = engine.get_default_memory_pool()
    used = pool.used_bytes()
    for writes, value in ((1, 7), (0, -1)):
        number = engine.zeros(1, np.int32)
        assert xray(kernel, (1,), (1,), (a, number, np.int32(writes))).findings
        assert number[0] == value
        del number
        assert pool.used_bytes() == used
    assert (a == 0).all()
