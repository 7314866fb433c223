"""Static `__shared__` arrays are laid out in the order of the source, each at a multiple of its type's alignment."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import shared_layout
from helpers.xray import xray

# Wider than a gap of the checked build. The compiler must not know an address's alignment.
ALIGNED = cuda_text("engine_layout_aligned")

CODE = cuda_text("engine_layout")
NAMES = ("of_template<7>", "of_template<100>")
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a compiler lays thread-locals out as it likes")


def module(cp: Any) -> Any:
    options = ("-std=c++17",)
    if cp is not engine:
        from helpers.attention import kernel

        options += kernel.wmma_headers()
    return compiled(cp, CODE, NAMES, options)


@linux
@on_each_device
@pytest.mark.skipif(not engine.compiler._is_gcc_on_linux(), reason="clang aligns arrays to 16 bytes")
def test_arrays_lie_as_a_gpu_has_them(cp: Any) -> None:
    out = cp.zeros(32, np.uint64)
    module(cp).get_function("offsets")((1,), (1,), (out, np.int32(0)))
    assert cp.asnumpy(out)[:8].tolist() == [0, 512, 1024, 1032, 1164, 1168, 1176, 0]
    for n in (7, 100):
        module(cp).get_function(f"of_template<{n}>")((1,), (1,), (out, np.int32(0)))
        first, odd, second, begin = cp.asnumpy(out)[[0, 1, 2, 7]].tolist()
        assert (first, odd, begin) == (0, 2 * n, 0)
        assert second in (-(-(odd + 1) // 4) * 4, -(-(odd + 1) // 16) * 16)  # g++ aligns some arrays more


@linux
def test_the_checked_build_has_the_same_addresses_modulo_128() -> None:
    fast, checked = engine.zeros(32, np.uint64), engine.zeros(32, np.uint64)
    for name in ("offsets", *NAMES):
        kernel = module(engine).get_function(name)
        kernel((1,), (1,), (fast, np.int32(0)))
        xray(kernel, (1,), (1,), (checked, np.int32(0))).assert_clean()
        assert (fast % 128 == checked % 128).all() and (checked[1:3] > fast[1:3]).all()


@on_each_device
def test_halves_for_tensor_cores(cp: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 16, 16)).astype(np.float16)
    out = cp.zeros((16, 16), np.float32)
    module(cp).get_function("tiles")((1,), (32,), (out, cp.asarray(x)))
    expected = x[0].astype(np.float32) @ x[1].astype(np.float32)
    np.testing.assert_allclose(cp.asnumpy(out), expected, rtol=1e-5, atol=1e-5)


@on_each_device
def test_a_matrix_at_a_multiple_of_16_bytes(cp: Any) -> None:
    """GPUs accept it, but the documentation requires 32 bytes: the X-ray reports it."""
    x = cp.asarray(np.arange(256).astype(np.float16))
    out = cp.zeros(32, np.float32)
    kernel = module(cp).get_function("past_16_bytes")
    kernel((1,), (32,), (out, x))
    each = cp.asnumpy(out)
    if cp is engine:  # each element is held by 16 elements of 32 lanes twice, or once by 8
        (finding,) = xray(kernel, (1,), (32,), (out, x)).findings
        assert finding.kind == "misaligned" and "requires multiples of 32" in str(finding)
        assert CODE.splitlines()[finding.line - 1].strip() == "wmma::load_matrix_sync(a, s + 8, 16);"
    assert each.sum() in (np.arange(256).sum(), 2 * np.arange(256).sum())


@linux
def test_the_checked_build_sees_misaligned_vectors_of_shared_memory() -> None:
    """`odd` is 4 bytes past a round address, in the checked build too: odd + 3 is at a multiple of 16."""
    kernel = module(engine).get_function("as_vectors")
    out = engine.zeros(8, np.float32)
    if engine.compiler._is_gcc_on_linux():
        xray(kernel, (1,), (8,), (out, np.int32(3))).assert_clean()
        report = xray(kernel, (1,), (8,), (out, np.int32(0)))
        assert [f.kind for f in report.findings] == ["misaligned"]


def test_assembly_without_thread_locals_stays_as_it_is() -> None:
    text = "\t.text\nmain:\n\tret\n\t.section\t.rodata\nx:\n\t.zero 4\n"
    for redzones in (False, True):
        assert shared_layout.laid_out(text, backwards=True, redzones=redzones) == text


def test_alignments_wider_than_a_gap_hold_in_the_checked_build() -> None:
    kernel = engine.RawKernel(ALIGNED, "far_apart")
    plain, looked_at = (engine.zeros(7, np.uint64) for _ in range(2))
    kernel((1,), (1,), (plain, np.int32(0)))
    xray(kernel, (1,), (1,), (looked_at, np.int32(0))).assert_clean()
    assert plain.tolist() == looked_at.tolist() == [0] * 6 + [7]
