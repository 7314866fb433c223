"""Stage 15 by fp16, beyond the tests of all stages: the precision of a split, its sizes, packed tiles, the X-ray."""

from __future__ import annotations

from functools import partial
from typing import Any

import hopper_tiles
import numpy as np
import pytest
from backends import needs_nvrtc
from planted import Bug

from helpers import engine
from helpers.attention import check, compile_report, flash_attention_varlen, kernel, reference
from helpers.attention.ladder import LADDER
from helpers.attention.ladder.stages.hopper import fp16x3_shared_bytes, pick_fp16x3
from helpers.device import cp
from helpers.xray import xray

STAGE = LADDER["fp16x3"]
HEAD_DIMS = (8, 64, 96, 128)
runs_here = pytest.mark.skipif(
    STAGE.why_not(head_dim=64) is not None, reason="this GPU is not of compute capability 9.0"
)


# ---- what it is compiled with


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_compiles_without_spills_and_keeps_its_products_in_flight(head_dim: int) -> None:
    sizes = {"HEAD_DIM": head_dim, **pick_fp16x3(head_dim)}
    for name in STAGE.kernels:
        report = compile_report.compile_report(STAGE.file, sizes, "sm_90a", name=name)
        assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
    assert fp16x3_shared_bytes(sizes) <= 227 * 1024


def test_shared_memory_is_what_the_kernel_counts() -> None:
    text = kernel.source(STAGE.file) + '\nextern "C" __global__ void count(unsigned* n) { *n = SHARED_BYTES; }\n'
    for sizes in ({"BLOCK_M": 128, "BLOCK_N": 80, "STAGES": 4}, {"BLOCK_M": 192, "BLOCK_N": 16, "STAGES": 3}):
        n = engine.zeros(1, np.uint32)
        options = kernel.options({"HEAD_DIM": 72, **sizes})
        engine.RawModule(code=text, options=options).get_function("count")((1,), (1,), (n,))
        assert n.get()[0] == fp16x3_shared_bytes({"HEAD_DIM": 72, **sizes})


# ---- the split


def split(x: np.ndarray, rows: int) -> np.ndarray:
    """Return hi + lo in float64, from NumPy's split of tiles with this many rows."""
    parts = np.zeros(x.shape)
    for first in range(0, len(x), rows):
        tile = x[first : first + rows]
        largest = np.abs(tile[np.isfinite(tile)]).max(initial=0)
        exponent = min(14 - int(np.floor(np.log2(max(largest, 2.0**-126)))), 126)
        scaled = tile * np.float32(2.0**exponent)
        hi = scaled.astype(np.float16)
        lo = (scaled - hi.astype(np.float32)).astype(np.float16)
        parts[first : first + rows] = (hi.astype(float) + lo.astype(float)) * 2.0**-exponent
    return parts


def split_by_kernel(q: np.ndarray, k: np.ndarray, v: np.ndarray, sizes: dict[str, int]) -> tuple[np.ndarray, ...]:
    """Return the same for q, k and v from the first launch."""
    ready, arrays, _ = STAGE.plan(q, k, v, sizes=sizes)
    assert ready is not None
    launch, compiled, args = ready.resolve_arguments(arrays)[0]
    compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)()
    *parts, of_q, of_kv = (cp.asnumpy(a) for a in args[3:8])
    sums = []
    for part, exponents in zip(parts, (of_q, of_kv[..., 0], of_kv[..., 1]), strict=True):
        rows = 64 if len(sums) == 0 else sizes["BLOCK_N"]
        hi, lo = part.astype(np.float64).reshape(2, *part.shape[2:])[:, : part.shape[2]]
        sums.append((hi + lo) * 2.0 ** -np.repeat(exponents, rows)[: len(hi), None])
    return tuple(sums)


@runs_here
def test_a_split_keeps_what_the_header_says() -> None:
    """2^-23 of an element or 2^-39 of its tile's largest; zeros, and elements near both ends of float32's range.

    None is below 2^-126, which GPUs may flush to 0.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (150, 130, 130))
    q[64:128] *= 2.0 ** rng.integers(-40, 1, (64, 64))
    k[:48] = 0
    k[48:96] *= np.float32(2.0**125)
    v[:96] = np.copysign(rng.uniform(1, 2, (96, 64)), v[:96]) * np.float32(2.0**-115)
    for x, got, rows in zip((q, k, v), split_by_kernel(q, k, v, {"BLOCK_N": 48}), (64, 48, 48), strict=True):
        np.testing.assert_array_equal(got, split(x, rows))
        for first in range(0, len(x), rows):
            tile, off = x[first : first + rows].astype(float), np.abs(got - x)[first : first + rows]
            assert (off <= np.maximum(2.0**-23 * np.abs(tile), 2.0**-39 * np.abs(tile).max())).all()


def test_a_scale_of_its_own_for_lo_is_not_needed() -> None:
    """Ootomo and Yokota multiply lo by 2^11, which makes elements far below the tile's largest relatively more precise.

    An element of 2^-16 of the largest keeps 23 bits either way, one of 2^-24 keeps 15.
    """
    rng = np.random.default_rng(0)

    def bits(below: int, of_lo: float) -> float:
        x = rng.uniform(1, 2, 4096).astype(np.float32) * np.float32(2.0 ** (14 - below))
        hi = x.astype(np.float16).astype(np.float32)
        lo = ((x - hi) * np.float32(of_lo)).astype(np.float16).astype(np.float32) / np.float32(of_lo)
        return -np.log2(np.abs((x - hi - lo) / x).max())

    assert min(bits(16, 1), bits(16, 2048), bits(24, 2048)) >= 23 and 15 <= bits(24, 1) < 16


# ---- tiles with scales of their own


@runs_here
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_several_magnitudes(causal: bool) -> None:
    """Each begins a new tile; next to one that contains an infinity, another gives its own result."""
    rows, keys = (3, 130, 0, 64, 1, 70), (200, 130, 5, 0, 70, 33)
    cu_q, cu_k = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((sum(n), h, 64)).astype(np.float32) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    v *= np.float32(2.0) ** np.repeat(np.arange(len(keys)), keys)[:, None, None]
    v[cu_k[1] + 7] = np.inf
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, causal=causal, return_lse=True, stage="fp16x3")
    o, lse = cp.asnumpy(o), cp.asnumpy(lse)
    for i in (0, 4, 5):
        own, its = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = q[own].swapaxes(0, 1), *(a[its].swapaxes(0, 1).repeat(2, 0) for a in (k, v))
        want, want_lse = reference.attention(*one, causal=causal, return_lse=True)
        check.check(f"sequence {i}", o[own].swapaxes(0, 1) / 2.0**i, want / 2.0**i)
        seen = np.isfinite(want_lse)
        check.check(f"lse, sequence {i}", lse[:, own][seen], want_lse[seen])
    assert not o[cu_q[3] : cu_q[4]].any() and np.isneginf(lse[:, cu_q[3] : cu_q[4]]).all()


# ---- the X-ray

XRAYED = {"BLOCK_N": 48, "STAGES": 3}


x_rayed = partial(hopper_tiles.x_rayed, "fp16x3", np.float32, sizes=XRAYED)


@pytest.mark.parametrize(
    "options",
    [{}, {"packed": True, "causal": True}, {"window": (40, 10), "sizes": {**XRAYED, "BLOCK_M": 192, "PINGPONG": 0}}],
    ids=str,
)
def test_the_xray_finds_nothing(options: dict[str, Any], one_block: None) -> None:
    report = x_rayed(**options)
    report.assert_clean()
    assert report.shared["dynamic shared memory"].conflicts == 0
    assert report.traffic["O"].written == 2 * 150 * 72 * 4


def test_the_xray_of_a_split_finds_nothing(one_block: None) -> None:
    """Each element is read once and written as two halves; the last tile of 130 keys has 34."""
    q, k, v = (np.ones((2, rows, 72), np.float32) for rows in (150, 130, 130))
    ready, arrays, _ = STAGE.plan(q, k, v, sizes=XRAYED)
    assert ready is not None
    launch, compiled, args = ready.resolve_arguments(arrays)[0]
    report = xray(compiled, launch.grid, launch.block, args, launch.shared_bytes)
    report.assert_clean()
    for name, rows in zip("qkv", (150, 130, 130), strict=True):
        assert report.traffic[name.upper()].read == report.traffic[f"{name}_split"].written == 2 * rows * 72 * 4


RELEASE = "    if (leader) kv_ring.release(stage);\n"
HAS_S = "    wgmma_wait<0>();\n    wgmma_registers(S);\n"
XRAY_BUGS = (
    Bug("K is released too early", HAS_S + RELEASE, RELEASE + HAS_S, finds="race"),
    Bug("no fence of the registers", "  wgmma_registers(O_tile);\n  wgmma_fence();\n", "\n", finds="no wgmma fence"),
    Bug("no wait", "q_ring.wait_full(q_stage);", "", finds="not waited for"),
)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.finds)
@pytest.mark.parametrize("bug", XRAY_BUGS, ids=lambda bug: bug.name)
def test_the_xray_finds_the_bug(bug: Bug, one_block: None) -> None:
    assert x_rayed(bug.plant(kernel.source(STAGE.file)), **bug.options).findings[0].kind == bug.finds
