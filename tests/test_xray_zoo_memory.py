"""More of the zoo: variables of the module, memory that nobody gave or wrote, what is written though const."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import zoo
from zoo import SYNC, Bug, out, some, zeros

from helpers import engine
from helpers.engine import nvrtc
from helpers.xray import Report, xray


def empty(n: int, dtype: Any = np.float32) -> Any:
    return engine.empty(n, dtype)


VARIABLES = [
    Bug(
        "a_counter_of_the_module",
        "race",
        """__device__ int SELF_count;
NAME(const float *in, int *out) {
  if (in[threadIdx.x] > 3) SELF_count += 1;  // here // there
  __syncthreads();
  if (threadIdx.x == 0) out[0] = SELF_count;
}
""",
        (("SELF_count += 1;", "atomicAdd(&SELF_count, 1);"),),
        lambda: (some(64), zeros(1)),
        array="a_counter_of_the_module_count",
        at_thread=5,
    ),
    Bug(
        "a_row_of_the_module",
        "race",
        """static __device__ float SELF_row[64];
NAME(const float *in, float *out) {
  SELF_row[threadIdx.x] = in[threadIdx.x];  // here
  /* no barrier */
  out[threadIdx.x] = SELF_row[63 - threadIdx.x];  // there
}
""",
        (SYNC,),
        lambda: (some(64), out(64)),
        array="a_row_of_the_module_row",
    ),
    Bug(
        "a_static_of_a_function",
        "race",
        """__device__ int SELF_next() {
  static int calls;
  return ++calls;  // here // there
}
NAME(int *out) {
  out[threadIdx.x] = SELF_next();
}
""",
        (("++calls", "atomicAdd(&calls, 1)"),),
        lambda: (zeros(64),),
        array="calls",
    ),
    Bug(
        "between_blocks_by_a_variable",
        "race",
        """__device__ float SELF_sums[2];
NAME(const float *in, float *out) {
  if (threadIdx.x == 0) SELF_sums[blockIdx.x] = in[blockIdx.x];  // there
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = SELF_sums[0];  // here
}
""",
        (("SELF_sums[0]", "SELF_sums[blockIdx.x]"),),
        lambda: (some(64), out(2)),
        grid=2,
        array="between_blocks_by_a_variable_sums",
        at_block=1,
    ),
    Bug(
        "past_a_variable",
        "out of bounds",
        """__device__ int SELF_table[48];
__device__ int SELF_beside[48];
NAME(const int *in, int *out, int n) {
  int t = threadIdx.x;
  if (t < n) SELF_table[t] = in[t];  // here
  if (t < 48) SELF_beside[t] = 0;
  __syncthreads();
  out[t] = SELF_table[t % 48] + SELF_beside[t % 48];
}
""",
        (("t < n", "t < n - 1"),),
        lambda: (some(64, np.int32), zeros(64), np.int32(49)),
        array="past_a_variable_table",
        index=48,
        at_thread=48,
    ),
    Bug(
        "past_the_constants",
        "out of bounds",
        """__constant__ float SELF_weights[4] = {1, 2, 3, 4};
NAME(const float *in, float *out, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += SELF_weights[i] * in[threadIdx.x + i];  // here
  out[threadIdx.x] = sum;
}
""",
        (("i < n", "i < n - 1"),),
        lambda: (some(72), out(64), np.int32(5)),
        array="past_the_constants_weights",
        index=4,
    ),
    Bug(
        "before_the_constants",
        "out of bounds",
        """__constant__ int SELF_steps[64];
NAME(const int *in, int *out) {
  int t = threadIdx.x;
  out[t] = in[t] + SELF_steps[t - 1];  // here
}
""",
        (("[t - 1]", "[t]"),),
        lambda: (some(64, np.int32), zeros(64)),
        array="before_the_constants_steps",
        index=-1,
        at_thread=0,
    ),
]

FORGOTTEN = [
    Bug(
        "no_shared_mem",
        "out of bounds",
        """NAME(const float *in, float *out) {
  extern __shared__ float s[];
  s[threadIdx.x] = in[threadIdx.x];  // here
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
""",
        (("extern __shared__ float s[];", "__shared__ float s[64];"),),
        lambda: (some(64), out(64)),
        array="dynamic shared memory",
        index=0,
        at_thread=0,
    ),
    Bug(
        "no_shared_mem_far_inside",
        "out of bounds",
        """NAME(const float *in, float *out, int at) {
  extern __shared__ float s[];
  s[at + threadIdx.x] = in[threadIdx.x];  // here
  out[threadIdx.x] = s[at + threadIdx.x];
}
""",
        (("extern __shared__ float s[];", "float *s = out - at;"),),
        lambda: (some(64), zeros(64, np.float32), np.int32(20_000)),
        array="dynamic shared memory",
        index=20_000,
        at_thread=0,
    ),
]

UNWRITTEN = [
    Bug(
        "an_input_of_nobody",
        "uninitialised",
        """NAME(const float *in, const float *bias, float *out) {
  out[threadIdx.x] = in[threadIdx.x] + bias[threadIdx.x];  // here
}
""",
        ((" + bias[threadIdx.x]", ""),),
        lambda: (some(64), empty(64), out(64)),
        array="bias",
        index=0,
        at_thread=0,
    ),
    Bug(
        "indices_of_nobody",
        "uninitialised",
        """NAME(const float *in, const int *indices, float *out) {
  out[threadIdx.x] = in[indices[threadIdx.x] & 63];  // here
}
""",
        (("indices[threadIdx.x]", "threadIdx.x"),),
        lambda: (some(64), empty(64, np.int32), out(64)),
        array="indices",
        index=0,
        at_thread=0,
    ),
    Bug(
        "counts_from_nothing",
        "uninitialised",
        """NAME(const int *in, int *bins) {
  /* nothing */
  atomicAdd(&bins[in[threadIdx.x]], 1);  // here
}
""",
        (("/* nothing */", "bins[threadIdx.x] = 0;\n  __syncthreads();"),),
        lambda: (some(64, np.int32), empty(64, np.int32)),
        array="bins",
        index=0,
        at_thread=0,
    ),
    Bug(
        "half_of_an_input",
        "uninitialised",
        """NAME(const float *in, float *out) {
  int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i];  // here
}
""",
        (("in[i]", "in[i % 100]"),),
        lambda: (first_hundred(), out(128)),
        grid=2,
        array="in",
        index=100,
        at_block=1,
        at_thread=36,
    ),
    Bug(
        "bins_of_the_block_uncleared",
        "uninitialised",
        """NAME(const int *in, int *out) {
  __shared__ int bins[64];
  __shared__ int most;
  if (threadIdx.x == 0) atomicExch(&most, 0);
  /* nothing */
  __syncthreads();
  atomicMax(&most, atomicAdd(&bins[in[threadIdx.x]], 1));  // here
  __syncthreads();
  out[threadIdx.x] = most;
}
""",
        (("/* nothing */", "bins[threadIdx.x] = 0;"),),
        lambda: (some(64, np.int32), zeros(64)),
        array="bins",
        index=0,
    ),
    Bug(
        "integers_left_out",
        "never written",
        """NAME(const int *in, int *out) {
  if (in[threadIdx.x] != 7) out[threadIdx.x] = -1;
}
""",
        (("if (in[threadIdx.x] != 7) ", ""),),
        lambda: (some(64, np.int32), empty(64, np.int32)),
        array="out",
        index=7,
    ),
]

CONST = [
    Bug(
        "const_cast_of_an_input",
        "write to const",
        """NAME(const float *in, float *out) {
  out[threadIdx.x] = in[threadIdx.x];
  const_cast<float *>(in)[threadIdx.x] = 0;  // here
}
""",
        (("  const_cast<float *>(in)[threadIdx.x] = 0;  // here\n", ""),),
        lambda: (some(64), out(64)),
        array="in",
        index=0,
        at_thread=0,
    ),
    Bug(
        "atomic_on_const",
        "write to const",
        """NAME(const int *in, int *out) {
  atomicAdd((int *)&in[0], 1);  // here
  out[threadIdx.x] = 1;
}
""",
        (("(int *)&in[0]", "&out[threadIdx.x]"), ("  out[threadIdx.x] = 1;\n", "")),
        lambda: (some(64, np.int32), zeros(64)),
        array="in",
        index=0,
    ),
    Bug(
        "write_to_a_constant",
        "write to const",
        """__constant__ float SELF_scale[64];
NAME(float *out) {
  float *scale = const_cast<float *>(SELF_scale);
  scale[threadIdx.x] = 2;  // here
  out[threadIdx.x] = scale[threadIdx.x];
}
""",
        (("  scale[threadIdx.x] = 2;  // here\n", ""),),
        lambda: (out(64),),
        array="write_to_a_constant_scale",
        index=0,
    ),
]


def first_hundred() -> Any:
    a = empty(128)
    a[:100] = 1
    return a


MODULES = {"variables": VARIABLES, "forgotten": FORGOTTEN, "unwritten": UNWRITTEN, "const": CONST}
ZOO = [pytest.param(group, bug, id=bug.name) for group, bugs in MODULES.items() for bug in bugs]


@functools.cache
def module(group: str) -> engine.RawModule:
    return zoo.module(MODULES[group])


def look(group: str, bug: Bug, *, fixed: bool) -> Report:
    return zoo.look(module(group), bug, fixed=fixed)


@pytest.mark.parametrize("group", MODULES)
def test_nvrtc_takes_the_kernels(group: str) -> None:
    assert nvrtc.refusal(module(group).code, ("-std=c++17",)) == ""


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_each_bug_is_found_where_it_is(group: str, bug: Bug) -> None:
    zoo.assert_found(look(group, bug, fixed=False), bug)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_the_fixed_twin_is_clean(group: str, bug: Bug) -> None:
    assert look(group, bug, fixed=True).findings == []


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
    """What `empty` leaves reads as -1 in an integer, so an array that somebody filled with -1 must be told from it."""
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
    """Written by the host or by an earlier launch. `empty` and an array full of NaN have no values, nor their rests."""
    head = "#include <cuda_fp16.h>\n" * (name == "half")
    kernel = engine.RawKernel(head + DOUBLE.replace("TYPE", name), "k")
    numbers = np.arange(64).astype(dtype)
    numbers[[3, 40]] = np.nan, np.inf
    a = engine.asarray(numbers)
    with np.errstate(invalid="ignore"):
        a -= a  # 0, and NaN of another kind
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
    """Variables in global memory are arrays of the table; constants have a cache of their own, and are not."""
    report = look("variables", VARIABLES[0], fixed=True)
    assert report.traffic["a_counter_of_the_module_fixed_count"].atomics == 60
    assert [*look("variables", VARIABLES[5], fixed=True).traffic] == ["in", "out"]
    assert look("forgotten", FORGOTTEN[0], fixed=False).shared == {}


def test_what_the_messages_say() -> None:
    def message(group: str, number: int) -> str:
        return look(group, MODULES[group][number], fixed=False).findings[0].message

    where = "by block (0,0,0) thread (0,0,0) at"
    forgotten = "write of word 0 of dynamic shared memory, which has 0 bytes, as the launch gave no shared_mem, "
    assert message("forgotten", 0) == f"{forgotten}{where} no_shared_mem.cu:3"
    constant = "read of word 4 of __constant__ past_the_constants_weights, which has 16 bytes, "
    assert message("variables", 5) == f"{constant}{where} past_the_constants.cu:4"
    assert message("variables", 4).startswith("write of word 48 of __device__ past_a_variable_table, which has 192 ")
    assert message("const", 0).startswith(f"write of in[0], which the kernel takes as const, {where}")
    assert "which no kernel may write" in message("const", 2)


def test_structs_of_minus_one_are_numbers() -> None:
    """Bytes of 0xFF in a struct are what `empty` left only where nobody has written the array."""
    pairs = np.dtype([("a", "i4"), ("b", "i4")])
    code = """struct Pair { int a, b; };
    extern "C" __global__ void k(const Pair *in, int *out) { out[threadIdx.x] = in[threadIdx.x].b; }"""
    function = engine.RawModule(code=code).get_function("k")
    given = engine.asarray(np.full(64, -1, np.int64)).view(pairs)
    xray(function, (1,), (64,), (given, zeros(64))).assert_clean()
    report = xray(function, (1,), (64,), (engine.empty(64, pairs), zeros(64)))
    assert [f.kind for f in report.findings] == ["uninitialised"]
