"""Thread-block clusters on the CPU engine: barriers, each other's shared memory, copies to several blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import assert_clean, compiled, on_each_device
from cuda_files import cuda_text
from hopper_tiles import HEAD, OPTIONS, halves, map_of

from helpers import engine

GROUPS = "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
PEERS = r"""
__device__ __forceinline__ unsigned rank_of_block() {
  unsigned r;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ unsigned of_peer(const void *p, unsigned rank) {
  unsigned d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(at(p)), "r"(rank));
  return d;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_at(unsigned b) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(b) : "memory");
}
__device__ __forceinline__ void wait_cluster(const void *b, int parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@p bra done;\nbra again;\ndone:\n}" :: "r"(at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load_to_all(
    const void *to, const TensorMap &map, const void *b, int x, int y, int mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(at(to)), "l"(&map), "r"(at(b)), "r"(x), "r"(y), "h"((unsigned short)mask) : "memory");
}
"""

PLACES = GROUPS + cuda_text("engine_clusters_places")


@on_each_device
def test_a_blocks_place_in_its_cluster(cp: Any) -> None:
    out = cp.zeros(19 * 24 + 1, np.int32)
    compiled(cp, PLACES).get_function("places")((4, 6), (32,), (out,))
    got = cp.asnumpy(out)
    for y in range(6):
        for x in range(4):
            rank, cluster = y % 3 * 2 + x % 2, (x // 2, y // 3)
            index, sizes = (x % 2, y % 3), (2, 3)
            expected = [rank, 6, *index, *sizes, 192, rank, 6, *index, *sizes, *cluster, 2, 2, 4]
            expected.append(cluster[1] * 2 + cluster[0])
            assert got[19 * (4 * y + x) :][:19].tolist() == expected
    assert got[-1] == 4 * sum(32 * rank + 31 for rank in range(6))


HISTOGRAM = (
    GROUPS
    + r"""
// As in CUDA's programming guide: the bins of a histogram over the shared memory of a cluster.
template <int BLOCKS>
__global__ void __cluster_dims__(BLOCKS, 1, 1) histogram(const int *in, int n, int *bins, int each) {
  extern __shared__ int own[];
  cg::cluster_group cluster = cg::this_cluster();
  for (int i = threadIdx.x; i < each; i += blockDim.x) own[i] = 0;
  cluster.sync();
  for (int i = cg::this_grid().thread_rank(); i < n; i += cg::this_grid().size()) {
    int *there = cluster.map_shared_rank(own, in[i] / each);
    atomicAdd(there + in[i] % each, 1);
  }
  cluster.sync();
  for (int i = threadIdx.x; i < each; i += blockDim.x) atomicAdd(&bins[cluster.block_rank() * each + i], own[i]);
}
"""
)


@on_each_device
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_a_histogram_in_distributed_shared_memory(cp: Any, blocks: int) -> None:
    numbers = np.random.default_rng(blocks).integers(0, 24 * blocks, 3000).astype(np.int32)
    name = f"histogram<{blocks}>"
    kernel = compiled(cp, HISTOGRAM, names=tuple(f"histogram<{n}>" for n in (1, 2, 4, 8))).get_function(name)
    bins = cp.zeros(24 * blocks, np.int32)
    launch = (2 * blocks,), (64,), (cp.asarray(numbers), np.int32(numbers.size), bins, np.int32(24))
    kernel(*launch, shared_mem=96)
    np.testing.assert_array_equal(cp.asnumpy(bins), np.bincount(numbers, minlength=24 * blocks))
    if cp is engine:
        assert_clean(kernel, *launch, 96)


SUMS = (
    HEAD
    + PEERS
    + r"""
// Each block sums its part; the first one collects the sums, by one of three ways.
extern "C" __global__ void __cluster_dims__(4) sums(const float *in, float *out, int way) {
  __shared__ float own, all[4];
  __shared__ unsigned long long bar;
  const int t = threadIdx.x, rank = rank_of_block();
  if (t == 0) init(&bar, way == 1 ? 4 : 1), init_fence();
  float sum = in[32 * blockIdx.x + t];
  for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
  if (t == 0) own = sum;
  cluster_sync();
  if (way == 0 && t < 4 && rank == 0) {  // read from the peers
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(sum) : "r"(of_peer(&own, t)) : "memory");
    all[t] = sum;
  }
  if (way == 1 && t == 0) {  // write to the first block, and arrive at its mbarrier
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(of_peer(&all[rank], 0)), "f"(sum) : "memory");
    arrive_at(of_peer(&bar, 0));
  }
  if (way == 2 && t == 0) {  // the same, and the bytes arrive there
    if (rank == 0) expect(&bar, 16);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 :: "r"(of_peer(&all[rank], 0)), "f"(sum), "r"(of_peer(&bar, 0)) : "memory");
  }
  if (rank == 0) {
    if (way) wait_cluster(&bar, 0);
    __syncthreads();
    if (t == 0) out[blockIdx.x / 4] = all[0] + all[1] + all[2] + all[3];
  }
  cluster_sync();
}
"""
)


@on_each_device
@pytest.mark.parametrize("way", ["loads", "remote arrivals", "st.async"])
def test_a_sum_over_a_cluster(cp: Any, way: str) -> None:
    numbers = np.random.default_rng(3).integers(0, 100, 3 * 4 * 32).astype(np.float32)
    kernel = compiled(cp, SUMS, options=OPTIONS).get_function("sums")
    out = cp.zeros(3, np.float32)
    number = np.int32(["loads", "remote arrivals", "st.async"].index(way))
    launch = (12,), (32,), (cp.asarray(numbers), out, number)
    kernel(*launch)
    np.testing.assert_array_equal(cp.asnumpy(out), numbers.reshape(3, -1).sum(1))
    if cp is engine:
        assert_clean(kernel, *launch)


RELAXED = (
    HEAD
    + PEERS
    + r"""
__device__ __forceinline__ void meet_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// The mbarriers are initialised before their fence: the arrival behind it need not release anything.
extern "C" __global__ void __cluster_dims__(2) initialised(float *out) {
  __shared__ unsigned long long ready;
  __shared__ float row[32];
  const int t = threadIdx.x, rank = rank_of_block();
  if (t == 0) init(&ready, 32), init_fence();
  meet_relaxed();
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(of_peer(&row[t], rank ^ 1)), "f"(100.f * rank + t) : "memory");
  arrive_at(of_peer(&ready, rank ^ 1));
  wait_cluster(&ready, 0);
  out[32 * rank + t] = row[31 - t];
  cluster_sync();
}
// A fence of all memory releases what was written before it.
extern "C" __global__ void __cluster_dims__(2) fenced(float *out) {
  __shared__ float row[32];
  const int t = threadIdx.x, rank = rank_of_block();
  row[t] = 100 * (rank ^ 1) + t;
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
  meet_relaxed();
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(of_peer(&row[31 - t], rank ^ 1)) : "memory");
  out[32 * (rank ^ 1) + t] = x;
  cluster_sync();
}
"""
)


@on_each_device
@pytest.mark.parametrize("name", ["initialised", "fenced"])
def test_what_a_relaxed_arrival_may_stand_behind(cp: Any, name: str) -> None:
    """CUTLASS arrives like this after its fence of mbarriers; tests/planted/clusters has both without their fences."""
    kernel = compiled(cp, RELAXED, options=OPTIONS).get_function(name)
    out = cp.zeros(64, np.float32)
    kernel((2,), (32,), (out,))
    row = np.arange(31, -1, -1)
    np.testing.assert_array_equal(cp.asnumpy(out).reshape(2, 32), [100 + row, row])
    if cp is engine:
        assert_clean(kernel, (2,), (32,), (out,))


COPIES = (
    HEAD
    + PEERS
    + r"""
// Two rows of a tensor, each to the blocks of a mask, then from each block to the next one.
extern "C" __global__ void __cluster_dims__(4, 1, 1) copies(MAP map, unsigned short *out, int mask, int other) {
  __shared__ __align__(128) unsigned short s[2][64], next[64];
  __shared__ unsigned long long bar, there;
  const int t = threadIdx.x, rank = rank_of_block();
  if (t == 0) init(&bar, 1), init(&there, 1), init_fence();
  s[0][t] = s[1][t] = 7;
  proxy_fence();
  cluster_sync();
  if (t == 0) {
    expect(&bar, 128 * ((mask >> rank & 1) + (other >> rank & 1)));
    expect(&there, 128);
    if (rank == 0) load_to_all(s[0], map, &bar, 0, 2, mask);
    if (rank == 3) load_to_all(s[1], map, &bar, 0, 5, other);
  }
  wait(&bar, 0);
  __syncthreads();
  if (t == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                 :: "r"(of_peer(next, (rank + 1) % 4)), "r"(at(s[0])), "r"(of_peer(&there, (rank + 1) % 4)) : "memory");
  wait_cluster(&there, 0);
  for (int i = 0; i < 2; ++i) out[(3 * blockIdx.x + i) * 64 + t] = s[i][t];
  out[(3 * blockIdx.x + 2) * 64 + t] = next[t];
  cluster_sync();
}
"""
)


@on_each_device
@pytest.mark.parametrize(("mask", "other"), [(0b1111, 0b1111), (0b0110, 0b1000), (0b1011, 0b0001)])
def test_copies_to_several_blocks(cp: Any, mask: int, other: int) -> None:
    """Each block of the mask gets the bytes at the same place, and its own mbarrier counts them."""
    rows = np.random.default_rng(4).integers(0, 2**16, (8, 64)).astype(np.uint16)
    device_rows = cp.asarray(rows)
    kernel = compiled(cp, COPIES, options=OPTIONS).get_function("copies")
    out = cp.zeros((8, 3, 64), np.uint16)
    launch = (8,), (64,), (map_of(device_rows, (64, 1), 0), out, np.int32(mask), np.int32(other))
    kernel(*launch)
    got = cp.asnumpy(out)
    for block in range(8):
        first = rows[2] if mask >> block % 4 & 1 else 7
        np.testing.assert_array_equal(got[block, 0], first)
        np.testing.assert_array_equal(got[block, 1], rows[5] if other >> block % 4 & 1 else 7)
        np.testing.assert_array_equal(got[block // 4 * 4 + (block + 1) % 4, 2], first)
    if cp is engine:
        assert_clean(kernel, *launch)


MATMUL = (
    HEAD
    + PEERS
    + r"""
// C = A B^T, 64 rows and 8 columns a block. The two blocks of a cluster have the same tile of B: each loads half of it
// for both.
extern "C" __global__ void __cluster_dims__(1, 2, 1) __launch_bounds__(160)
matmul(MAP a, MAP b, float *c, int n, int k) {
  extern __shared__ __align__(1024) char tiles[];
  __half *A = (__half *)tiles, *B = (__half *)(tiles + 2 * 8192);  // two stages
  __shared__ unsigned long long full[2], empty[2];
  const int t = threadIdx.x, rank = rank_of_block();
  if (t == 0) {
    for (int i = 0; i < 2; ++i) init(&full[i], 1), init(&empty[i], 2);  // a warpgroup of each block
    init_fence();
  }
  cluster_sync();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < k / 64; ++i) {
        const int stage = i % 2;
        if (i >= 2) wait_cluster(&empty[stage], (i / 2 - 1) & 1);
        expect(&full[stage], 8192 + 1024);
        load(A + stage * 64 * 64, a, &full[stage], i * 64, blockIdx.y * 64);
        __half *const mine = B + stage * 8 * 64 + rank * 4 * 64;
        load_to_all(mine, b, &full[stage], i * 64, blockIdx.x * 8 + rank * 4, 3);
      }
  } else {
    float d[4] = {};
    for (int i = 0; i < k / 64; ++i) {
      const int stage = i % 2;
      wait_cluster(&full[stage], i / 2 & 1);
      wg_fence();
      for (int step = 0; step < 128; step += 32)
        multiply(d, tile(A + stage * 64 * 64, step), tile(B + stage * 8 * 64, step), i + step > 0);
      wg_commit();
      wg_wait<0>();
      if (t < 2) arrive_at(of_peer(&empty[stage], t));
    }
    const int row = blockIdx.y * 64 + t / 32 * 16 + t % 32 / 4, column = blockIdx.x * 8 + t % 4 * 2;
    for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * n + column + i % 2] = d[i];
  }
  cluster_sync();
}
"""
)


@on_each_device
def test_two_blocks_share_tiles_by_multicast(cp: Any) -> None:
    m, n, k = 256, 16, 320
    a, b = halves(m, k, seed=1, cp=cp), halves(n, k, seed=2, cp=cp)
    c = cp.zeros((m, n), np.float32)
    kernel = compiled(cp, MATMUL, options=OPTIONS).get_function("matmul")
    args = map_of(a, (64, 64)), map_of(b, (64, 4)), c, np.int32(n), np.int32(k)
    kernel((n // 8, m // 64), (160,), args, shared_mem=2 * (8192 + 1024))
    expected = cp.asnumpy(a).astype(float) @ cp.asnumpy(b).astype(float).T
    np.testing.assert_allclose(cp.asnumpy(c), expected, rtol=1e-4, atol=1e-3)
    if cp is engine:
        assert_clean(kernel, (n // 8, m // 64), (160,), args, 2 * (8192 + 1024))


REFUSED = (
    HEAD
    + PEERS
    + GROUPS
    + r"""
#line 1 "refused.cu"
#define KERNEL extern "C" __global__ void __cluster_dims__(2, 1, 1)
KERNEL fine(int *out) { out[blockIdx.x] = 1; }
extern "C" __global__ void __cluster_dims__(3, 3, 1) too_large(int *out) { out[blockIdx.x] = 1; }
KERNEL rank_too_large(int *out) {
  __shared__ int own;
  out[0] = *cg::this_cluster().map_shared_rank(&own, 2);  // rank_too_large
}
KERNEL no_shared_memory(int *out) {
  out[0] = *cg::this_cluster().map_shared_rank(out, 1);  // no_shared_memory
}
KERNEL waits_without_arriving(int *out) {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // waits_without_arriving
}
KERNEL arrives_twice(int *out) {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");  // arrives_twice
}
KERNEL waits_for_the_others_mbarrier(int *out) {
  __shared__ unsigned long long bar;
  if (threadIdx.x == 0) init(&bar, 1);
  cg::this_cluster().sync();
  unsigned long long *const there = cg::this_cluster().map_shared_rank(&bar, 1 - (int)rank_of_block());
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.b64 p, [%0], 0;\n}" :: "l"(there));  // waits_for_the_others
}
KERNEL reads_after_the_other_has_left(int *out) {
  __shared__ int own;
  own = 3;
  cg::this_cluster().sync();
  if (rank_of_block() == 1)
    for (int i = 0; i < 100; ++i) __nanosleep(100);
  if (rank_of_block() == 1) out[0] = *cg::this_cluster().map_shared_rank(&own, 0);  // reads_after
}
KERNEL never_meets(int *out) {
  __shared__ unsigned long long bar;
  if (threadIdx.x == 0) init(&bar, 1);
  cg::this_cluster().sync();
  if (rank_of_block() == 0) wait(&bar, 0);  // never_meets
  cg::this_cluster().sync();                // there
}
"""
)


def line_of(mark: str) -> int:
    own = REFUSED.partition('#line 1 "refused.cu"\n')[2]
    return next(number for number, text in enumerate(own.splitlines(), 1) if f"// {mark}" in text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rank_too_large", "cluster.map_shared_rank: block rank 2, and the cluster has 2"),
        ("no_shared_memory", "is not in shared memory"),
        ("waits_without_arriving", "barrier.cluster.wait: the thread has not arrived before"),
        ("arrives_twice", "barrier.cluster.arrive: the thread has arrived already"),
        ("waits_for_the_others_mbarrier", "a thread can wait for an mbarrier of its own block alone"),
        ("reads_after_the_other_has_left", "illegal read"),
        ("never_meets", "deadlock: thread (0,0,0) waits at refused.cu:"),
    ],
)
def test_mistakes_stop_the_launch_at_their_line(name: str, says: str) -> None:
    kernel = compiled(engine, REFUSED, options=OPTIONS).get_function(name)
    with pytest.raises(engine.LaunchError) as caught:
        kernel((2,), (32,), (engine.zeros(2, np.int32),))
    assert says in str(caught.value), caught.value
    mark = {"waits_for_the_others_mbarrier": "waits_for_the_others", "reads_after_the_other_has_left": "reads_after"}
    assert caught.value.line == line_of(mark.get(name, name)), caught.value


def test_a_deadlock_names_the_cluster_and_its_blocks() -> None:
    kernel = compiled(engine, REFUSED, options=OPTIONS).get_function("never_meets")
    with pytest.raises(engine.LaunchError) as caught:
        kernel((2,), (32,), (engine.zeros(2, np.int32),))
    assert caught.value.block == (0, 0, 0)
    assert "mbarrier bar, phase 0 (parity 0): the one arrival of a phase is missing" in caught.value.waits
    stuck = compiled(engine, STUCK, options=OPTIONS).get_function("stuck")
    with pytest.raises(engine.LaunchError) as caught:
        stuck((2,), (96,), ())
    assert "waits for barrier.cluster: 96 of the 192 threads that the cluster still has have come" in caught.value.waits
    assert "warp 0 of block 0 of the cluster, which waits for bar.sync 3" in caught.value.waits


STUCK = (
    HEAD
    + GROUPS
    + r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) stuck() {
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < (cluster.block_rank() ? 64 : 32)) asm volatile("bar.sync 3, 96;" ::: "memory");
  cluster.sync();
}
"""
)


@pytest.mark.parametrize(
    ("name", "grid", "says"),
    [
        ("fine", (3,), "grid.x = 3 is not a multiple of 2, the size of fine's clusters along x"),
        ("too_large", (3, 3), "9 blocks: a GPU takes clusters of 1 to 8"),
    ],
)
def test_launches_that_a_gpu_refuses(name: str, grid: tuple[int, ...], says: str) -> None:
    with pytest.raises(engine.LaunchError, match="__cluster_dims__") as caught:
        compiled(engine, REFUSED, options=OPTIONS).get_function(name)(grid, (32,), (engine.zeros(9, np.int32),))
    assert says in str(caught.value)


def test_a_cooperative_launch_of_clusters_is_refused() -> None:
    kernel = compiled(engine, REFUSED, options=OPTIONS).get_function("fine")
    with pytest.raises(engine.LaunchError, match="does not support cooperative launches of clusters"):
        kernel((2,), (32,), (engine.zeros(2, np.int32),), enable_cooperative_groups=True)


READS = r"""
extern "C" __global__ void DIMS reads(int *x) {
  __shared__ int s[1];
  int v = 0;
  if (threadIdx.x == 0) s[0] = 5;
  __syncthreads();
  if (threadIdx.x == 32 || threadIdx.x == 64) v = s[0];
  __syncthreads();
  if (threadIdx.x == 0) v = s[0];
  if (threadIdx.x == 96) s[0] = s[0] + 1;
  x[blockIdx.x * 128 + threadIdx.x] = v;
}
extern "C" __global__ void DIMS two_warps(int *x) {
  int v = 0;
  if (threadIdx.x % 32 == 0) v = x[0];
  if (threadIdx.x == 32) x[0] = v + 1;
  x[1 + blockIdx.x * 64 + threadIdx.x] = v;
}
"""


@pytest.mark.parametrize("dims", ["", "__cluster_dims__(2, 1, 1)"])
def test_reads_before_a_barrier_hide_no_race(dims: str) -> None:
    module = engine.RawModule(code=READS.replace("DIMS", dims))
    found = engine.xray.xray(module.get_function("reads"), (2,), (128,), (engine.zeros(256, np.int32),)).findings
    assert [(f.kind, f.thread) for f in found] == [("race", (96, 0, 0))]


def test_a_cluster_leaves_nothing_behind_that_hides_the_next_launchs_race() -> None:
    in_cluster = engine.RawModule(code=READS.replace("DIMS", "__cluster_dims__(2, 1, 1)")).get_function("reads")
    engine.xray.xray(in_cluster, (2,), (128,), (engine.zeros(256, np.int32),))
    kernel = engine.RawModule(code=READS.replace("DIMS", "")).get_function("two_warps")
    (found,) = engine.xray.xray(kernel, (1,), (64,), (engine.zeros(99, np.int32),)).findings
    assert (found.kind, found.thread, found.other_thread) == ("race", (32, 0, 0), (0, 0, 0))


FAR = r"""
extern "C" __global__ void far(int *x, unsigned bytes) {
  __shared__ unsigned long long b;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&b);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at + bytes) : "memory");
}
"""


def test_an_arrival_far_from_every_mbarrier_is_an_illegal_read() -> None:
    kernel = engine.RawKernel(FAR, "far")
    with pytest.raises(engine.LaunchError, match="illegal read of byte 524288 of __shared__ b"):
        kernel((1,), (32,), (engine.zeros(9, np.int32), np.uint32(1 << 19)))
