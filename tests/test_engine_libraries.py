"""CUB's block and warp collectives and libcu++, as installed with CuPy, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import checked, compiler, libraries, observed

pytestmark = pytest.mark.skipif(not libraries.options(), reason="CuPy's CUB and libcu++ are not installed")
THREADS = 128
RNG = np.random.default_rng(21)


def integers(count: int = THREADS, low: int = -1000, high: int = 1000) -> np.ndarray:
    return RNG.integers(low, high, count).astype(np.int32)


def launch(cp: Any, code: str, *arrays: Any, name: str = "kernel", threads: int = THREADS, blocks: int = 1) -> None:
    compiled(cp, code).get_function(name)((blocks,), (threads,), arrays)


REDUCE = cuda_text("engine_libraries_reduce")


@on_each_device
def test_reductions(cp: Any) -> None:
    x, d = integers(), RNG.integers(-50, 50, THREADS).astype(np.float64) / 4
    out, sums = cp.zeros(8, cp.int32), cp.zeros(17, cp.float64)
    launch(cp, REDUCE, cp.asarray(x), out, cp.asarray(d), sums)
    expected = [x.sum(), x.max(), x[:77].sum(), x.min(), *x.reshape(4, 32).sum(1)]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    np.testing.assert_array_equal(cp.asnumpy(sums), [d.sum(), *d.reshape(16, 8).max(1)])


SCAN = cuda_text("engine_libraries_scan")


@on_each_device
def test_scans(cp: Any) -> None:
    x, f = integers(), RNG.integers(-64, 64, THREADS).astype(np.float32) / 8
    out, floats = cp.zeros((4, THREADS), cp.int32), cp.zeros(THREADS, cp.float32)
    launch(cp, SCAN, cp.asarray(x), out, cp.asarray(f), floats)
    sums = np.cumsum(x)
    warps = np.cumsum(x.reshape(4, 32), axis=1).ravel()
    expected = [sums - x, np.full(THREADS, sums[-1]), np.maximum.accumulate(x), warps]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    np.testing.assert_array_equal(cp.asnumpy(floats), np.cumsum(f))


SORT = cuda_text("engine_libraries_sort")


@on_each_device
def test_sorts_and_histograms(cp: Any) -> None:
    keys, f = RNG.permutation(4 * THREADS).astype(np.int32) - 200, RNG.standard_normal(THREADS).astype(np.float32)
    values = np.arange(4 * THREADS, dtype=np.int32)
    given = cp.asarray(keys.copy()), cp.asarray(values)
    down, counts = cp.zeros(THREADS, cp.float32), cp.zeros(16, cp.uint32)
    launch(cp, SORT, *given, cp.asarray(f), down, counts)
    order = np.argsort(keys)
    np.testing.assert_array_equal(cp.asnumpy(given[0]), keys[order])
    np.testing.assert_array_equal(cp.asnumpy(given[1]), order)
    np.testing.assert_array_equal(cp.asnumpy(down), np.sort(f)[::-1])
    np.testing.assert_array_equal(cp.asnumpy(counts), np.bincount(keys & 15, minlength=16))


MERGE = cuda_text("engine_libraries_merge")


@on_each_device
def test_merge_sorts_exchanges_and_heads(cp: Any) -> None:
    x = integers(4 * THREADS, 0, 100)
    sorted_, warps, heads, moved = (cp.zeros(n, cp.int32) for n in (512, 128, 512, 128))
    launch(cp, MERGE, cp.asarray(x), sorted_, warps, heads, moved)
    expected = np.sort(x)
    np.testing.assert_array_equal(cp.asnumpy(sorted_), expected)
    np.testing.assert_array_equal(cp.asnumpy(warps), np.sort(x[:128].reshape(4, 32), axis=1).ravel())
    np.testing.assert_array_equal(cp.asnumpy(heads), np.append(1, expected[1:] != expected[:-1]))
    np.testing.assert_array_equal(cp.asnumpy(moved)[:-3], x[::4][3:])


BARRIER = cuda_text("engine_libraries_barrier")


@on_each_device
def test_barriers_that_are_split_in_two(cp: Any) -> None:
    x, out = integers(), cp.zeros((3, THREADS), cp.int32)
    launch(cp, BARRIER, cp.asarray(x), out)
    expected = [x[::-1] + k + 3 * np.arange(THREADS) for k in range(3)]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


@on_each_device
def test_copies_that_arrive_at_a_barrier(cp: Any) -> None:
    x, out = integers(4 * THREADS), cp.zeros(2 * THREADS, cp.int32)
    launch(cp, BARRIER, cp.asarray(x), out, name="copies")
    expected = np.append(x[:128][::-1], x[128:256][::-1])
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


def test_the_xray_knows_the_order_that_a_barrier_makes() -> None:
    def findings(code: str, name: str) -> list[int]:
        kernel = engine.RawModule(code=code).get_function(name)
        args = engine.asarray(integers(4 * THREADS)), engine.zeros(3 * THREADS, engine.int32)
        return [issue.kind for issue in checked.observe(kernel, (1,), (THREADS,), args).issues]

    assert findings(BARRIER, "kernel") == [] and findings(BARRIER, "copies") == []
    unwaited = BARRIER.replace("barrier.wait(cuda::std::move(token));", "")
    assert observed.RACE in findings(unwaited, "kernel")
    unwaited = BARRIER.replace("  barrier.arrive_and_wait();\n  out[t]", "  barrier.arrive();\n  out[t]")
    assert unwaited != BARRIER and observed.RACE in findings(unwaited, "copies")


PIPELINE = cuda_text("engine_libraries_pipeline")


@on_each_device
def test_a_pipeline_of_a_block(cp: Any) -> None:
    tiles = 5
    x, out = RNG.integers(-9, 9, (tiles, THREADS)).astype(np.float32), cp.zeros(THREADS, cp.float32)
    launch(cp, PIPELINE, cp.asarray(x), out, np.int32(tiles))
    np.testing.assert_array_equal(cp.asnumpy(out), x.sum(0)[::-1])


@on_each_device
def test_a_pipeline_of_a_thread(cp: Any) -> None:
    x, out = RNG.integers(-9, 9, (2, THREADS)).astype(np.float32), cp.zeros(THREADS, cp.float32)
    launch(cp, PIPELINE, cp.asarray(x), out, name="alone")
    np.testing.assert_array_equal(cp.asnumpy(out), 2 * x[0] + x[1])


ATOMIC = cuda_text("engine_libraries_atomic")


@on_each_device
def test_atomics(cp: Any) -> None:
    n = 4 * THREADS
    ints, order = cp.zeros(4, cp.int32), cp.zeros(n, cp.int32)
    f, d, wide = cp.zeros(1, cp.float32), cp.zeros(1, cp.float64), cp.zeros(1, cp.uint64)
    launch(cp, ATOMIC, ints, f, d, wide, order, blocks=4)
    np.testing.assert_array_equal(cp.asnumpy(ints), [n * (n - 1) // 2, 255, 2**20 - 1, n - 1])
    assert cp.asnumpy(f)[0] == n / 2 and cp.asnumpy(d)[0] == n / 4 and cp.asnumpy(wide)[0] == n << 32 | n
    start = cp.asnumpy(order).min()
    np.testing.assert_array_equal(np.sort(cp.asnumpy(order)), np.arange(n) + start)


STD = cuda_text("engine_libraries_std")


@on_each_device
def test_the_standard_library_for_devices(cp: Any) -> None:
    out, floats = cp.zeros(8, cp.int32), cp.zeros(4, cp.float32)
    launch(cp, STD, out, floats, threads=1)
    np.testing.assert_array_equal(cp.asnumpy(out), [4, 10, 8, 32767, 4, 31, 0x3F800000, 7])
    np.testing.assert_allclose(cp.asnumpy(floats), [2.5, -3, 4, 5], rtol=1e-6)


def test_a_header_of_ones_own_may_include_them() -> None:
    """In a new folder each time it would be a new build, of 6 s."""
    folder = compiler.cache_dir() / "own-headers-of-a-test"
    folder.mkdir(exist_ok=True)
    lane = 'inline __device__ int lane() { int i; asm("mov.u32 %0, %%laneid;" : "=r"(i)); return i; }\n'
    compiler.keep(folder / "sums.cuh", f"#pragma once\n#include <cub/warp/warp_reduce.cuh>\n{lane}")
    code = """
    #include <sums.cuh>
    extern "C" __global__ void kernel(int* out) {
      typedef cub::WarpReduce<int> Reduce;
      __shared__ typename Reduce::TempStorage storage;
      int sum = Reduce(storage).Sum(lane());
      if (threadIdx.x == 0) *out = sum;
    }"""
    out = engine.zeros(1, engine.int32)
    module = engine.RawModule(code=code, options=(f"-I{folder}",))
    module.get_function("kernel")((1,), (32,), (out,))
    assert engine.asnumpy(out)[0] == 496


def test_cub_as_a_whole() -> None:
    """NVRTC refuses <cub/cub.cuh>, nvcc accepts it: here it provides what kernels may call."""
    code = """
    #include <cub/cub.cuh>
    extern "C" __global__ void kernel(int* out) {
      typedef cub::BlockReduce<int, 64> Reduce;
      __shared__ typename Reduce::TempStorage storage;
      int sum = Reduce(storage).Sum(threadIdx.x);
      if (threadIdx.x == 0) *out = sum;
    }"""
    out = engine.zeros(1, engine.int32)
    engine.RawModule(code=code).get_function("kernel")((1,), (64,), (out,))
    assert engine.asnumpy(out)[0] == 2016


def test_without_cupy_the_message_says_whose_headers_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "options", lambda: [])
    with pytest.raises(engine.CompileError, match=r"cub/cub\.cuh is a header of CUB.*comes with CuPy"):
        engine.RawModule(code='#include <cub/cub.cuh>\nextern "C" __global__ void kernel() {}').compile()
