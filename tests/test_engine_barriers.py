"""Barriers wait for the threads that have not left the kernel, as on GPUs since Volta (sm_70)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.xray import xray

LEAVING = cuda_text("engine_barriers_leaving")


def kernel(cp: Any, name: str) -> Any:
    return compiled(cp, LEAVING).get_function(name)


@on_each_device
@pytest.mark.parametrize(("threads", "n"), [(64, 64), (64, 40), (160, 64), (256, 100), (128, 1), (50, 33)])
def test_threads_that_return_before_barriers(cp: Any, threads: int, n: int) -> None:
    x = np.random.default_rng(1).integers(0, 100, 256, dtype=np.int32)
    out = cp.zeros(256, np.int32)
    kernel(cp, "reversed")((3,), (threads,), (cp.asarray(x), out, np.int32(n)))
    expected = np.zeros(256, np.int32)
    expected[:n] = 2 * x[n - 1 :: -1][:n] + 2 * x[:n]
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


@on_each_device
@pytest.mark.parametrize("n", [1, 31, 32, 33, 63])
def test_what_threads_wrote_before_they_left_is_seen_behind_the_barrier(cp: Any, n: int) -> None:
    out = cp.zeros(64, np.int32)
    kernel(cp, "first_threads_leave")((1,), (64,), (out, np.int32(n)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.where(np.arange(64) < n, 0, 42))


@on_each_device
@pytest.mark.parametrize("n", [1, 32, 50, 90, 96])
def test_barriers_that_count_count_those_who_are_there(cp: Any, n: int) -> None:
    for x in (np.arange(96) % 7, np.full(96, 5), np.zeros(96)):
        out = cp.zeros(768, np.int32)
        kernel(cp, "folds")((1,), (96,), (cp.asarray(x.astype(np.int32)), out, np.int32(n)))
        got, there = cp.asnumpy(out).reshape(3, 256)[:, :n], x[:n] > 3
        np.testing.assert_array_equal(got[0], there.sum())
        np.testing.assert_array_equal(got[1] != 0, there.all())
        np.testing.assert_array_equal(got[2] != 0, there.any())


@on_each_device
def test_a_barrier_in_a_loop_of_uneven_length(cp: Any) -> None:
    out = cp.zeros(64, np.int32)
    kernel(cp, "uneven_loop")((1,), (64,), (cp.ones(100, np.int32), out, np.int32(100)))
    np.testing.assert_array_equal(cp.asnumpy(out), 1)


@on_each_device
def test_numbered_barriers_count_warps(cp: Any) -> None:
    """Lanes that have left count with their warp, because bar.sync counts warps."""
    t = np.arange(64)
    out = cp.full(64, -1, np.int32)
    kernel(cp, "numbered")((1,), (96,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.where(t % 32 < 20, t ^ 32, -1))
    kernel(cp, "late_exit")((1,), (64,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.where(t % 32 < 16, t ^ 32, -t))
    out, t = cp.full(128, -1, np.int32), np.arange(128)
    kernel(cp, "unnumbered")((1,), (128,), (out,))
    gone = (t >= 64) & (t < 96)
    np.testing.assert_array_equal(cp.asnumpy(out), np.where(gone, -1, np.where(gone[::-1], t, 127 - t)))


@on_each_device
def test_warp_wide_operations_of_lanes_that_are_there(cp: Any) -> None:
    t = np.arange(32)
    there = t % 3 != 0
    out = cp.full(96, -1, np.int32)
    kernel(cp, "warp_wide")((1,), (32,), (out,))
    ballot = np.array(sum(1 << int(i) for i in t[there & (t % 2 == 1)])).astype(np.uint32).view(np.int32)
    expected = [np.where(there, value, -1) for value in (ballot, t[there].sum(), 1)]
    np.testing.assert_array_equal(cp.asnumpy(out).reshape(3, 32), expected)


# ---------------------------------------------------------------- what stays an error, and what is a note

WRONG = cuda_text("engine_barriers_wrong")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_barrier", r"barrier divergence: .*at kernel\.cu:9.* kernel\.cu:6.*that have not left the kernel"),
        (
            "exit_shows_it",
            r"barrier divergence: thread \(0,0,0\) waits .*kernel\.cu:13, thread \(20,0,0\) .*kernel\.cu:14",
        ),
        (
            "whole_warp_missing",
            r"deadlock: thread \(0,0,0\) waits in bar\.sync 1 at kernel\.cu:18, where 32 of 64 threads",
        ),
        ("not_a_warp", "bar.sync takes a number from 0 to 15, and a count of threads that is a multiple of 32"),
    ],
)
def test_living_threads_at_different_barriers(name: str, says: str) -> None:
    a = engine.zeros(64, np.float32)
    args = (a, np.int32(50)) if name == "other_barrier" else (a,)
    with pytest.raises(engine.LaunchError, match=says):
        engine.RawModule(code=WRONG).get_function(name)((2,), (96 if name == "whole_warp_missing" else 64,), args)


def test_an_early_return_is_a_note_of_the_xray() -> None:
    x, out = engine.asarray(np.arange(256, dtype=np.int32)), engine.zeros(256, np.int32)
    function = engine.RawModule(code=LEAVING).get_function("reversed")
    report = xray(function, (1,), (64,), (x, out, np.int32(64)))
    assert report.clean and report.notes == []
    report = xray(function, (1,), (64,), (x, out, np.int32(50)))
    assert report.clean, "the kernel is right"
    assert len(report.notes) == 3, "one for each barrier"
    assert "14 of 64 threads of block (0,0,0) had left the kernel before the barrier at kernel.cu:7" in report.notes[0]
    assert "the first is thread (50,0,0)" in report.notes[0]
    assert "note: 14 of 64 threads" in str(report) and "note: 14 of 64 threads" in report._repr_html_()


# Barriers that some threads go around until they end. A GPU runs each of these to its end, and the result is right.
SKIPPED = cuda_text("engine_barriers_skipped")


@pytest.mark.parametrize(
    ("name", "n", "sound", "count"),
    [
        ("half_a_warp", 16, 64, 48),
        ("halving", 1, 65, 32),
        ("other_turns", 70, 64, 58),
        ("called<3>", 40, 64, 24),
    ],
)
def test_a_barrier_that_some_threads_skip(name: str, n: int, sound: int, count: int) -> None:
    code = SKIPPED.partition("#define")[0]
    module = engine.RawModule(code=code, name_expressions=("called<3>",))
    out = engine.zeros(128, np.int32)
    module.get_function(name)((1,), (64,), (out, np.int32(n)))
    (finding,) = xray(module.get_function(name), (1,), (64,), (out, np.int32(n))).findings
    assert finding.kind == "skipped barrier" and f"{count} of 64 threads" in finding.message
    assert finding.line is not None and "__syncthreads();  //" in code.splitlines()[finding.line - 1]
    report = xray(module.get_function(name), (1,), (64,), (out, np.int32(sound)))
    assert report.clean and report.notes == []


@pytest.mark.parametrize("name", ["in_a_loop", "by_a_macro"])
def test_an_early_return_that_the_text_hides_is_a_note_too(name: str) -> None:
    code = SKIPPED if name == "by_a_macro" else SKIPPED.partition("#define")[0]
    report = xray(engine.RawKernel(code, name), (1,), (64,), (engine.zeros(64, np.int32), np.int32(40)))
    assert report.clean and len(report.notes) == 1, report


def test_warps_at_different_lines_are_a_note_of_the_xray() -> None:
    code = """extern "C" __global__ void apart(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 32) __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}"""
    report = xray(engine.RawKernel(code, "apart"), (1,), (64,), (engine.zeros(64, np.int32),))
    assert report.clean
    (note,) = report.notes
    assert "block (0,0,0) met in __syncthreads() at kernel.cu:" in note and "A GPU counts the warps" in note


# ---------------------------------------------------------------- versions that a source asks for

VERSIONS = r"""
#include <cuda_runtime.h>
#if CUDART_VERSION >= 9000 && __CUDACC_VER_MAJOR__ >= 9 && defined(__CUDACC_VER_BUILD__)
#define BRANCH 1
#else
#define BRANCH 2
#endif
extern "C" __global__ void branch(int *out) {
  out[0] = BRANCH;
#if CUDART_VERSION == __CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10
  out[1] = 1;
#endif
#ifdef CUDA_VERSION
  out[1] = 2;
#endif
}
"""


@on_each_device
def test_the_runtimes_version(cp: Any) -> None:
    """CUDART_VERSION exists in every source; CUDA_VERSION is the driver's, and comes only with <cuda.h>."""
    out = cp.zeros(2, np.int32)
    compiled(cp, VERSIONS).get_function("branch")((1,), (1,), (out,))
    assert cp.asnumpy(out).tolist() == [1, 1]


def test_the_drivers_version() -> None:
    """NVRTC has no <cuda.h>; a file for nvcc includes it and takes its modern branch here."""
    out = engine.zeros(2, np.int32)
    engine.RawModule(code="#include <cuda.h>\n" + VERSIONS).get_function("branch")((1,), (1,), (out,))
    assert out.tolist() == [1, 2]
