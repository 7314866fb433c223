"""CUB's block and warp collectives and libcu++, as CuPy brings them, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine
from helpers.engine import checked, compiler, libraries, observed

pytestmark = pytest.mark.skipif(not libraries.options(), reason="CuPy's CUB and libcu++ are not installed")
THREADS = 128
RNG = np.random.default_rng(21)


def integers(count: int = THREADS, low: int = -1000, high: int = 1000) -> np.ndarray:
    return RNG.integers(low, high, count).astype(np.int32)


def launch(cp: Any, code: str, *arrays: Any, name: str = "kernel", threads: int = THREADS, blocks: int = 1) -> None:
    compiled(cp, code).get_function(name)((blocks,), (threads,), arrays)


REDUCE = """
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cuda/functional>
extern "C" __global__ void kernel(const int* x, int* out, const double* d, double* sums) {
  int t = threadIdx.x;
  {
    typedef cub::BlockReduce<int, 128> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    int sum = Reduce(storage).Sum(x[t]);
    __syncthreads();
    int most = Reduce(storage).Reduce(x[t], cuda::maximum<>{});
    __syncthreads();
    int part = Reduce(storage).Sum(x[t], 77);
    if (t == 0) out[0] = sum, out[1] = most, out[2] = part;
  }
  {
    typedef cub::BlockReduce<int, 128, cub::BLOCK_REDUCE_RAKING> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    int least = Reduce(storage).Reduce(x[t], cuda::minimum<>{});
    if (t == 0) out[3] = least;
  }
  {
    typedef cub::BlockReduce<double, 128, cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    double sum = Reduce(storage).Sum(d[t]);
    if (t == 0) sums[0] = sum;
  }
  {
    typedef cub::WarpReduce<int> Reduce;
    __shared__ typename Reduce::TempStorage storage[4];
    int sum = Reduce(storage[t / 32]).Sum(x[t]);
    if (t % 32 == 0) out[4 + t / 32] = sum;
  }
  {
    typedef cub::WarpReduce<double, 8> Reduce;
    __shared__ typename Reduce::TempStorage storage[16];
    double most = Reduce(storage[t / 8]).Reduce(d[t], [](double a, double b) { return a < b ? b : a; });
    if (t % 8 == 0) sums[1 + t / 8] = most;
  }
}
"""


@on_each_device
def test_reductions(cp: Any) -> None:
    x, d = integers(), RNG.integers(-50, 50, THREADS).astype(np.float64) / 4
    out, sums = cp.zeros(8, cp.int32), cp.zeros(17, cp.float64)
    launch(cp, REDUCE, cp.asarray(x), out, cp.asarray(d), sums)
    expected = [x.sum(), x.max(), x[:77].sum(), x.min(), *x.reshape(4, 32).sum(1)]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)
    np.testing.assert_array_equal(cp.asnumpy(sums), [d.sum(), *d.reshape(16, 8).max(1)])


SCAN = """
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>
#include <cuda/functional>
extern "C" __global__ void kernel(const int* x, int* out, const float* f, float* floats) {
  int t = threadIdx.x, before, total, running, lanes;
  typedef cub::BlockScan<int, 128> Scan;
  __shared__ typename Scan::TempStorage storage;
  Scan(storage).ExclusiveSum(x[t], before, total);
  __syncthreads();
  Scan(storage).InclusiveScan(x[t], running, cuda::maximum<>{});
  typedef cub::WarpScan<int> Lanes;
  __shared__ typename Lanes::TempStorage small[4];
  Lanes(small[t / 32]).InclusiveSum(x[t], lanes);
  out[t] = before; out[128 + t] = total; out[256 + t] = running; out[384 + t] = lanes;
  typedef cub::BlockScan<float, 128, cub::BLOCK_SCAN_WARP_SCANS> Floats;
  __shared__ typename Floats::TempStorage other;
  Floats(other).InclusiveSum(f[t], floats[t]);
}
"""


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


SORT = """
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>
extern "C" __global__ void kernel(int* keys, int* values, const float* f, float* down, unsigned* counts) {
  typedef cub::BlockLoad<int, 128, 4, cub::BLOCK_LOAD_TRANSPOSE> Load;
  typedef cub::BlockStore<int, 128, 4, cub::BLOCK_STORE_WARP_TRANSPOSE> Store;
  typedef cub::BlockRadixSort<int, 128, 4, int> Sort;
  __shared__ union {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
    typename Sort::TempStorage sort;
  } storage;
  int key[4], value[4];
  Load(storage.load).Load(keys, key);
  __syncthreads();
  Load(storage.load).Load(values, value);
  __syncthreads();
  Sort(storage.sort).Sort(key, value);
  __syncthreads();
  Store(storage.store).Store(keys, key);
  __syncthreads();
  Store(storage.store).Store(values, value);

  typedef cub::BlockRadixSort<float, 128, 1> Floats;
  __shared__ typename Floats::TempStorage floats;
  float one[1] = {f[threadIdx.x]};
  Floats(floats).SortDescending(one);
  down[threadIdx.x] = one[0];

  typedef cub::BlockHistogram<int, 128, 4, 16> Histogram;
  __shared__ typename Histogram::TempStorage histogram;
  __shared__ unsigned bins[16];
  int digit[4];
  for (int i = 0; i < 4; ++i) digit[i] = key[i] & 15;
  Histogram(histogram).Histogram(digit, bins);
  __syncthreads();
  if (threadIdx.x < 16) counts[threadIdx.x] = bins[threadIdx.x];
}
"""


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


MERGE = """
#include <cub/block/block_discontinuity.cuh>
#include <cub/block/block_exchange.cuh>
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_shuffle.cuh>
#include <cub/warp/warp_merge_sort.cuh>
struct Less {
  __device__ bool operator()(int a, int b) const { return a < b; }
};
struct Differ {
  __device__ bool operator()(int a, int b) const { return a != b; }
};
extern "C" __global__ void kernel(const int* x, int* sorted, int* warps, int* heads, int* moved) {
  int t = threadIdx.x, key[4], lane[1] = {x[t]};
  for (int i = 0; i < 4; ++i) key[i] = x[i * 128 + t];
  typedef cub::BlockExchange<int, 128, 4> Exchange;
  __shared__ typename Exchange::TempStorage exchange;
  Exchange(exchange).StripedToBlocked(key, key);
  typedef cub::BlockShuffle<int, 128> Shuffle;
  __shared__ typename Shuffle::TempStorage shuffle;
  moved[t] = -1;
  Shuffle(shuffle).Offset(key[0], moved[t], 3);
  typedef cub::BlockMergeSort<int, 128, 4> Sort;
  __shared__ typename Sort::TempStorage sort;
  Sort(sort).Sort(key, Less());
  typedef cub::BlockDiscontinuity<int, 128> Discontinuity;
  __shared__ typename Discontinuity::TempStorage discontinuity;
  int head[4];
  Discontinuity(discontinuity).FlagHeads(head, key, Differ());
  for (int i = 0; i < 4; ++i) sorted[4 * t + i] = key[i], heads[4 * t + i] = head[i];
  typedef cub::WarpMergeSort<int, 1> Warp;
  __shared__ typename Warp::TempStorage warp[4];
  Warp(warp[t / 32]).Sort(lane, Less());
  warps[t] = lane[0];
}
"""


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


BARRIER = """
#include <cuda/barrier>
extern "C" __global__ void kernel(const int* x, int* out) {
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ int s[128];
  int t = threadIdx.x;
  if (t == 0) init(&barrier, blockDim.x);
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    s[t] = x[t] + round;
    cuda::barrier<cuda::thread_scope_block>::arrival_token token = barrier.arrive();
    int own = 3 * t;
    barrier.wait(cuda::std::move(token));
    out[round * 128 + t] = s[127 - t] + own;
    barrier.arrive_and_wait();
  }
}
extern "C" __global__ void copies(const int* x, int* out) {
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ alignas(16) int s[512];
  int t = threadIdx.x;
  if (t == 0) init(&barrier, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(s + t, x + t, sizeof(int), barrier);
  if (t < 64) cuda::memcpy_async(s + 128 + 4 * t, x + 128 + 4 * t, cuda::aligned_size_t<16>(16), barrier);
  barrier.arrive_and_wait();
  out[t] = s[127 - t];
  out[128 + t] = s[255 - t];
}
"""


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


PIPELINE = """
#include <cooperative_groups.h>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
extern "C" __global__ void kernel(const float* x, float* out, int tiles) {
  constexpr int STAGES = 2;
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
  __shared__ alignas(16) float tile[STAGES][128];
  cg::thread_block block = cg::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  float sum = 0;
  for (int step = 0; step < tiles + STAGES - 1; ++step) {
    if (step < tiles) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, tile[step % STAGES], x + step * 128, sizeof(float) * 128, pipeline);
      pipeline.producer_commit();
    }
    if (step >= STAGES - 1) {
      pipeline.consumer_wait();
      sum += tile[(step - STAGES + 1) % STAGES][127 - block.thread_rank()];
      pipeline.consumer_release();
    }
  }
  out[block.thread_rank()] = sum;
}
extern "C" __global__ void alone(const float* x, float* out) {
  __shared__ alignas(16) float tile[2][128];
  int t = threadIdx.x;
  auto pipeline = cuda::make_pipeline();
  for (int stage = 0; stage < 2; ++stage) {
    pipeline.producer_acquire();
    cuda::memcpy_async(&tile[stage][t], x + 128 * stage + t, sizeof(float), pipeline);
    pipeline.producer_commit();
  }
  cuda::pipeline_consumer_wait_prior<1>(pipeline);
  float first = tile[0][t];
  pipeline.consumer_release();
  cuda::pipeline_consumer_wait_prior<0>(pipeline);
  out[t] = 2 * first + tile[1][t];
  pipeline.consumer_release();
}
"""


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


ATOMIC = """
#include <cuda/atomic>
__device__ cuda::atomic<int, cuda::thread_scope_device> counter;
extern "C" __global__ void kernel(int* ints, float* f, double* d, unsigned long long* wide, int* order) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  cuda::atomic_ref<int, cuda::thread_scope_device> sum(ints[0]), most(ints[1]), bits(ints[2]), last(ints[3]);
  sum.fetch_add(t, cuda::memory_order_relaxed);
  most.fetch_max(t * 7 % 256);
  bits.fetch_or(1 << t % 20);
  int seen = last.load(cuda::memory_order_acquire);
  while (!last.compare_exchange_weak(seen, seen > t ? seen : t)) {}
  cuda::atomic_ref<float> single(*f);
  single.fetch_add(0.5f);
  cuda::atomic_ref<double, cuda::thread_scope_system> twice(*d);
  twice += 0.25;
  cuda::atomic_ref<unsigned long long> word(*wide);
  word.fetch_add(1ull << 32 | 1);
  order[t] = counter.fetch_add(1, cuda::memory_order_acq_rel);
  cuda::atomic_thread_fence(cuda::memory_order_seq_cst, cuda::thread_scope_device);
}
"""


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


STD = """
#include <cuda/std/array>
#include <cuda/std/bit>
#include <cuda/std/complex>
#include <cuda/std/functional>
#include <cuda/std/limits>
#include <cuda/std/span>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#include <cuda/cmath>
template <typename T, cuda::std::enable_if_t<cuda::std::is_integral_v<T>, int> = 0>
__device__ T twice(T x) { return 2 * x; }
extern "C" __global__ void kernel(int* out, float* floats) {
  cuda::std::array<int, 3> a{1, 2, 3};
  cuda::std::span<int> all(out, 8);
  auto [x, y] = cuda::std::make_tuple(5, 2.5f);
  cuda::std::complex<float> z(1.0f, 2.0f);
  z *= z;
  all[0] = a[0] + a[2];
  all[1] = twice(x);
  all[2] = cuda::std::popcount(0xF0F0u);
  all[3] = cuda::std::numeric_limits<short>::max();
  all[4] = cuda::ceil_div(17, 5);
  all[5] = cuda::std::countl_zero(1u);
  all[6] = cuda::std::bit_cast<int>(1.0f);
  all[7] = cuda::std::plus<int>{}(3, 4);
  floats[0] = y, floats[1] = z.real(), floats[2] = z.imag(), floats[3] = abs(z);
}
"""


@on_each_device
def test_the_standard_library_for_devices(cp: Any) -> None:
    out, floats = cp.zeros(8, cp.int32), cp.zeros(4, cp.float32)
    launch(cp, STD, out, floats, threads=1)
    np.testing.assert_array_equal(cp.asnumpy(out), [4, 10, 8, 32767, 4, 31, 0x3F800000, 7])
    np.testing.assert_allclose(cp.asnumpy(floats), [2.5, -3, 4, 5], rtol=1e-6)


def test_a_header_of_ones_own_may_include_them() -> None:
    """In a new folder at each run it would be another build, of 6 s."""
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
    """NVRTC refuses <cub/cub.cuh>, nvcc takes it: here it is what kernels may call."""
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
