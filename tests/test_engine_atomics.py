"""Atomics on the CPU engine, with many blocks on the same addresses, against what every order must give."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.xray import xray

SOURCE = cuda_text("engine_atomics")
TYPES = {"int": "i4", "unsigned": "u4", "unsigned long long": "u8", "float": "f4", "double": "f8", "long long": "i8"}
WORDS = ("int", "unsigned", "unsigned long long")
OPERATIONS = {
    "add": (*WORDS, "float", "double"),
    "subtract": ("int", "unsigned"),
    **dict.fromkeys(("smallest", "largest"), (*WORDS, "long long")),
    **dict.fromkeys(("conjunction", "disjunction", "exclusive"), WORDS),
    "exchange": (*WORDS, "float"),
    "compare": WORDS,
}
NAMES = tuple(f"{operation}<{c_type}>" for operation, types in OPERATIONS.items() for c_type in types)
GRID, BLOCK = 37, 96
N = GRID * BLOCK
CASES = [(operation, c_type) for operation, types in OPERATIONS.items() if operation != "compare" for c_type in types]


def kernel(cp: Any, name: str) -> Any:
    """Return a kernel of SOURCE."""
    return compiled(cp, SOURCE, NAMES).get_function(name)


def scalar(a: Any, cp: Any) -> Any:
    return cp.asnumpy(a).reshape(-1)[0]


@on_each_device
@pytest.mark.parametrize(("operation", "c_type"), CASES)
def test_every_operation_of_every_type(cp: Any, operation: str, c_type: str) -> None:
    rng, dtype = np.random.default_rng(len(operation)), np.dtype(TYPES[c_type])
    x = rng.integers(-(2**20) if dtype.kind in "if" else 0, 2**20, N).astype(dtype)
    start = 12345
    if operation in ("conjunction", "disjunction", "exclusive"):
        ones = ~np.array(0, dtype)
        x = (
            (ones ^ (1 << rng.integers(0, 8 * dtype.itemsize - 1, N).astype(dtype)))
            if operation == "conjunction"
            else x
        )
        x[:] = x | 1 if operation == "conjunction" else x
        start = int(ones) if operation == "conjunction" else 0
    if operation == "add" and dtype.kind == "f":
        x %= 16  # so that a float's sum is exact in any order
    total, before = cp.full(1, start, dtype), cp.zeros(N, dtype)
    kernel(cp, f"{operation}<{c_type}>")((GRID,), (BLOCK,), (total, cp.asarray(x), before))
    got, befores = scalar(total, cp), cp.asnumpy(before)
    first = np.array([start], dtype)
    with np.errstate(over="ignore"):
        expected = {
            "add": lambda: np.add.reduce(np.concatenate([first, x]), dtype=dtype),
            "subtract": lambda: np.subtract(first[0], np.add.reduce(x, dtype=dtype), dtype=dtype),
            "smallest": lambda: min(first[0], x.min()),
            "largest": lambda: max(first[0], x.max()),
            "conjunction": lambda: np.bitwise_and.reduce(np.concatenate([first, x])),
            "disjunction": lambda: np.bitwise_or.reduce(x),
            "exclusive": lambda: np.bitwise_xor.reduce(x),
            "exchange": lambda: got,
        }[operation]()
    assert got == expected
    if operation == "exchange":  # every value that went in came out, except the last
        np.testing.assert_array_equal(np.sort(np.append(befores, got)), np.sort(np.append(x, first)))
    if operation in ("add", "subtract"):  # each saw another state: before + in is the next one's before
        with np.errstate(over="ignore"):
            after = befores + x if operation == "add" else befores - x
        np.testing.assert_array_equal(np.sort(np.append(after, first)), np.sort(np.append(befores, got)))
    assert (befores == first[0]).any()


@on_each_device
@pytest.mark.parametrize("down", [False, True])
def test_counters_that_wrap(cp: Any, down: bool) -> None:
    limit = 99
    total, before = cp.full(1, 40, np.uint32), cp.zeros(N, np.uint32)
    args = (total, np.uint32(limit), before, np.int32(down))
    kernel(cp, "wrap")((GRID,), (BLOCK,), args)
    expected = (40 + (-1 if down else 1) * np.arange(N + 1)) % (limit + 1)
    assert scalar(total, cp) == expected[-1]
    np.testing.assert_array_equal(np.sort(cp.asnumpy(before)), np.sort(expected[:-1]))
    for start, after in ((1000, limit if down else 0), (0, limit if down else 1)):  # beyond the limit, and zero
        total[...] = start
        kernel(cp, "wrap")((1,), (1,), args)
        assert scalar(total, cp) == after


@on_each_device
@pytest.mark.parametrize("c_type", OPERATIONS["compare"])
def test_compare_and_swap(cp: Any, c_type: str) -> None:
    total, before = cp.zeros(1, TYPES[c_type]), cp.zeros(N, TYPES[c_type])
    kernel(cp, f"compare<{c_type}>")((GRID,), (BLOCK,), (total, before))
    assert scalar(total, cp) == N
    np.testing.assert_array_equal(np.sort(cp.asnumpy(before)), np.arange(N))


@on_each_device
@pytest.mark.parametrize("shift", [-10, 0, 10])
def test_maximum_of_floats_by_their_bits(cp: Any, shift: int) -> None:
    x = (np.random.default_rng(0).standard_normal(N) + shift).astype(np.float32)
    total = cp.full(1, -np.inf, np.float32)
    kernel(cp, "float_maximum")((GRID,), (BLOCK,), (total, cp.asarray(x)))
    assert scalar(total, cp) == x.max()


@on_each_device
def test_histogram_in_shared_memory(cp: Any) -> None:
    x = np.random.default_rng(0).integers(0, 256, 50_000).astype(np.uint8)
    bins = cp.zeros(256, np.int32)
    kernel(cp, "histogram")((9,), (100,), (cp.asarray(x), np.int32(x.size), bins))
    np.testing.assert_array_equal(cp.asnumpy(bins), np.bincount(x, minlength=256))


@on_each_device
def test_a_lock_between_blocks(cp: Any) -> None:
    value, lock = cp.zeros(10, np.int32), cp.zeros(1, np.int32)
    kernel(cp, "guarded")((200,), (33,), (value, lock))
    assert (cp.asnumpy(value) == 200).all() and scalar(lock, cp) == 0


@on_each_device
def test_the_last_block_sees_what_the_others_wrote(cp: Any) -> None:
    x = np.random.default_rng(0).integers(-99, 99, N).astype(np.int32)
    partial, out = cp.zeros(GRID, np.int32), cp.zeros(1, np.int32)
    for _ in range(20):
        out[...] = 0
        kernel(cp, "last_block_sums")((GRID,), (BLOCK,), (cp.asarray(x), partial, out))
        assert scalar(out, cp) == x.sum()


FLOATS = r"""#line 1 "k.cu"
extern "C" __global__ void add_floats(float *sums, const float *in, float4 *before) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  float4 mine = make_float4(in[t], 1.0f, 0.5f, -in[t]);
  before[t] = atomicAdd((float4 *)sums, mine);
  atomicAdd((float2 *)(sums + 4), make_float2(mine.x, 2.0f));
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %2, %2};" ::"l"(sums + 8), "f"(mine.x), "f"(1.0f) : "memory");
}
extern "C" __global__ void add_rows(float *sums, int at, int plain) {
  atomicAdd((float4 *)(sums + at) + threadIdx.x, make_float4(1, 2, 3, 4));
  if (plain) sums[at + threadIdx.x] += 1.0f;
}
extern "C" __global__ void add_shared(float *sums) {
  __shared__ float4 s;
  atomicAdd(&s, make_float4(1, 2, 3, 4));
  sums[0] = s.x;
}
"""


def of_floats(cp: Any, name: str) -> Any:
    if cp is not engine and int(cp.cuda.Device().compute_capability) < 90:
        pytest.skip("atomics of several floats came with compute capability 9.0")
    return compiled(cp, FLOATS).get_function(name)


@on_each_device
def test_several_floats_at_a_time(cp: Any) -> None:
    x = (np.arange(N) % 16).astype(np.float32)
    sums, before = cp.zeros(12, np.float32), cp.zeros((N, 4), np.float32)
    of_floats(cp, "add_floats")((GRID,), (BLOCK,), (sums, cp.asarray(x), before))
    total = float(x.sum())
    np.testing.assert_array_equal(cp.asnumpy(sums), [total, N, N / 2, -total, total, 2 * N, 0, 0, total, N, N, N])
    np.testing.assert_array_equal(np.sort(cp.asnumpy(before)[:, 1]), np.arange(N))  # each saw another state


def test_several_floats_are_one_access_of_a_checked_run() -> None:
    sums = engine.zeros(1024, np.float32)
    run = of_floats(engine, "add_rows")
    report = xray(run, (3,), (64,), (sums, np.int32(0), np.int32(0)))
    report.assert_clean()
    figures = report.traffic["sums"]
    assert (figures.atomics, figures.stores, figures.written, figures.sectors) == (192, 6, 192 * 16, 6 * 16)
    np.testing.assert_array_equal(engine.asnumpy(sums)[:256], np.tile([3, 6, 9, 12], 64))
    assert report.by_line["k.cu", 9].atomics == 192


@pytest.mark.parametrize(("at", "plain", "kind"), [(0, 1, "race"), (2, 0, "misaligned"), (1000, 0, "out of bounds")])
def test_what_a_checked_run_finds_of_several_floats(at: int, plain: int, kind: str) -> None:
    report = xray(
        of_floats(engine, "add_rows"), (3,), (64,), (engine.zeros(1024, np.float32), np.int32(at), np.int32(plain))
    )
    assert {(finding.kind, finding.array) for finding in report.findings} == {(kind, "sums")}


@pytest.mark.parametrize(
    ("name", "rest", "line", "message"),
    [
        ("add_rows", (np.int32(2), np.int32(0)), 9, "misaligned address: an atomic of several floats"),
        ("add_shared", (), 14, "atomicAdd of several floats takes an address of global memory, not shared"),
    ],
)
def test_errors_of_several_floats(name: str, rest: tuple[Any, ...], line: int, message: str) -> None:
    with pytest.raises(engine.LaunchError, match=re.escape(message)) as caught:
        of_floats(engine, name)((1,), (1,), (engine.zeros(1024, np.float32), *rest))
    assert f"k.cu, line {line}" in str(caught.value) or f"k.cu:{line}" in str(caught.value)
