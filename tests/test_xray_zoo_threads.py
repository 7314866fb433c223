"""More of the zoo: local arrays and variables of a thread, and shuffles from lanes that take no part."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import zoo
from zoo import Bug, out, some, zeros

from helpers import engine
from helpers.engine import compiler, nvrtc
from helpers.xray import Report, xray

SHUFFLES = [
    Bug(
        "half_a_warp_reads_the_other",
        "inactive lane",
        """NAME(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16) {
    x += __shfl_xor_sync(0x0000ffffu, x, 16);  // here
  }
  out[threadIdx.x] = x;
}
""",
        (("x, 16)", "x, 8)"),),
        lambda: (some(32), out(32)),
        block=32,
        at_thread=0,
    ),
    Bug(
        "a_block_of_half_a_warp",
        "inactive lane",
        """NAME(const float *in, float *out) {
  float x = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);  // here
  if (threadIdx.x == 0) out[0] = x;
}
""",
        (("step = 16", "step = 8"), ("x, step)", "x, step, 16)")),
        lambda: (some(16), out(1)),
        block=16,
    ),
    Bug(
        "lanes_that_have_left",
        "inactive lane",
        """NAME(const float *in, float *out, int n) {
  if (threadIdx.x >= n) return;
  float x = in[threadIdx.x];
  out[threadIdx.x] = x + __shfl_down_sync(0xffffffffu, x, 1);  // here
}
""",
        (("x + __shfl_down_sync", "x + __shfl_up_sync"),),
        lambda: (some(32), out(20), np.int32(20)),
        block=32,
        at_thread=19,
    ),
    Bug(
        "broadcast_from_an_inactive_lane",
        "inactive lane",
        """NAME(const int *in, int *out) {
  int x = in[threadIdx.x];
  if (threadIdx.x % 2) x = __shfl_sync(0xaaaaaaaau, x, 0);  // here
  out[threadIdx.x] = x;
}
""",
        (("x, 0)", "x, 1)"),),
        lambda: (some(64, np.int32), zeros(64)),
        at_thread=1,
    ),
]

LOCAL_ARRAYS = [
    Bug(
        "one_accumulator_too_many",
        "out of bounds",
        """NAME(const float *in, float *out, int n) {
  float acc[4] = {};
  for (int i = 0; i <= n; ++i) acc[i] += in[threadIdx.x + i];  // here
  out[threadIdx.x] = acc[0] + acc[1] + acc[2] + acc[3];
}
""",
        (("i <= n", "i < n"),),
        lambda: (some(72), out(64), np.int32(4)),
        array="acc",
        index=4,
        at_thread=0,
    ),
    Bug(
        "before_a_row",
        "out of bounds",
        """NAME(const float *in, float *out, int back) {
  __shared__ float tile[8][8];
  float rows[2][9];
  tile[0][threadIdx.x] = in[threadIdx.x];  // one row of 64: the address is inside
  __syncthreads();
  for (int i = 0; i < 9; ++i) rows[0][i] = rows[1][i] = tile[0][(threadIdx.x + i) % 64];
  float sum = 0;
  for (int i = 0; i < 9; ++i) sum += rows[1][i] - rows[1][8 - i] * tile[0][i];
  out[threadIdx.x] = rows[0][back] + sum;  // here
}
""",
        (("rows[0][back]", "rows[0][back + 1]"),),
        lambda: (some(64), out(64), np.int32(-1)),
        array="rows",
        index=-1,
        at_thread=0,
    ),
    Bug(
        "past_a_table_in_the_code",
        "out of bounds",
        """NAME(const int *in, float *out) {
  const float steps[3] = {1, 2, 4};
  out[threadIdx.x] = steps[in[threadIdx.x] % 4];  // here
}
""",
        (("% 4", "% 3"),),
        lambda: (some(64, np.int32), out(64)),
        array="steps",
        index=3,
        at_thread=3,
    ),
    Bug(
        "an_array_by_reference",
        "out of bounds",
        """__device__ float SELF_sum(const float (&row)[8], int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += row[i];  // here
  return sum;
}
NAME(const float *in, float *out, int n) {
  float kept[8];
  for (int i = 0; i < 8; ++i) kept[i] = in[(threadIdx.x + i) % 64];
  out[threadIdx.x] = SELF_sum(kept, n);
}
""",
        (("i < n", "i < n - 1"),),
        lambda: (some(64), out(64), np.int32(9)),
        array="row",
        index=8,
    ),
]

# Where the compiler's columns, or the text, need a second look: templates, members, macros, edited lines.
MORE_LOCAL_ARRAYS = [
    Bug(
        "element_type_of_a_template",
        "out of bounds",
        """template <typename T>
__device__ T SELF_last(int n) {
  T kept[3] = {T(1), T(2), T(3)};
  return kept[n];  // here
}
NAME(float *out, int n) { out[threadIdx.x] = SELF_last<float>(n) + SELF_last<int>(2); }
""",
        (("kept[n]", "kept[n - 1]"),),
        lambda: (out(64), np.int32(3)),
        array="kept",
        index=3,
    ),
    Bug(
        "size_of_a_template",
        "out of bounds",
        """template <int N>
__device__ float SELF_sum(const float *out) {
  float out_reg[N / 2];
  for (int i = 0; i < N; ++i) out_reg[i / 2] = i;
  float sum = 0;
  for (int i = 0; i <= N / 2; ++i) sum += out_reg[i];  // here
  return sum;
}
NAME(float *out) { out[threadIdx.x] = SELF_sum<8>(out); }
""",
        (("i <= N / 2", "i < N / 2"),),
        lambda: (out(64),),
        array="out_reg",
        index=4,
    ),
    Bug(
        "member_of_its_own_struct",
        "out of bounds",
        """struct SELF_rows {
  float first[2], last[3];
  __device__ float get(int i) const { return last[i]; }  // here
};
NAME(float *out, int n) {
  const SELF_rows rows = {{1, 2}, {3, 4, 5}};
  out[threadIdx.x] = rows.get(n) + rows.first[n % 2];
}
""",
        (("get(n)", "get(n % 3)"),),
        lambda: (out(64), np.int32(3)),
        array="last",
        index=3,
    ),
    Bug(
        "member_of_a_template",
        "out of bounds",
        """template <typename T, int N>
struct SELF_Tile {
  T acc[N][N] = {};
  __device__ void add(int i, int j) { acc[i][j] += j; }  // here
};
NAME(float *out, int n) {
  SELF_Tile<float, 4> tile;
  for (int j = 0; j < n; ++j) tile.add(0, j);
  out[threadIdx.x] = tile.acc[0][3];
}
""",
        (("j < n", "j < n - 1"),),
        lambda: (out(64), np.int32(5)),
        array="acc",
        index=4,
    ),
    Bug(
        "in_a_generic_lambda",
        "out of bounds",
        """NAME(float *out, int n) {
  float acc[4] = {1, 2, 3, 4};
  auto take = [&](auto i) { return acc[i]; };  // here
  out[threadIdx.x] = take(n);
}
""",
        (("take(n)", "take(n - 1)"),),
        lambda: (out(64), np.int32(4)),
        array="acc",
        index=4,
    ),
    Bug(
        "one_of_several_names",
        "out of bounds",
        """#define SELF_DIM 8
#define SELF_ROWS 16
NAME(float *out) {
  float m_i = 0.0f, l_i = fmaxf(m_i, 1.0f), row[2] = {1, 2}, acc[SELF_DIM] = {}, *last = acc;
  for (int c = 0; c < SELF_ROWS; ++c) acc[c] += row[c % 2];  // here
  out[threadIdx.x] = *last / l_i;
}
""",
        (("c < SELF_ROWS", "c < SELF_DIM"),),
        lambda: (out(64),),
        array="acc",
        index=8,
    ),
    Bug(
        "by_a_macro",
        "out of bounds",
        """#define SELF_AT(array, i) array[(i) + 1]
NAME(float *out, int n) {
  float acc[4] = {1, 2, 3, 4};
  out[threadIdx.x] = SELF_AT(acc, n);  // here
}
""",
        (("SELF_AT(acc, n)", "SELF_AT(acc, n - 1)"),),
        lambda: (out(64), np.int32(3)),
        array="acc",
        index=4,
    ),
    Bug(
        "behind_a_shift",
        "out of bounds",
        """NAME(float *out, int n) {
  const int bits[4] = {1, 2, 3, 4};
  out[threadIdx.x] = (float)((1 << n) >> 1) + bits[bits[n << 1 >> 1] - (n >> 4)];  // here
}
""",
        (("bits[n << 1 >> 1]", "bits[n - 1 << 1 >> 1]"),),
        lambda: (out(64), np.int32(3)),
        array="bits",
        index=4,
    ),
    Bug(
        "of_the_name_of_a_parameter",
        "out of bounds",
        """__device__ float SELF_second(int i) {
  const float out[2] = {1, 2};
  return out[i];  // here
}
NAME(float *out, int n) { out[threadIdx.x] = SELF_second(n); }
""",
        (("SELF_second(n)", "SELF_second(n - 1)"),),
        lambda: (out(64), np.int32(2)),
        array="out",
        index=2,
    ),
]

# Not by an index with a known end: the compiler follows a pointer to the array, and the address is on the stack.
BY_POINTERS = [
    Bug(
        "by_a_functions_pointer",
        "out of bounds",
        """__device__ void SELF_fill(float *p, int n) {
  for (int i = 0; i < n; ++i) p[i] = i;  // here
}
NAME(float *out, int n) {
  __shared__ float s[8];
  float kept[4];
  if (threadIdx.x == 0) SELF_fill(s, 8);
  SELF_fill(kept, n);
  __syncthreads();
  out[threadIdx.x] = kept[threadIdx.x % 4] + s[threadIdx.x % 8];
}
""",
        (("kept, n", "kept, n - 1"),),
        lambda: (out(64), np.int32(5)),
    ),
    Bug(
        "as_a_vector",
        "out of bounds",
        """NAME(float *out, int n) {
  float kept[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  out[threadIdx.x] = reinterpret_cast<const float4 *>(kept)[n].x;  // here
}
""",
        (("[n]", "[n - 1]"),),
        lambda: (out(64), np.int32(2)),
    ),
    Bug(
        "of_a_named_type",
        "out of bounds",
        """typedef float SELF_row[4];
NAME(float *out, int n) {
  const SELF_row kept = {1, 2, 3, 4};
  out[threadIdx.x] = kept[n];  // here
}
""",
        (("[n]", "[n - 1]"),),
        lambda: (out(64), np.int32(4)),
    ),
    Bug(
        "of_half_pairs",
        "out of bounds",
        """NAME(float *out, int n) {
  half2 kept[4];
  for (int i = 0; i < n; ++i) kept[i] = __floats2half2_rn(i, i);  // here
  out[threadIdx.x] = __low2float(kept[0]);
}
""",
        (("i < n", "i < n - 1"),),
        lambda: (out(64), np.int32(5)),
    ),
]

# What is none: rows of shared and of global memory as one row, by whatever name; arrays of one element at the end.
LONG_ROWS = """
struct Tile { float a[8][8]; };
struct Header { int size; float data[1]; };
template <int N> __device__ float row_sum(const float (*rows)[N], int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += rows[0][i];
  return sum;
}
extern "C" __global__ void k(float* out, Header* list, float (*matrix)[8]) {
  __shared__ float tile[8][8];
  __shared__ Tile whole;
  float acc[2][2] = {{1, 2}, {3, 4}};
  tile[0][threadIdx.x] = whole.a[0][threadIdx.x] = acc[threadIdx.x % 2][1];
  __syncthreads();
  auto rows = reinterpret_cast<const float (*)[8]>(&tile[0][0]);
  const float global = matrix[0][threadIdx.x] + list->data[threadIdx.x];
  out[threadIdx.x] = row_sum<8>(tile, 64) + rows[0][63 - threadIdx.x] + whole.a[0][threadIdx.x] + global;
}
"""

UNSET = [
    Bug(
        "a_sum_from_nothing",
        "uninitialised",
        """NAME(const float *in, float *out, int n) {
  float sum;
  for (int i = 0; i < n; ++i) sum += in[i];
  out[threadIdx.x] = sum;  // here
}
""",
        (("float sum;", "float sum = 0;"),),
        lambda: (some(64), out(64), np.int32(64)),
        array="out",
        index=0,
        at_thread=0,
    ),
    Bug(
        "accumulators_from_nothing",
        "uninitialised",
        """NAME(const float *in, float *out, int n) {
  float acc[4];
  for (int i = 1; i < 4; ++i) acc[i] = 0;
  for (int i = 0; i < n; ++i) acc[i % 4] += in[i];
  out[threadIdx.x] = acc[threadIdx.x % 4];  // here
}
""",
        (("int i = 1", "int i = 0"),),
        lambda: (some(64), out(64), np.int32(64)),
        array="out",
        index=0,
        at_thread=0,
    ),
    Bug(
        "set_in_one_branch",
        "uninitialised",
        """NAME(const float *in, float *out, int n) {
  float x;
  if (threadIdx.x < n) x = in[threadIdx.x];
  out[threadIdx.x] = 2 * x;  // here
}
""",
        (("  out[threadIdx.x]", "  if (threadIdx.x < n) out[threadIdx.x]"),),
        lambda: (some(64), zeros(64, np.float32), np.int32(50)),
        array="out",
        index=50,
        at_thread=50,
    ),
    Bug(
        "an_integer_from_nothing",
        "uninitialised",
        """NAME(const int *in, int *out) {
  int most[2];
  if (in[threadIdx.x] > 60) most[1] = in[threadIdx.x];
  most[0] = 1;
  out[threadIdx.x] = most[in[threadIdx.x] & 1];  // here
}
""",
        (("int most[2];", "int most[2] = {};"),),
        lambda: (some(64, np.int32), zeros(64)),
        array="out",
        index=1,
        at_thread=1,
    ),
]

MODULES = {
    "shuffles": SHUFFLES,
    "arrays": LOCAL_ARRAYS,
    "more arrays": MORE_LOCAL_ARRAYS,
    "pointers": BY_POINTERS,
    "unset": UNSET,
}
ZOO = [pytest.param(group, bug, id=bug.name) for group, bugs in MODULES.items() for bug in bugs]


@functools.cache
def module(group: str) -> engine.RawModule:
    return zoo.module(MODULES[group], "#include <cuda_fp16.h>\n" if group == "pointers" else "")


def look(group: str, bug: Bug, *, fixed: bool) -> Report:
    if group == "unset" and not compiler.filling("pattern"):
        pytest.skip("this compiler cannot fill local variables")
    return zoo.look(module(group), bug, fixed=fixed)


@pytest.mark.parametrize("group", MODULES)
def test_nvrtc_takes_the_kernels(group: str) -> None:
    options = ("-std=c++17", "--device-as-default-execution-space")  # CuPy gives it always
    assert nvrtc.refusal(module(group).code, options) == ""


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_each_bug_is_found_where_it_is(group: str, bug: Bug) -> None:
    zoo.assert_found(look(group, bug, fixed=False), bug)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_the_fixed_twin_is_clean(group: str, bug: Bug) -> None:
    assert look(group, bug, fixed=True).findings == []


def test_what_the_messages_say() -> None:
    (found,) = look("shuffles", SHUFFLES[0], fixed=False).findings
    assert found.message == (
        "__shfl_xor_sync reads from lane 16, which is not in its mask 0x0000ffff, so its value is undefined: it must "
        "not be used, by block (0,0,0) thread (0,0,0) at half_a_warp_reads_the_other.cu:4"
    )
    assert found.count == 16 and found.array is None
    (found,) = look("shuffles", SHUFFLES[2], fixed=False).findings
    assert "reads from lane 20, which takes no part in it" in found.message
    (found,) = look("arrays", LOCAL_ARRAYS[0], fixed=False).findings
    where = "by block (0,0,0) thread (0,0,0) at one_accumulator_too_many.cu:3"
    assert found.message == f"access of acc[4], which has 4 elements, {where}" and found.count == 64
    (found,) = look("unset", UNSET[0], fixed=False).findings
    depends = "depends on a local variable that nobody has given a value"
    where = "by block (0,0,0) thread (0,0,0) at a_sum_from_nothing.cu:4"
    assert found.message == f"the write of out[0] {depends}, {where}"


def test_rows_of_other_memory_may_be_one_long_row() -> None:
    kernel = engine.RawKernel(LONG_ROWS, "k")
    words = engine.zeros(65, np.float32), engine.zeros((8, 8), np.float32)
    xray(kernel, (1,), (64,), (out(64), words[0].view(np.uint8), words[1])).assert_clean()


def test_a_local_array_of_a_header_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.cuh").write_text(
        "#pragma once\ninline __device__ float third(int i) {\n  float a[3] = {1, 2, 3};\n  return a[i];\n}\n"
    )
    code = '#include "own.cuh"\nextern "C" __global__ void k(float* out, int n) { out[threadIdx.x] = third(n); }'
    report = xray(engine.RawKernel(code, "k"), (1,), (1,), (out(1), np.int32(3)))
    (found,) = report.findings
    assert (found.kind, found.array, found.index, found.line) == ("out of bounds", "a", 3, 4)
    assert found.file is not None and found.file.endswith("own.cuh")


STATEFUL = """#line 1 "k.cu"
__device__ int calls;
__device__ float scale;
extern "C" __global__ void k(const float *in, float *out, long long *when) {
  float x;
  if (threadIdx.x == 0) atomicAdd(&calls, 1);
  x = in[threadIdx.x];
  out[threadIdx.x] = scale * x;
  when[threadIdx.x] = clock64();
}
"""


def test_variables_are_used_once_and_a_clock_is_no_bug() -> None:
    """Further launches of the X-ray's own leave no trace: the variables and the output are those of one launch."""
    module = engine.RawModule(code=STATEFUL)
    module.get_global("scale").view(np.float32)[...] = 3
    calls = module.get_global("calls").view(np.int32)
    got = out(64)
    xray(module.get_function("k"), (1,), (64,), (some(64), got, zeros(64, np.int64))).assert_clean()
    assert np.array_equal(engine.asnumpy(got), 3 * np.arange(64))
    assert calls[0] == 1


def test_a_launch_of_another_form_is_looked_at_again() -> None:
    function = module("unset").get_function("set_in_one_branch")
    xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(64))).assert_clean()
    xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(64))).assert_clean()
    report = xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(63)))
    assert [(f.kind, f.index) for f in report.findings] == [("uninitialised", 63)]
