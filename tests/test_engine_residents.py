"""Blocks that wait for each other: grid.sync() in a cooperative launch, and polling memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from backends import on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import limits
from helpers.xray import xray

GRID = cuda_text("engine_residents_grid")

LOOKING = cuda_text("engine_residents_looking")


@functools.cache
def grid_module(cp: Any) -> Any:
    return cp.RawModule(code=GRID, options=("-std=c++17",), enable_cooperative_groups=True)


@functools.cache
def looking_module(cp: Any) -> Any:
    return cp.RawModule(code=LOOKING, options=("-std=c++17",))


def smoothed(x: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    total = np.zeros_like(x)
    for _ in range(steps):
        both = np.roll(x, -1) + np.roll(x, 1)
        total, x = total + both, both * np.float32(0.5)
    return x, total


@on_each_device
@pytest.mark.parametrize(
    ("blocks", "threads", "steps"), [(1, 32, 3), (2, 64, 40), (7, 100, 5), (40, 256, 3), ((4, 3, 2), 33, 4)]
)
def test_blocks_that_meet_in_grid_sync(cp: Any, blocks: Any, threads: int, steps: int) -> None:
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    x = np.random.default_rng(3).normal(size=int(np.prod(grid)) * threads).astype(np.float32)
    a, b = cp.asarray(x), cp.zeros(x.size, np.float32)
    kernel = grid_module(cp).get_function("smooth")
    for _ in range(2):
        a[...] = cp.asarray(x)
        kernel(grid, (threads,), (a, b, np.int32(steps)), shared_mem=4 * threads)
        expected, total = smoothed(x, steps)
        np.testing.assert_array_equal(cp.asnumpy(a), expected)
        np.testing.assert_array_equal(cp.asnumpy(b), total)


@on_each_device
def test_a_cooperative_launch_knows_that_it_is_one(cp: Any) -> None:
    out = cp.zeros(1, np.int32)
    grid_module(cp).get_function("valid")((2,), (32,), (out,))
    assert cp.asnumpy(out)[0] == 1
    cp.RawModule(code=GRID, options=("-std=c++17",)).get_function("valid")((2,), (32,), (out,))
    assert cp is not engine or cp.asnumpy(out)[0] == 0  # an H200 returns 1 for every launch, with CUDA 13's headers
    kernel = cp.RawKernel(GRID, "valid", options=("-std=c++17",), enable_cooperative_groups=True)
    kernel((2,), (32,), (out,))
    assert cp.asnumpy(out)[0] == 1 and kernel.enable_cooperative_groups


@on_each_device
def test_threads_that_have_left_are_not_waited_for(cp: Any) -> None:
    count, out = cp.zeros(1, np.int32), cp.zeros(6, np.int32)
    grid_module(cp).get_function("some_threads_leave")((6,), (64,), (count, out))
    assert cp.asnumpy(out).tolist() == [240] * 6


@on_each_device
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (8, 64), (30, 32)])
def test_a_chain_of_blocks(cp: Any, blocks: int, threads: int) -> None:
    flag, out = cp.zeros(blocks, np.int32), cp.zeros(blocks * threads, np.int32)
    looking_module(cp).get_function("chain")((blocks,), (threads,), (flag, out))
    np.testing.assert_array_equal(cp.asnumpy(out), np.repeat(np.arange(blocks, 0, -1), threads))


@on_each_device
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (4, 128), (50, 64)])
def test_a_barrier_of_the_grid_by_hand(cp: Any, blocks: int, threads: int) -> None:
    n = blocks * threads
    x = np.random.default_rng(4).integers(0, 1000, n, dtype=np.int32)
    count, out = cp.zeros(1, np.int32), cp.zeros(2 * n, np.int32)
    looking_module(cp).get_function("meet")((blocks,), (threads,), (count, cp.asarray(x), out))
    np.testing.assert_array_equal(cp.asnumpy(out), np.concatenate([x, x[::-1]]))


@on_each_device
@pytest.mark.parametrize(("name", "blocks", "expected"), [("locked", 6, 36), ("polite", 3, 192), ("within", 3, 1344)])
def test_threads_that_wait_for_others(cp: Any, name: str, blocks: int, expected: int) -> None:
    flag, out = cp.zeros(16, np.int32), cp.zeros(256, np.int32)
    looking_module(cp).get_function(name)((blocks,), (64,), (flag, out))
    assert int(cp.asnumpy(out).sum()) == expected


# ---------------------------------------------------------------- the X-ray's view


def test_grid_sync_orders_accesses_for_the_xray() -> None:
    x = engine.asarray(np.random.default_rng(5).normal(size=192).astype(np.float32))
    expected, total = smoothed(np.array(x), 3)

    def look(code: str) -> Any:
        a, b = x.copy(), engine.full(192, np.nan, dtype=np.float32)
        kernel = engine.RawKernel(code, "smooth", enable_cooperative_groups=True)
        report = xray(kernel, (6,), (32,), (a, b, np.int32(3)), 128)
        return report, np.array(a), np.array(b)

    report, a, b = look(GRID)
    assert report.clean, report
    assert report.barriers == 6 * 3 * 2 * 2, "a block meets twice in each grid.sync()"
    np.testing.assert_array_equal(a, expected)
    np.testing.assert_array_equal(b, total)
    for missing in ("    grid.sync();  // before a is written\n", "    cg::sync(grid);  // before a is read\n"):
        assert missing in GRID
        report, _, _ = look(GRID.replace(missing, "    __syncthreads();\n"))
        assert {(f.kind, f.array) for f in report.findings} == {("race", "a")}, report
        assert any(f.block != f.other_block for f in report.findings)


@pytest.mark.parametrize(("name", "blocks"), [("chain", 12), ("meet", 12), ("locked", 6), ("polite", 3), ("within", 1)])
def test_the_xray_follows_blocks_that_wait_for_each_other(name: str, blocks: int) -> None:
    flag, x, out = engine.zeros(16, np.int32), engine.zeros(1024, np.int32), engine.zeros(2048, np.int32)
    args = (flag, x, out) if name == "meet" else (flag, out)
    report = xray(looking_module(engine).get_function(name), (blocks,), (64,), args)
    assert report.clean, report


def test_the_xray_finds_a_missing_fence_between_waiting_blocks() -> None:
    code = LOOKING.replace("    __threadfence();\n    atomicAdd(count, 1);", "    atomicAdd(count, 1);")
    code = code.replace("((volatile int *)out)[n - 1 - i]", "out[n - 1 - i]")
    assert code.count("__threadfence") == LOOKING.count("__threadfence") - 1
    count, x, out = engine.zeros(1, np.int32), engine.zeros(256, np.int32), engine.zeros(512, np.int32)
    report = xray(engine.RawModule(code=code).get_function("meet"), (4,), (64,), (count, x, out))
    assert {(f.kind, f.array) for f in report.findings} == {("race", "out")}, report


# ---------------------------------------------------------------- what cannot work, with its message

WRONG = cuda_text("engine_residents_wrong")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one_block_ends", "deadlock: 5 blocks wait in grid.sync() at kernel.cu:7, but 1 have ended without it"),
        ("thread_0_leaves", "thread (0,0,0) of the block has left the kernel, and in grid.sync() it speaks for its"),
        ("one_fails", "a[65536], which has 64 elements"),
        ("for_ever", "was still running when its time was up: an endless loop, or a wait for something that"),
        ("for_nobody", "was still running when its time was up"),
    ],
)
@pytest.mark.parametrize("looks", [False, True], ids=["launch", "xray"])
def test_waits_that_never_end(name: str, says: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.5")
    module = engine.RawModule(code=WRONG, enable_cooperative_groups=True)
    line = next(n for n, text in enumerate(WRONG.splitlines(), 1) if text.endswith(f"// {name}"))
    a = engine.zeros(64, np.int32)
    if looks:
        findings = xray(module.get_function(name), (6,), (64,), (a,), timeout=0.5).findings
        assert line in {f.line for f in findings}, findings
    else:
        with pytest.raises(engine.LaunchError) as caught:
            module.get_function(name)((6,), (64,), (a,))
        assert says in str(caught.value) and f"kernel.cu:{line}" in str(caught.value)
    module.get_function("good")((6,), (64,), (a,))
    np.testing.assert_array_equal(a, np.arange(64))


def test_a_grid_that_does_not_fit() -> None:
    kernel = engine.RawKernel(WRONG, "good", enable_cooperative_groups=True)
    a = engine.zeros(1024, np.int32)
    with pytest.raises(
        engine.LaunchError, match=r"all its blocks on the GPU at once: 300 blocks of 1,024 threads.*264 of"
    ):
        kernel((300,), (1024,), (a,))
    with pytest.raises(engine.LaunchError, match="all its blocks on the GPU at once"):
        xray(kernel, (300,), (1024,), (a,))
    plain = engine.RawModule(code=WRONG).get_function("good")
    with pytest.raises(engine.LaunchError, match=r"grid\.sync\(\) needs a cooperative launch"):
        plain((2,), (64,), (a,))
    plain((2,), (64,), (a,), enable_cooperative_groups=True)
    assert limits.blocks_on_gpu(128, 0) == 132 * 16 and limits.blocks_on_gpu(64, 100 * 1024) == 132 * 2
    assert limits.blocks_at_once(1024, 0) >= 1 and limits.most_threads() >= 1024
