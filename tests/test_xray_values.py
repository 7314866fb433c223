"""Values that count as written for the X-ray, although they look like unwritten memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planted_files import empty, out, planted, zeros

from helpers import engine
from helpers.xray import xray

COPY = """#line 1 "k.cu"
extern "C" __global__ void copy(const int *in, int *out) { out[threadIdx.x] = in[threadIdx.x]; }
extern "C" __global__ void minus_one(int *out) { out[threadIdx.x] = -1; }
"""


def filled() -> Any:
    a = empty(64, np.int32)
    a.fill(-1)
    return a


def assigned() -> Any:
    a = empty(64, np.int32)
    a[...] = -1
    return a


def by_numpy() -> Any:
    a = empty(64, np.int32)
    np.copyto(a, np.arange(-1, 63))
    return a


def by_a_launch() -> Any:
    a = empty(64, np.int32)
    engine.RawModule(code=COPY).get_function("minus_one")((1,), (64,), (a,))
    return a


def by_a_checked_launch() -> Any:
    a = empty(64, np.int32)
    xray(engine.RawModule(code=COPY).get_function("minus_one"), (1,), (64,), (a,)).assert_clean()
    return a


@pytest.mark.parametrize("make", [filled, assigned, by_numpy, by_a_launch, by_a_checked_launch])
def test_minus_one_is_a_number(make: Any) -> None:
    """`empty` fills integers with -1, so an array that was filled with -1 must be distinguished from it."""
    a, got = make(), empty(64, np.int32)
    xray(engine.RawModule(code=COPY).get_function("copy"), (1,), (64,), (a, got)).assert_clean()
    assert np.array_equal(engine.asnumpy(got), engine.asnumpy(a))


def test_nan_of_the_host_is_a_number_in_an_input() -> None:
    code = 'extern "C" __global__ void k(const float *in, float *out) { out[threadIdx.x] = in[threadIdx.x] != 0; }'
    xray(engine.RawModule(code=code).get_function("k"), (1,), (64,), (out(64), out(64))).assert_clean()


DOUBLE = """extern "C" __global__ void k(TYPE *a, int n) {
  if (threadIdx.x < n) a[threadIdx.x] = a[threadIdx.x] * (TYPE)2;
}"""


@pytest.mark.parametrize(("dtype", "name"), [("f4", "float"), ("f8", "double"), ("f2", "half")])
def test_nan_among_numbers_is_a_number_in_an_output(dtype: str, name: str) -> None:
    """Written by the host or an earlier launch. `empty` and arrays full of NaN have no values, nor have their parts."""
    head = "#include <cuda_fp16.h>\n" * (name == "half")
    kernel = engine.RawKernel(head + DOUBLE.replace("TYPE", name), "k")
    numbers = np.arange(64).astype(dtype)
    numbers[[3, 40]] = np.nan, np.inf
    a = engine.asarray(numbers)
    with np.errstate(invalid="ignore"):
        a -= a  # 0, and another kind of NaN
    for given in (engine.asarray(numbers), engine.asarray(np.full(64, np.nan, dtype)), a):
        xray(kernel, (1,), (64,), (given, np.int32(64))).assert_clean()
        kernel((1,), (64,), (given, np.int32(64)))
        xray(kernel, (1,), (64,), (given, np.int32(50))).assert_clean()
    one = engine.asarray(numbers)
    one[5] = one[one > 60] = np.nan
    xray(kernel, (1,), (64,), (one, np.int32(64))).assert_clean()
    filled = empty(64, dtype)
    filled.fill(np.nan)
    for given in (empty(64, dtype), engine.full(64, np.nan, dtype), filled):
        report = xray(kernel, (1,), (64,), (given, np.int32(1)))
        assert [(f.kind, f.index) for f in report.findings] == [("uninitialised", 0), ("never written", 1)]
        assert np.isnan(given).all()


def test_traffic_of_variables() -> None:
    """Variables in global memory are arrays in the table; constants have their own cache, and are not."""
    assert planted("a_counter_of_the_module").look(fixed=True).traffic["count"].atomics == 60
    assert [*planted("past_the_constants").look(fixed=True).traffic] == ["in", "out"]
    assert "dynamic shared memory" not in planted("no_shared_mem").look().shared


def test_structs_of_minus_one_are_numbers() -> None:
    """Bytes of 0xFF in a struct are unwritten only if the array has never been written."""
    pairs = np.dtype([("a", "i4"), ("b", "i4")])
    code = """struct Pair { int a, b; };
    extern "C" __global__ void k(const Pair *in, int *out) { out[threadIdx.x] = in[threadIdx.x].b; }"""
    function = engine.RawModule(code=code).get_function("k")
    given = engine.asarray(np.full(64, -1, np.int64)).view(pairs)
    xray(function, (1,), (64,), (given, zeros(64))).assert_clean()
    report = xray(function, (1,), (64,), (engine.empty(64, pairs), zeros(64)))
    assert [f.kind for f in report.findings] == ["uninitialised"]
