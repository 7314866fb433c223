"""cooperative_groups: every operation against the same in NumPy, and the engine's messages for wrong use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers.device import ON_GPU, cp

BLOCK = 96
SIZES = (1, 2, 4, 8, 16, 32)

SOURCE = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

extern "C" __global__ void positions(int *out) {
  cg::thread_block block = cg::this_thread_block();
  cg::grid_group grid = cg::this_grid();
  int at = (int)grid.thread_rank(), n = (int)grid.size();
  dim3 group = block.group_index(), thread = block.thread_index(), threads = block.dim_threads();
  dim3 whole = grid.thread_index(), blocks = grid.dim_blocks(), all = grid.dim_threads();
  int row[] = {
    (int)block.thread_rank(), (int)block.size(), (int)block.num_threads(), (int)group.x, (int)group.y, (int)group.z,
    (int)thread.x, (int)thread.y, (int)thread.z, (int)threads.x, (int)threads.y, (int)threads.z, (int)grid.block_rank(),
    (int)grid.num_blocks(), (int)grid.num_threads(), (int)whole.x, (int)whole.y, (int)whole.z, (int)blocks.x,
    (int)all.y, (int)cg::group_size(block), (int)cg::this_thread().size()
  };
  for (int k = 0; k < 22; ++k) out[k * n + at] = row[k];
}

struct Wide { float a; int b[5]; };  // 24 bytes: more than one shuffle of the hardware moves

// What a tile and a coalesced group both have. Row k of the answer, for thread t.
template <typename Group>
__device__ int collectives(const Group &g, int value, int *out, int n, int t) {
  int k = 0, every = 0;
  out[k++ * n + t] = g.thread_rank();
  out[k++ * n + t] = g.size();
  out[k++ * n + t] = g.meta_group_rank();
  out[k++ * n + t] = g.meta_group_size();
  out[k++ * n + t] = g.shfl(value, g.size() - 1);
  out[k++ * n + t] = g.shfl_up(value, 1);
  out[k++ * n + t] = g.shfl_down(value, 2);
  out[k++ * n + t] = g.any(value > 90);
  out[k++ * n + t] = g.all(value > 10);
  out[k++ * n + t] = g.ballot(value & 1);
  out[k++ * n + t] = g.match_any(value % 3);
  out[k++ * n + t] = g.match_all(value / 50, every);
  out[k++ * n + t] = every;
  out[k++ * n + t] = cg::reduce(g, value, cg::plus<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::less<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::greater<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_and<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_or<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_xor<int>());
  out[k++ * n + t] = (int)cg::reduce(g, (float)value, [=](float a, float b) { return a > b ? a : b; });
  out[k++ * n + t] = cg::inclusive_scan(g, value);
  out[k++ * n + t] = cg::exclusive_scan(g, value);
  out[k++ * n + t] = cg::inclusive_scan(g, value, cg::greater<int>());
  out[k++ * n + t] = cg::exclusive_scan(g, value, cg::plus<int>());
  Wide wide = {value * 0.5f, {value, value + 1, value + 2, value + 3, value + 4}};
  Wide other = g.shfl(wide, 0);
  out[k++ * n + t] = other.b[4] + (int)(2 * other.a);
  int calls = 0;
  cg::invoke_one(g, [&](int by) { calls += by; }, 7);
  out[k++ * n + t] = calls;
  out[k++ * n + t] = cg::invoke_one_broadcast(g, [&] { return value; });
  cg::sync(g);
  return k;
}

template <int SIZE>
__global__ void tiles(const int *in, int *out, float *sums) {
  int t = threadIdx.x, n = blockDim.x;
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<SIZE> tile = cg::tiled_partition<SIZE>(block);
  int k = collectives(tile, in[t], out, n, t);
  out[k * n + t] = tile.shfl_xor(in[t], SIZE / 2);
  static_assert(decltype(tile)::size() == SIZE && decltype(tile)::num_threads() == SIZE, "known when it is compiled");
  sums[t] = cg::reduce(tile, 0.1f * in[t], cg::plus<float>());
}

// Tiles of tiles, and sizes that are known only now; each writes to memory and reads its neighbour's word after a sync.
__device__ int neighbour(const cg::thread_group &g, int value, volatile int *memory) {
  g.sync();
  memory[g.thread_rank()] = value;
  g.sync();
  return memory[(g.thread_rank() + 1) % g.size()];
}
extern "C" __global__ void partitions(const int *in, int *out, int size) {
  __shared__ int memory[256];
  int t = threadIdx.x, n = blockDim.x, k = 0;
  cg::thread_block block = cg::this_thread_block();
  auto sixteen = cg::tiled_partition<16>(block);
  auto four = cg::tiled_partition<4>(sixteen);
  out[k++ * n + t] = four.meta_group_rank();
  out[k++ * n + t] = four.meta_group_size();
  out[k++ * n + t] = four.shfl(in[t], 3);
  cg::thread_group dynamic = cg::tiled_partition(block, size);
  out[k++ * n + t] = dynamic.thread_rank();
  out[k++ * n + t] = dynamic.size();
  out[k++ * n + t] = neighbour(dynamic, in[t], memory + t / size * size);
  cg::thread_group finer = cg::tiled_partition(dynamic, 2);
  out[k++ * n + t] = finer.thread_rank();
  out[k++ * n + t] = neighbour(finer, in[t], memory + t / 2 * 2);
  out[k++ * n + t] = neighbour(block, in[t], memory);
  block.barrier_wait(block.barrier_arrive());
}

// Some lanes alone; the groups they make of themselves.
extern "C" __global__ void coalesced(const int *in, const int *takes_part, int *out, int *halves, int *labels,
                                     int *cut) {
  int t = threadIdx.x, n = blockDim.x;
  if (takes_part[t]) {
    cg::coalesced_group g = cg::coalesced_threads();
    collectives(g, in[t], out, n, t);
    collectives(cg::binary_partition(g, in[t] % 2 == 0), in[t], halves, n, t);
    collectives(cg::labeled_partition(g, in[t] % 3), in[t], labels, n, t);
    collectives(cg::tiled_partition(g, 4), in[t], cut, n, t);
  }
}

extern "C" __global__ void copies(const float *in, float *out, int count, int elements) {
  __shared__ float s[1000];
  cg::thread_block block = cg::this_thread_block();
  for (int i = threadIdx.x; i < 1000; i += blockDim.x) s[i] = -1.0f;
  block.sync();
  cg::memcpy_async(block, s, in, count * sizeof(float));
  cg::memcpy_async(block, s + 500, 400, in, elements);  // as many elements as both sides have
  cg::wait(block);
  for (int i = threadIdx.x; i < 1000; i += blockDim.x) out[i] = s[999 - i + 0];
}
"""

NAMES = {size: f"tiles<{size}>" for size in SIZES}


@functools.cache
def module() -> Any:
    return cp.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=tuple(NAMES.values()))


def scan(op: Callable[[int, int], int], values: Sequence[int]) -> list[int]:
    return [functools.reduce(op, values[: i + 1]) for i in range(len(values))]


def expected_collectives(values: Sequence[int], meta_rank: int, meta_size: int) -> np.ndarray:
    """Return what the kernel's `collectives` yields for a group of these values, (rows, size)."""
    v = [int(x) for x in values]
    n = len(v)
    match = [sum(1 << j for j in range(n) if v[j] % 3 == v[i] % 3) for i in range(n)]
    same = all(x // 50 == v[0] // 50 for x in v)
    rows: list[Any] = [
        range(n),
        n,
        meta_rank,
        meta_size,
        v[-1],
        [v[max(i - 1, 0)] for i in range(n)],
        [v[i + 2] if i + 2 < n else v[i] for i in range(n)],
        any(x > 90 for x in v),
        all(x > 10 for x in v),
        sum(1 << i for i in range(n) if v[i] & 1),
        match,
        (1 << n) - 1 if same else 0,
        same,
        sum(v),
        min(v),
        max(v),
        functools.reduce(lambda a, b: a & b, v),
        functools.reduce(lambda a, b: a | b, v),
        functools.reduce(lambda a, b: a ^ b, v),
        max(v),
        scan(lambda a, b: a + b, v),
        [0, *scan(lambda a, b: a + b, v)[:-1]],
        scan(max, v),
        [0, *scan(lambda a, b: a + b, v)[:-1]],
        2 * v[0] + 4,
        [7] + [0] * (n - 1),
        v[0],
    ]
    return np.array([np.broadcast_to(np.array(list(r) if isinstance(r, range) else r, np.int64), n) for r in rows])


def assert_rows(out: np.ndarray, expected: np.ndarray, where: str) -> None:
    got = out.astype(np.int64)
    bad = np.argwhere((got - expected) % 2**32 != 0)
    if bad.size:
        row, thread = bad[0]
        raise AssertionError(f"{where}: row {row} of thread {thread}: {got[row, thread]}, not {expected[row, thread]}")


def test_blocks_and_the_grid() -> None:
    grid, block = (3, 2, 2), (4, 3, 2)
    n_threads = 24 * 12
    out = cp.zeros((22, n_threads), np.int32)
    module().get_function("positions")(grid, block, (out,))
    rows = []
    for b in range(12):
        at = (b % 3, b // 3 % 2, b // 6)
        for t in range(24):
            me = (t % 4, t // 4 % 3, t // 12)
            whole = tuple(a * s + m for a, s, m in zip(at, block, me, strict=True))
            rows.append([t, 24, 24, *at, *me, *block, b, 12, n_threads, *whole, 3, 6, 24, 1])
    assert np.array_equal(cp.asnumpy(out).T, rows)


@pytest.mark.parametrize("size", SIZES)
def test_tiles(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 100, BLOCK).astype(np.int32)
    values[:32] += 50 * (values[:32] < 50)  # match_all holds in the first tiles
    values[:32] = np.minimum(values[:32], 99)
    out, sums = cp.zeros((28, BLOCK), np.int32), cp.zeros(BLOCK, np.float32)
    module().get_function(NAMES[size])((1,), (BLOCK,), (cp.asarray(values), out, sums))
    got, got_sums = cp.asnumpy(out), cp.asnumpy(sums)
    for rank in range(BLOCK // size):
        part = slice(rank * size, (rank + 1) * size)
        assert_rows(got[:27, part], expected_collectives(values[part], rank, BLOCK // size), f"tile {rank}")
        swapped = values[part][np.arange(size) ^ (size // 2)]
        assert_rows(got[27:, part], swapped[None].astype(np.int64), f"shfl_xor of tile {rank}")
        # Float sums round in the order of a GPU's shuffles: halves folded onto each other.
        v = np.float32(0.1) * values[part].astype(np.float32)
        while v.size > 1:
            v = v[: v.size // 2] + v[v.size // 2 :]
        assert np.all(got_sums[part] == v[0])


@pytest.mark.parametrize("size", [4, 8, 32])
def test_partitions_of_partitions(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 1000, BLOCK).astype(np.int32)
    out = cp.zeros((9, BLOCK), np.int32)
    module().get_function("partitions")((1,), (BLOCK,), (cp.asarray(values), out, np.int32(size)))
    t = np.arange(BLOCK)
    expected = [
        t % 16 // 4,
        np.full(BLOCK, 4),
        values[t // 4 * 4 + 3],
        t % size,
        np.full(BLOCK, size),
        values[t // size * size + (t + 1) % size],
        t % 2,
        values[t ^ 1],
        values[(t + 1) % BLOCK],
    ]
    assert np.array_equal(cp.asnumpy(out), expected)


def test_coalesced_groups_and_their_parts() -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 100, BLOCK).astype(np.int32)
    takes_part = (rng.random(BLOCK) < 0.6).astype(np.int32)
    takes_part[32:64] = np.arange(32) == 7  # a warp of one
    outs = [cp.zeros((27, BLOCK), np.int32) for _ in range(4)]
    module().get_function("coalesced")((1,), (BLOCK,), (cp.asarray(values), cp.asarray(takes_part), *outs))
    got = [cp.asnumpy(out) for out in outs]
    for warp in range(BLOCK // 32):
        lanes = np.flatnonzero(takes_part[warp * 32 : warp * 32 + 32]) + warp * 32
        assert_rows(got[0][:, lanes], expected_collectives(values[lanes], 0, 1), f"coalesced, warp {warp}")

        even = values[lanes] % 2 == 0
        both = even.any() and not even.all()
        for yes in (False, True):
            part = lanes[even == yes]
            if part.size:
                expected = expected_collectives(values[part], int(yes and both), 1 + int(both))
                assert_rows(got[1][:, part], expected, f"binary, warp {warp}")

        order = list(dict.fromkeys((values[lanes] % 3).tolist()))  # the label of the lowest lane comes first
        for rank, label in enumerate(order):
            part = lanes[values[lanes] % 3 == label]
            assert_rows(got[2][:, part], expected_collectives(values[part], rank, len(order)), f"labeled, warp {warp}")

        count = max((lanes.size + 3) // 4, 1)
        for rank in range(count):
            part = lanes[rank * 4 : rank * 4 + 4]
            assert_rows(got[3][:, part], expected_collectives(values[part], rank, count), f"cut, warp {warp}")
    idle = np.flatnonzero(takes_part == 0)
    assert not any(out[:, idle].any() for out in got)


@pytest.mark.parametrize(("count", "elements"), [(1, 400), (37, 90), (450, 400), (500, 1)])
def test_memcpy_async(count: int, elements: int) -> None:
    source = np.random.default_rng(6).normal(size=1000).astype(np.float32)
    out = cp.zeros(1000, np.float32)
    args = (cp.asarray(source), out, np.int32(count), np.int32(elements))
    module().get_function("copies")((1,), (64,), args)
    expected = np.full(1000, -1, np.float32)
    expected[:count] = source[:count]
    expected[500 : 500 + min(elements, 400)] = source[: min(elements, 400)]
    assert np.array_equal(cp.asnumpy(out)[::-1], expected)


WRONG = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
namespace cg = cooperative_groups;
extern "C" __global__ void whole_grid(float *x) {
  cg::grid_group grid = cg::this_grid();
  x[0] = grid.is_valid();
  grid.sync();
}
extern "C" __global__ void lonely_shuffle(float *x) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  if (threadIdx.x % 8 < 3)
    x[threadIdx.x] = tile.shfl_down(x[threadIdx.x], 1);
  else
    tile.sync();
}
extern "C" __global__ void odd_tile(float *x) {
  cg::thread_group g = cg::tiled_partition(cg::this_thread_block(), 6);
  g.sync();
}
extern "C" __global__ void no_wait(const float *x, float *out) {
  __shared__ float s[64];
  cg::thread_block block = cg::this_thread_block();
  cg::memcpy_async(block, s, x, sizeof(s));
  out[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@functools.cache
def wrong() -> Any:
    return cp.RawModule(code=WRONG)


engine_only = pytest.mark.skipif(ON_GPU, reason="the message is the engine's")


@engine_only
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whole_grid", r"kernel\.cu:8: grid\.sync\(\) needs a cooperative launch.*_groups=True.*\n.*grid\.sync"),
        ("lonely_shuffle", r"kernel\.cu:1[35]: .*(group\.shfl_down|group\.sync).*\n.*tile\.s"),
        ("odd_tile", r"kernel\.cu:18: tiled_partition\(\) takes a tile of 1, 2, 4, 8, 16 or 32.*\n.*thread_group g"),
    ],
)
def test_wrong_use_is_told_with_its_line(name: str, message: str) -> None:
    with pytest.raises(cp.LaunchError, match=message):
        wrong().get_function(name)((1,), (32,), (cp.zeros(32, np.float32),))


@engine_only
def test_a_forgotten_wait_shows() -> None:
    source, out = cp.asarray(np.arange(64, dtype=np.float32)), cp.zeros(64, np.float32)
    wrong().get_function("no_wait")((1,), (64,), (source, out))
    assert np.isnan(cp.asnumpy(out)).any()


@engine_only
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("cg::tiled_partition<48>(block).sync();", "a tile has 1, 2, 4, 8, 16, 32, 64, .* or 1024 threads"),
        ("cg::reduce(block, 1, cg::plus<int>());", r"reduce\(\) takes a tile or a coalesced group"),
        ("cg::tiled_partition<8>(cg::tiled_partition<4>(block)).sync();", "a tile is not larger than the group"),
    ],
)
def test_what_does_not_compile_says_why(statement: str, message: str) -> None:
    code = (
        "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\nnamespace cg = cooperative_groups;\n"
        'extern "C" __global__ void k(float *x) {\n  auto block = cg::this_thread_block();\n  ' + statement + "\n}\n"
    )
    with pytest.raises(cp.CompileError, match=message):
        cp.RawModule(code=code).compile()


SEVERAL_WARPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
template <int SIZE>
__global__ void tiles(const int *x, int *out) {
  __shared__ int s[1024];
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<SIZE, cg::thread_block> tile = cg::tiled_partition<SIZE>(block);
  cg::thread_block_tile<32, cg::thread_block_tile<SIZE, cg::thread_block>> warp = cg::tiled_partition<32>(tile);
  int t = threadIdx.x, n = blockDim.x;
  s[t] = x[t];
  tile.sync();
  out[t] = s[t / SIZE * SIZE + SIZE - 1 - tile.thread_rank()];
  tile.sync();
  out[n + t] = cg::reduce(tile, x[t], cg::plus<int>());
  out[2 * n + t] = cg::reduce(tile, x[t], cg::greater<int>());
  out[3 * n + t] = tile.meta_group_rank() * 10000 + tile.meta_group_size() * 100 + tile.any(x[t] == 7) * 10;
  out[3 * n + t] += tile.all(x[t] > -200) + (tile.num_threads() == SIZE) * 2 + warp.meta_group_rank() * 1000000;
  out[4 * n + t] = cg::reduce(warp, x[t], cg::plus<int>());
}
"""


@pytest.mark.parametrize(("size", "threads"), [(64, 256), (128, 256), (256, 1024), (512, 512), (64, 1024)])
def test_tiles_of_several_warps(size: int, threads: int) -> None:
    name = f"tiles<{size}>"
    x = np.random.default_rng(size).integers(-100, 100, threads).astype(np.int32)
    out = cp.zeros((5, threads), np.int32)
    kernel = cp.RawModule(code=SEVERAL_WARPS, options=("-std=c++17",), name_expressions=(name,)).get_function(name)
    kernel((1,), (threads,), (cp.asarray(x), out))
    parts, tile = x.reshape(-1, size), np.arange(threads) // size
    told = tile * 10000 + threads // size * 100 + (parts == 7).any(1)[tile] * 10 + 1 + 2
    told += np.arange(threads) % size // 32 * 1000000
    expected = [parts[:, ::-1].ravel(), parts.sum(1)[tile], parts.max(1)[tile], told]
    expected.append(x.reshape(-1, 32).sum(1).repeat(32))
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


@engine_only
def test_a_thread_that_does_not_come_to_its_tile() -> None:
    code = (
        "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
        'extern "C" __global__ void lonely(float *x) {\n'
        "  auto tile = cg::tiled_partition<64>(cg::this_thread_block());\n"
        "  if (threadIdx.x < 96) tile.sync();\n}\n"
    )
    with pytest.raises(cp.LaunchError, match=r"kernel\.cu:5: .*\n.*tile\.sync"):
        cp.RawModule(code=code).get_function("lonely")((1,), (128,), (cp.zeros(1, np.float32),))
