"""cooperative_groups: every operation against the same in NumPy, and the engine's messages for wrong use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_files import cuda_text

from helpers.device import ON_GPU, cp

BLOCK = 96
SIZES = (1, 2, 4, 8, 16, 32)

SOURCE = cuda_text("engine_groups")

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
        # Float sums are rounded in the order of a GPU's shuffles: halves are folded onto each other.
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
    takes_part[32:64] = np.arange(32) == 7  # a warp with one active lane
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

        order = list(dict.fromkeys((values[lanes] % 3).tolist()))  # the lowest lane's label comes first
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


WRONG = cuda_text("engine_groups_wrong")


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


SEVERAL_WARPS = cuda_text("engine_groups_several_warps")


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
