"""The X-ray finds nothing in kernels without a bug, and counts what a launch does."""

from __future__ import annotations

import functools
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_files import cuda_text
from planted_files import FILES, header, module, out, planted, some, zeros

from helpers import engine
from helpers.attention import kernel, reference
from helpers.attention.check import check, make_inputs
from helpers.attention.ladder import FORWARD, LADDER
from helpers.engine import compiler
from helpers.xray import Report, xray

OTHERS = cuda_text("xray_no_bug_others")


@functools.cache
def others() -> engine.RawModule:
    names = ("turned<32>", "turned<64>")
    return engine.RawModule(code=OTHERS, options=("-std=c++17",), name_expressions=names)


def test_lanes_that_write_the_same_value_do_not_race() -> None:
    xray(others().get_function("same_value"), (1,), (64,), (some(64), out(64))).assert_clean()
    report = xray(others().get_function("own_value"), (1,), (64,), (some(64), out(64)))
    assert [(f.kind, f.array) for f in report.findings] == [("race", "sums")]


def test_a_guess_that_atomic_cas_checks_is_no_race() -> None:
    total = zeros(1, np.uint32)
    xray(others().get_function("guess"), (3,), (64,), (total,)).assert_clean()
    assert total[0] == 192
    report = xray(others().get_function("no_guess"), (3,), (64,), (zeros(1, np.uint32), zeros(192, np.uint32)))
    assert {f.kind for f in report.findings} == {"race"}


def test_constants_of_the_host_are_there() -> None:
    code = """__constant__ float c[2];
    extern "C" __global__ void constants(float *out) { out[threadIdx.x] = c[threadIdx.x % 2]; }"""
    module = engine.RawModule(code=code)
    module.get_global("c").view(np.float32)[...] = [3, 4]
    got = out(32)
    xray(module.get_function("constants"), (1,), (32,), (got,)).assert_clean()
    assert got.tolist() == [3, 4] * 16


def test_a_struct_copied_by_memcpy_is_seen() -> None:
    report = xray(others().get_function("packed"), (1,), (64,), (some(256), out(64)), 1024)
    report.assert_clean()
    assert report.shared["dynamic shared memory"].written == 1024


def test_the_timeline_tells_who_waits() -> None:
    report = xray(others().get_function("late"), (2,), (64,), (some(128), zeros(64, np.float32), np.int32(8)))
    first = OTHERS.splitlines().index('extern "C" __global__ void late(const float *in, float *out, int n) {') - 1
    got = [(s.interval, s.warp, s.line - first, s.what, len(s.threads), s.count) for s in report.steps(1)]
    before = [(1, "read global", 32), (2, "read global", 16), (3, "write shared", 32)]
    assert got == [
        *((0, warp, line, what, lanes, 1) for warp in (0, 1) for line, what, lanes in before),
        (1, 1, 6, "read shared", 32, 8),
        (2, 0, 8, "write global", 32, 1),
        (2, 1, 8, "write global", 32, 1),
    ]
    assert [s.barrier and s.barrier - first for s in report.steps((1, 0))[::3]] == [4, 4, 7]
    assert report.steps(0)[1].threads == tuple(range(1, 32, 2))
    assert "(warp 1 is the last)" in repr(report.timeline(1))
    assert report.timeline(1).png() == report.timeline(1).png()
    with pytest.raises(IndexError, match="blocks 0 to 1; got 2"):
        report.timeline(2)


def test_branches_are_requests_of_their_own_and_race_with_nobody() -> None:
    got = out(64)
    report = xray(others().get_function("branches"), (1,), (64,), (some(64), some(64), got))
    report.assert_clean()
    for array in ("even", "odd"):
        assert (report.traffic[array].loads, report.traffic[array].read) == (2, 32 * 4)
    assert np.array_equal(engine.asnumpy(got), [t + 2 if t % 2 == 0 else t - 1 for t in range(64)])
    assert (report.barriers, report.traffic["out"].stores) == (1, 2)


def test_loops_of_different_lengths_are_as_many_requests_as_the_longest() -> None:
    report = xray(others().get_function("trips"), (1,), (32,), (some(1024), out(32)))
    report.assert_clean()
    assert report.traffic["in"].loads == 32
    assert report.traffic["in"].read == 4 * 32 * 33 // 2
    assert np.array_equal(report.fetches["in"].reshape(32, 32), np.triu(np.ones((32, 32))))


def test_lanes_that_left_are_not_waited_for() -> None:
    report = xray(others().get_function("leavers"), (1,), (32,), (some(32), out(7), np.int32(7)))
    report.assert_clean()
    assert (report.traffic["in"].loads, report.traffic["in"].read) == (1, 28)


def test_half_types_are_counted_in_their_bytes() -> None:
    report = xray(others().get_function("halves"), (1,), (64,), (some(64, np.uint16), zeros(64, np.uint16)))
    report.assert_clean()
    assert (report.traffic["in"].read, report.traffic["in"].loads, report.traffic["in"].sectors) == (128, 2, 4)
    assert (report.shared["s"].read, report.shared["s"].written, report.shared["s"].conflicts) == (128, 128, 0)


@pytest.mark.parametrize("n", [32, 64])
def test_arrays_of_templates_have_their_own_names_and_sizes(n: int) -> None:
    got = out(n)
    report = xray(others().get_function(f"turned<{n}>"), (1,), (n,), (some(n), got))
    report.assert_clean()
    assert np.array_equal(engine.asnumpy(got), np.arange(n)[::-1])
    assert (report.shared["s"].read, report.shared["s"].written) == (4 * n, 4 * n)


@pytest.mark.parametrize("n", [1, 64, 100, 12_000])
def test_dynamic_shared_memory_of_any_size(n: int) -> None:
    got = out(n)
    report = xray(others().get_function("tile_of"), (1,), (64,), (some(n), got, np.int32(n)), 4 * n)
    report.assert_clean()
    assert np.array_equal(engine.asnumpy(got), np.arange(n)[::-1])
    assert report.shared["dynamic shared memory"].read == 4 * n


def test_launches_in_a_row_do_not_know_of_each_other() -> None:
    bug = planted("read_too_early")
    first = bug.look()
    assert bug.look(fixed=True).clean
    again = bug.look()
    assert again.findings == first.findings
    assert str(again) == str(first)


def test_two_threads_of_python_get_a_report_each() -> None:
    reports: dict[str, list[Report]] = {"read_too_early": [], "written_too_early": []}
    plain = []

    def work(which: str) -> None:
        for _ in range(6):
            reports[which].append(planted(which).look())
            got = out(64)
            others().get_function("turned<64>")((1,), (64,), (some(64), got))  # an ordinary launch in between
            plain.append(bool(np.array_equal(engine.asnumpy(got), np.arange(64)[::-1])))

    threads = [threading.Thread(target=work, args=(which,)) for which in reports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(plain) and len(plain) == 12
    for which, seen in reports.items():
        assert [str(report) for report in seen] == [str(planted(which).look())] * 6


def test_an_endless_loop_can_be_interrupted() -> None:
    kernel = module("waiting", fixed=False).get_function("no_step")
    interrupt = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):  # and not the error at its time limit
        interrupt.start()
        xray(kernel, (1,), (64,), (some(64), out(64), np.int32(0)), timeout=60)
    interrupt.join()
    assert planted("no_step").look(fixed=True).clean


def test_results_are_copied_back_and_neighbours_stay_whole() -> None:
    whole = engine.zeros(96, np.float32)
    report = xray(others().get_function("neighbour"), (1,), (64,), (whole[:64],))
    assert [(f.kind, f.index, f.count) for f in report.findings] == [("out of bounds", 64, 2)]  # read and written
    assert np.array_equal(engine.asnumpy(whole), [0] + [1] * 63 + [0] * 32)


def test_a_report_fits_a_hundred_columns() -> None:
    for topic in ("misaligned", "out_of_bounds", "races_in_global_memory", "races_in_shared_memory", "unwritten"):
        for bug in (file for file in FILES if file.topic == topic):
            text = str(bug.look())
            assert max(map(len, text.splitlines())) <= 100, text
            assert re.match(rf"{bug.name}: 1 finding\n", text)
    assert str(planted("read_too_early").look(fixed=True)).startswith("read_too_early: 0 findings\n")


SHAPES = (1, 1, 1), (33, 31, 3), (65, 63, 8), (127, 257, 64), (65, 33, 128)
STAGES = [name for name, stage in FORWARD.items() if "float32" in stage.dtypes]


@pytest.mark.exhaustive(each_value=())
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize(
    ("name", "shape"), [(name, SHAPES[(i + more) % 5]) for i, name in enumerate(STAGES) for more in (0, 2)], ids=str
)
def test_the_stages_are_clean(name: str, shape: tuple[int, int, int], cpu_engine: Any) -> None:
    """Two shapes of each; each launch of other tests also stops at an access out of bounds."""
    reports = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        reports.append(xray(self, grid, block, args, shared_mem))

    n, n_kv, d = shape
    d = -(-d // LADDER[name].head_dim_step) * LADDER[name].head_dim_step
    q, k, v = make_inputs(n, n_kv, d)
    with kernel.launches_replaced(checked):
        got = engine.asnumpy(LADDER[name](q, k, v))
    assert not any(report.findings for report in reports)
    assert reports[-1].traffic["O"].written == 4 * n * d
    assert check(name, got, reference.attention(q, k, v)).passed


UNTOUCHED = """extern "C" __global__ void k(TYPE *out, int n) {
  __shared__ TYPE s[64];
  __shared__ TYPE left_out[64];
  if (n) s[threadIdx.x] = 1;
  out[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.mark.parametrize("dtype", ["float", "int", "double"])
@pytest.mark.parametrize("store", [True, False])
def test_a_shared_array_that_no_line_writes(dtype: str, store: bool) -> None:
    """A compiler that sees no store might assume that the array is zero."""
    code = UNTOUCHED.replace("TYPE", dtype).replace("if (n)", "if (n)" if store else "//")
    function = engine.RawModule(code=code).get_function("k")
    a = engine.zeros(64, dtype={"float": "f4", "int": "i4", "double": "f8"}[dtype])
    function((1,), (64,), (a, np.int32(0)))
    assert (a == -1).all() if dtype == "int" else np.isnan(a).all()
    assert function.shared_size_bytes == 64 * a.itemsize
    report = xray(function, (1,), (64,), (a, np.int32(0)))
    assert [(f.kind, f.array, f.line) for f in report.findings] == [("uninitialised", "s", 5)]
    assert list(report.shared) == ["s"]
    if store:
        xray(function, (1,), (64,), (a, np.int32(1))).assert_clean()


BY_ANOTHER_THREAD = """
extern "C" __global__ void k(int *lock) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) add_release(lock);
  } else {
    if (threadIdx.x == 0) while (acquired(lock) == 0) {}
    __syncthreads();
    if (threadIdx.x == 32) lock[0] = 0;
  }
}
"""


def test_who_meets_the_one_that_looked_may_reset() -> None:
    """A barrier orders them; without one, the reset races with the addition and with the read."""
    lock = zeros(1)
    xray(engine.RawKernel(header("ptx.cuh") + BY_ANOTHER_THREAD, "k"), (2,), (64,), (lock,)).assert_clean()
    code = header("ptx.cuh") + BY_ANOTHER_THREAD.replace("__syncthreads();", "")
    report = xray(engine.RawKernel(code, "k"), (2,), (64,), (zeros(1),))
    assert [(f.kind, f.array) for f in report.findings] == [("race", "lock")] * 2


LOOKED_AT = """#line 1 "k.cu"
extern "C" __global__ void several(const float *in, float *out, int *flag) {
  flag[0] = threadIdx.x < 64 ? 1 : 2;
  out[threadIdx.x] = in[threadIdx.x];
}
extern "C" __global__ void turns(volatile int *turn, volatile float *box, float *out) {  // two blocks take turns
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    box[0] = 5;
    __threadfence();
    turn[0] = 1;
  } else {
    while (turn[0] == 0) __nanosleep(100);
    out[0] = box[0];
  }
}
"""


def test_a_race_of_other_values_too_is_a_race() -> None:
    function = engine.RawModule(code=LOOKED_AT).get_function("several")
    (found,) = xray(function, (1,), (96,), (some(96), out(96), zeros(1))).findings
    assert (found.kind, found.line, found.other_line, found.array) == ("race", 2, 2, "flag")
    assert "same value" not in found.message


def test_blocks_that_signal_by_volatile_are_clean() -> None:
    function = engine.RawModule(code=LOOKED_AT).get_function("turns")
    xray(function, (2,), (32,), (zeros(1), engine.zeros(1, "f4"), out(1))).assert_clean()


# Not bugs: rows of shared and of global memory as one row, by any name; arrays of one element at the end.
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
    """Further launches by the X-ray leave no trace: the variables and the output are those of one launch."""
    module = engine.RawModule(code=STATEFUL)
    module.get_global("scale").view(np.float32)[...] = 3
    calls = module.get_global("calls").view(np.int32)
    got = out(64)
    xray(module.get_function("k"), (1,), (64,), (some(64), got, zeros(64, np.int64))).assert_clean()
    assert np.array_equal(engine.asnumpy(got), 3 * np.arange(64))
    assert calls[0] == 1


def test_a_launch_of_another_form_is_looked_at_again() -> None:
    if not compiler.filling("pattern"):
        pytest.skip("this compiler cannot fill local variables")
    function = module("unset_variables", fixed=False).get_function("set_in_one_branch")
    xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(64))).assert_clean()
    xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(64))).assert_clean()
    report = xray(function, (1,), (64,), (some(64), zeros(64, np.float32), np.int32(63)))
    assert [(f.kind, f.index) for f in report.findings] == [("uninitialised", 63)]
