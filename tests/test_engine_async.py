"""cp.async on the CPU engine: copies complete at their wait, not before, in groups, with zeros after the bytes read."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

COPY = r"""
extern "C" __global__ void copyBYTES(const char *in, char *out, int given) {
  __shared__ __align__(16) char s[32 * BYTES];
  int t = threadIdx.x;
  for (int i = 0; i < BYTES; ++i) s[t * BYTES + i] = 77;
  __syncthreads();
  unsigned to = (unsigned)__cvta_generic_to_shared(s + t * BYTES);
  asm volatile("cp.async.LEVEL.shared.global [%0], [%1], %2, %3;"
               :: "r"(to), "l"(in + t * BYTES), "n"(BYTES), "r"(given) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  for (int i = 0; i < BYTES; ++i) out[t * BYTES + i] = s[t * BYTES + i];
}
"""
SOURCE = cuda_text("engine_async")
SOURCE += "".join(
    COPY.replace("BYTES", str(size)).replace("LEVEL", level) for size, level in ((4, "ca"), (8, "ca"), (16, "cg"))
)


def kernel(cp: Any, name: str) -> Any:
    return compiled(cp, SOURCE).get_function(name)


@on_each_device
@pytest.mark.parametrize("size", [4, 8, 16])
def test_sizes_and_zeros(cp: Any, size: int) -> None:
    data = np.random.default_rng(size).integers(1, 127, (32, size)).astype(np.int8)
    for given in range(size + 1):
        out = cp.zeros((32, size), np.int8)
        kernel(cp, f"copy{size}")((1,), (32,), (cp.asarray(data), out, np.int32(given)))
        expected = np.where(np.arange(size) < given, data, 0)
        np.testing.assert_array_equal(cp.asnumpy(out), expected, err_msg=f"{given} bytes given")


def test_a_group_lands_when_it_is_waited_for() -> None:
    """On the CPU only: a GPU may be early. Only a late copy shows a missing wait."""
    data = np.random.default_rng(0).random((3, 32)).astype(np.float32)
    for pending in range(4):
        out = engine.zeros((3, 32), np.float32)
        kernel(engine, "groups")((1,), (32,), (engine.asarray(data), out, np.int32(pending)))
        landed = np.arange(3)[:, None] < 3 - pending
        np.testing.assert_array_equal(out, np.where(landed, data, -1))


def test_what_is_not_committed_waits_for_wait_all() -> None:
    data = np.arange(32, dtype=np.float32)
    out = engine.zeros((2, 32), np.float32)
    kernel(engine, "uncommitted")((1,), (32,), (engine.asarray(data), out))
    assert (out[0] == -1).all()
    np.testing.assert_array_equal(out[1], data)


@on_each_device
@pytest.mark.parametrize("zeros", [0, 1, 4, 16])
def test_pipeline_functions(cp: Any, zeros: int) -> None:
    data = np.random.default_rng(1).random((33, 4)).astype(np.float32)
    out = cp.zeros((2, 32, 4), np.float32)
    kernel(cp, "pipeline")((1,), (32,), (cp.asarray(data), out, np.int32(zeros)))
    expected = data[:32].copy().view(np.uint8)
    expected[:, 16 - zeros :] = 0
    later = expected.copy()
    later[:, :4] = data[32:, :1].view(np.uint8)
    got = cp.asnumpy(out).view(np.uint8)
    np.testing.assert_array_equal(got[1], later)
    if cp is engine:
        np.testing.assert_array_equal(got[0], expected)


@on_each_device
@pytest.mark.parametrize("tiles", [1, 2, 3, 8])
def test_two_tiles_in_flight(cp: Any, tiles: int) -> None:
    data = np.random.default_rng(tiles).integers(-9, 9, (tiles * 32, 32)).astype(np.float32)
    out = cp.zeros(32, np.float32)
    kernel(cp, "column_sums")((1,), (32,), (cp.asarray(data), out, np.int32(tiles)))
    np.testing.assert_array_equal(cp.asnumpy(out), data.sum(0))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('asm volatile("cp.async.wait_group 1;")', ";"),  # no wait
        ('asm volatile("cp.async.wait_group 0;")', 'asm volatile("cp.async.wait_group 1;")'),  # the last tile's
        ('asm volatile("cp.async.commit_group;");', ";"),  # no group
    ],
)
def test_a_missing_wait_is_a_wrong_result(old: str, new: str) -> None:
    begin = SOURCE.index('extern "C" __global__ void column_sums')
    code = SOURCE[begin : SOURCE.index(COPY[:20], begin)]
    assert old in code
    data = np.random.default_rng(0).integers(1, 10**5, (96, 32)).astype(np.float32)
    out = engine.zeros(32, np.float32)
    broken = engine.RawModule(code=code.replace(old, new)).get_function("column_sums")
    broken((1,), (32,), (engine.asarray(data), out, np.int32(3)))
    assert not (out == data.sum(0)).any()


# ------------------------------------------------------------------------------------ errors

BROKEN = cuda_text("engine_async_broken")


@functools.cache
def broken() -> Any:
    return engine.RawModule(code="#include <cuda_pipeline.h>\n" + BROKEN)


@pytest.mark.parametrize(
    ("name", "thread", "says"),
    [
        ("target", 1, "misaligned address: cp.async takes an address that is a multiple of 16 bytes"),
        ("source", 1, "misaligned address: cp.async reads from an address that is a multiple of its size"),
        ("not_shared", 0, "not in shared memory"),
        ("no_address", 0, "within shared memory"),
        ("wild_target", 1, "illegal write to"),
        ("wild_source", 1, "illegal read of in[100000]"),
        ("too_much", 0, "src-size is more than cp-size"),
        ("odd_pipeline", 0, "copies 4, 8 or 16 bytes"),
    ],
)
def test_errors_name_the_line(name: str, thread: int, says: str) -> None:
    with pytest.raises(engine.LaunchError, match="thread") as caught:
        broken().get_function(name)((1,), (32,), (engine.zeros(256, np.float32),))
    message = str(caught.value)
    assert says in message and f"thread ({thread},0,0)" in message, message
    line = next(i for i, text in enumerate(BROKEN.splitlines(), 2) if f"void {name}(" in text) + 2
    assert f"kernel.cu:{line}" in message or f"kernel.cu:{line - 1}" in message, message


def test_wrong_sizes_are_compile_errors() -> None:
    code = r"""extern "C" __global__ void k(const char *in) {
  __shared__ char s[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 12;" :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(in));
}"""
    with pytest.raises(engine.CompileError, match="4, 8 or 16 bytes"):
        engine.RawModule(code=code).compile()
