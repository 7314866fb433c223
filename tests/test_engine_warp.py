"""Warp-wide operations on the CPU engine: shuffles, votes, matches, reductions, lanes that diverge or have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

SOURCE = cuda_text("engine_warp")
TYPES = {"int": "i4", "unsigned": "u4", "long long": "i8", "unsigned long long": "u8", "float": "f4", "double": "f8"}
NAMES = (
    *(f"shuffle<{t}>" for t in TYPES),
    *(f"matches<{t}>" for t in TYPES),
    *(f"reductions<{t}>" for t in ("int", "unsigned")),
    *(f"block_sum<{t}>" for t in ("float", "int")),
)
BLOCK = 96


def kernel(cp: Any, name: str) -> Any:
    """Return a kernel of SOURCE."""
    return compiled(cp, SOURCE, NAMES).get_function(name)


def values(c_type: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if TYPES[c_type].startswith("f"):
        return (rng.standard_normal(n) * 10).astype(TYPES[c_type])
    return rng.integers(0 if "unsigned" in c_type else -1000, 1000, n).astype(TYPES[c_type])


def source_lane(kind: str, lane: int, argument: int, width: int) -> int:
    """Return the lane that a shuffle reads from, following CUDA's description."""
    first = lane // width * width
    if kind == "idx":
        return first + argument % width
    if kind == "up":
        return lane - argument if lane - argument >= first else lane
    if kind == "down":
        return lane + argument if lane + argument < first + width else lane
    other = lane ^ argument  # earlier groups can be read, later ones cannot
    return other if other < first + width else lane


@on_each_device
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("kind", ["idx", "up", "down", "xor"])
def test_shuffles(cp: Any, kind: str, width: int) -> None:
    x = values("int", BLOCK)
    warps = x.reshape(-1, 32)
    for argument in (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, *([33, 100, -1] if kind == "idx" else [])):
        out = cp.full(BLOCK, -9999, np.int32)
        code = ("idx", "up", "down", "xor").index(kind)
        args = (cp.asarray(x), out, np.int32(code), np.int32(argument), np.int32(width))
        kernel(cp, "shuffle<int>")((1,), (BLOCK,), args)
        lanes = [source_lane(kind, lane, argument, width) for lane in range(32)]
        np.testing.assert_array_equal(cp.asnumpy(out), warps[:, lanes].reshape(-1), err_msg=f"argument {argument}")


@on_each_device
@pytest.mark.parametrize("c_type", TYPES)
def test_shuffles_of_every_type(cp: Any, c_type: str) -> None:
    x = values(c_type, 2 * BLOCK)
    if TYPES[c_type].startswith("f"):
        x[5] = np.nan
    out = cp.zeros(x.shape, x.dtype)
    kernel(cp, f"shuffle<{c_type}>")((2,), (BLOCK,), (cp.asarray(x), out, np.int32(3), np.int32(5), np.int32(32)))
    np.testing.assert_array_equal(cp.asnumpy(out), x.reshape(-1, 32)[:, np.arange(32) ^ 5].reshape(-1))


@on_each_device
def test_each_lane_may_read_another(cp: Any) -> None:
    x, lanes = values("int", BLOCK), np.random.default_rng(3).integers(-40, 90, BLOCK).astype(np.int32)
    out = cp.zeros(BLOCK, np.int32)
    kernel(cp, "shuffle_by_lane")((1,), (BLOCK,), (cp.asarray(x), cp.asarray(lanes), out))
    expected = np.take_along_axis(x.reshape(-1, 32), lanes.reshape(-1, 32) % 32, axis=1)
    np.testing.assert_array_equal(cp.asnumpy(out), expected.reshape(-1))


def by_warp(x: np.ndarray, f: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Compute f for each warp of a block, at each of its lanes."""
    return np.concatenate(
        [np.broadcast_to(np.asarray(f(x[i : i + 32])), x[i : i + 32].shape) for i in range(0, len(x), 32)]
    )


def ballot(flags: Any) -> int:
    return sum(1 << lane for lane, flag in enumerate(flags) if flag)


@on_each_device
@pytest.mark.parametrize("threads", [32, 48, 96, 7])
def test_votes(cp: Any, threads: int) -> None:
    x = np.random.default_rng(threads).integers(0, 8, threads).astype(np.int32)
    x[:32] = np.maximum(x[:32], 1)
    out = cp.zeros((3, threads), np.uint32)
    kernel(cp, "votes")((1,), (threads,), (cp.asarray(x), out))
    got = cp.asnumpy(out)
    np.testing.assert_array_equal(got[0], by_warp(x, ballot))
    np.testing.assert_array_equal(got[1] != 0, by_warp(x, lambda w: (w > 5).any()))
    np.testing.assert_array_equal(got[2] != 0, by_warp(x, lambda w: (w > 0).all()))


@on_each_device
@pytest.mark.parametrize("c_type", TYPES)
def test_matches(cp: Any, c_type: str) -> None:
    x = values(c_type, BLOCK)
    x[:32] %= 3
    x[32:64] = 7
    out = cp.zeros((3, BLOCK), np.uint32)
    kernel(cp, f"matches<{c_type}>")((1,), (BLOCK,), (cp.asarray(x), out))
    got = cp.asnumpy(out)
    np.testing.assert_array_equal(got[0], by_warp(x, lambda w: [ballot(w == value) for value in w]))
    np.testing.assert_array_equal(got[1], by_warp(x, lambda w: 0xFFFFFFFF if (w == w[0]).all() else 0))
    np.testing.assert_array_equal(got[2], by_warp(x, lambda w: int((w == w[0]).all())))


@on_each_device
@pytest.mark.parametrize("c_type", ["int", "unsigned"])
@pytest.mark.parametrize("threads", [96, 48])
def test_reductions(cp: Any, c_type: str, threads: int) -> None:
    x = np.random.default_rng(1).integers(0, 2**32, threads).astype(np.uint32).view(TYPES[c_type])
    out, bits = cp.zeros((3, threads), x.dtype), cp.zeros((3, threads), np.uint32)
    kernel(cp, f"reductions<{c_type}>")((1,), (threads,), (cp.asarray(x), out, bits))
    with np.errstate(over="ignore"):
        for got, f in zip(cp.asnumpy(out), (np.add, np.minimum, np.maximum), strict=True):
            np.testing.assert_array_equal(got, by_warp(x, lambda w, f=f: f.reduce(w, dtype=w.dtype)))
    for got, f in zip(cp.asnumpy(bits), (np.bitwise_and, np.bitwise_or, np.bitwise_xor), strict=True):
        np.testing.assert_array_equal(got, by_warp(x.view(np.uint32), f.reduce))


@on_each_device
@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_sums_of_blocks(cp: Any, threads: int) -> None:
    for c_type in ("int", "float"):
        x = np.random.default_rng(2).integers(-50, 50, (3, threads)).astype(TYPES[c_type])
        out = cp.zeros(3, x.dtype)
        kernel(cp, f"block_sum<{c_type}>")((3,), (threads,), (cp.asarray(x), out))
        np.testing.assert_array_equal(cp.asnumpy(out), x.sum(1))


@on_each_device
def test_lanes_that_diverge(cp: Any) -> None:
    x = np.random.default_rng(0).integers(0, 100, 64).astype(np.int32)
    out = cp.zeros(64, np.int32)
    kernel(cp, "divergent")((1,), (64,), (cp.asarray(x), out))
    expected = []
    for warp in x.reshape(-1, 32):
        zero, one, two = warp[0::3], warp[1::3], warp[2::3]
        row = np.empty(32, np.int64)
        row[0::3] = warp[30] + (zero > 50).sum()
        row[1::3] = one.sum()
        row[2::3] = 2 * np.concatenate([two[:1], two[:-1]])
        expected.append(row)
    np.testing.assert_array_equal(cp.asnumpy(out), np.concatenate(expected))


@on_each_device
def test_one_shuffle_from_two_branches(cp: Any) -> None:
    x = values("int", 64)
    out = cp.zeros(64, np.int32)
    kernel(cp, "other_branch")((1,), (64,), (cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), x[np.arange(64) ^ 1] + np.where(np.arange(64) % 2, 0, 1000))


@on_each_device
@pytest.mark.parametrize("stay", [1, 2, 20, 31, 32])
def test_lanes_that_have_left_are_not_waited_for(cp: Any, stay: int) -> None:
    x = values("int", 80)  # two and a half warps
    out, masks = cp.full(80, -5, np.int32), cp.full(80, -5, np.int32)
    kernel(cp, "some_leave")((1,), (80,), (cp.asarray(x), out, masks, np.int32(stay)))
    here = np.arange(80) % 32 < stay
    sums = by_warp(x, np.cumsum)
    np.testing.assert_array_equal(cp.asnumpy(out), np.where(here, sums, -5))
    voters = by_warp(x, lambda w: ballot([1] * min(stay, len(w)))).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(cp.asnumpy(masks), np.where(here, voters, -5))


@on_each_device
@pytest.mark.parametrize("threads", [32, 256])
def test_exchange_through_shared_memory(cp: Any, threads: int) -> None:
    x = values("int", threads)
    out = cp.zeros(threads, np.int32)
    kernel(cp, "through_shared")((1,), (threads,), (cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), np.roll(x.reshape(-1, 32), -5, axis=1).reshape(-1))


def test_active_lanes() -> None:
    """On the CPU only: CUDA does not guarantee which lanes run together. In the engine those at one line meet."""
    out = engine.zeros((3, 48), np.uint32)
    kernel(engine, "active")((1,), (48,), (out,))
    lanes = np.arange(48) % 32
    for warp, size in ((slice(0, 32), 32), (slice(32, 48), 16)):
        everyone = (1 << size) - 1
        odd = ballot([lane % 2 and lane >= 5 for lane in range(size)])
        assert (out[0, warp] == everyone).all()
        expected = np.where(lanes[warp] < 5, 0b11111, np.where(lanes[warp] % 2, odd, 0))
        np.testing.assert_array_equal(out[1, warp], expected)
        assert (np.delete(out[2, warp], 7) == everyone & ~(1 << 7)).all() and out[2, warp][7] == 0
