"""The stage fp8: attention on e4m3 elements, for compute capability 9.0."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from helpers.attention.fp8 import DESCALE_ROWS
from helpers.attention.ladder import launches, limits, tiles
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.extras import DESCALES
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.stage import Stage, Tuning
from helpers.attention.ladder.stages import PLAIN
from helpers.attention.ladder.stages.hopper import (
    ON_HOPPER,
    heads_together,
    launch_in_order,
    mbarrier_bytes,
    schedule,
)
from helpers.attention.ladder.tiles import Sizes

TRANSPOSE, TRANSPOSE_THREADS = "16_transpose.cu", 128
STAGES = 2
ONES = 8  # rows of V^T behind its columns: one of ones, which sums the weights, and seven of zeros

# By head_dim: BLOCK_M and BLOCK_N. O of a tile of keys has accumulators of its own.
_FP8: dict[int, dict[str, int]] = {
    64: {"BLOCK_M": 192, "BLOCK_N": 192},
    128: {"BLOCK_M": 192, "BLOCK_N": 160},
    256: {"BLOCK_M": 128, "BLOCK_N": 160},
}


@functools.cache
def pick_fp8(head_dim: int) -> dict[str, int]:
    """Choose the -D options of fp8."""
    return dict(tiles.entry(_FP8, head_dim))


def _row_bytes(head_dim: int) -> int:
    """Return the bytes of a row of Q or K in shared memory: in panels of 64 or 128, padded with zeros."""
    return 64 if head_dim <= 64 else -(-head_dim // 128) * 128


def step_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of a step to fp8: Q, STAGES tiles each of K and V^T, mbarriers."""
    row, stages = _row_bytes(sizes["HEAD_DIM"]), sizes.get("STAGES", STAGES)
    tiles_of_q_k_v = sizes["BLOCK_M"] * row + stages * sizes["BLOCK_N"] * (row + sizes["HEAD_DIM"] + ONES)
    return tiles_of_q_k_v + mbarrier_bytes(sizes, 2 * stages)


def _panel_bytes(sizes: Sizes) -> int:
    """Count TRANSPOSE_BYTES of v_transpose.cuh: a panel of V, and its V^T."""
    return _panel_keys(sizes) * (2 * sizes["HEAD_DIM"] + ONES)


def _with_background(sizes: Sizes) -> int:
    """Count SHARED_BYTES of fp8: those of a step, and a panel."""
    return -(-step_shared_bytes(sizes) // 128) * 128 + _panel_bytes(sizes)


def _of_transpose(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple((name, sizes[name]) for name in ("HEAD_DIM", "BLOCK_N"))


def _transpose(call: Call, sizes: Sizes) -> Launch:
    """Launch a block for each panel of V's tiles, which transposes it."""
    args = "v", "v_image", *launches.given(call, "cu_seqlens_k"), launches.params_of(call)
    panels = _v_tiles(call, sizes) * (sizes["BLOCK_N"] // _panel_keys(sizes))
    grid = panels, call.arrays["v"].shape[1], 1 if call.packed else call.sequences
    shared, defines = _panel_bytes(sizes), _of_transpose(sizes)
    return Launch("transpose_v", grid, (TRANSPOSE_THREADS,), shared, args, TRANSPOSE, defines)


def transpose_and_attend(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a step to fp8: the transposition of V; then as hopper, with the tiles for V's map."""
    inputs = Map("q", 64), Map("k", sizes["BLOCK_N"]), "v_image"
    descales = launches.given(call, *DESCALES)
    return [_transpose(call, sizes), *launch_in_order(stage, call, sizes, inputs, descales, partial_last=True)]


def _variant(call: Call) -> dict[str, int]:
    """Return the -D options for descales of blocks of rows: a tile of keys has one."""
    blocks = any(name in call.arrays and call.arrays[name].ndim == 3 for name in DESCALES)
    return {"DESCALE_ROWS": DESCALE_ROWS, "BLOCK_N": DESCALE_ROWS} if blocks else {}


def _panel_keys(sizes: Sizes) -> int:
    """Return KEY_BYTES: the keys of a panel of V^T, and its bytes in a row."""
    return next(keys for keys in (64, 32) if sizes["BLOCK_N"] % keys == 0)


def _v_tiles(call: Call, sizes: Sizes) -> int:
    """Count the tiles of V of a head: of one sequence, or of all that are packed."""
    keys, block = call.arrays["v"].shape[2], sizes["BLOCK_N"]
    return launches.slots(call, "v", block) if call.packed else -(-keys // block)


def step_scratch(call: Call, sizes: Sizes) -> Mapping[str, Spec]:
    """Return the scratch arrays: V^T in tiles, and the schedule."""
    batch, heads, _, head_dim = call.arrays["v"].shape
    shape = batch * heads, _v_tiles(call, sizes), sizes["BLOCK_N"] * (head_dim + ONES)
    return {**schedule(call, sizes), "v_image": Spec.dense(shape, np.uint8)}


# A block transposes some 1 KB of V a microsecond in the background. So this needs rows: so many tiles of them for each
# head of K and V, twice as many with a mask.
BACKGROUND_TILES = 10


def _in_background(call: Call, sizes: Sizes) -> bool:
    """Decide whether the kernel transposes V itself: not where sequences are packed, or rows are few."""
    tiles = -(-call.arrays["q"].shape[2] // sizes["BLOCK_M"]) * call.heads // call.arrays["v"].shape[1]
    return not call.packed and tiles >= BACKGROUND_TILES * (1 if call.window == (-1, -1) else 2)


def _heads_of_v(call: Call, sizes: Sizes) -> tuple[int, int]:
    """Return how many heads of V there are, and how many are needed at the same time; 0 and 0 if not in background."""
    if not _in_background(call, sizes):
        return 0, 0
    batch, kv_heads, *_ = call.arrays["v"].shape
    at_once = limits.persistent_blocks() // -(-call.arrays["q"].shape[2] // sizes["BLOCK_M"]) + 2
    together = max(heads_together(call, sizes), at_once) // (call.heads // kv_heads)
    return batch * kv_heads, min(max(together, 1), batch * kv_heads)


def _attend(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch as a step does, but with V transposed in the background where that can be."""
    heads, together = map(np.int32, _heads_of_v(call, sizes))
    counts = "v_counts" if heads else None
    inputs = Map("q", 64), Map("k", sizes["BLOCK_N"]), "v", "v_image", counts, heads, together
    descales = launches.given(call, *DESCALES)
    after = launch_in_order(stage, call, sizes, inputs, descales, partial_last=True)
    if not heads:
        return [_transpose(call, sizes), *after]
    n = np.int32(_counts(call, sizes))
    return [Launch("clear_counts", (8,), (256,), 0, ("v_counts", n), TRANSPOSE, _of_transpose(sizes)), *after]


def _counts(call: Call, sizes: Sizes) -> int:
    """Count the counters of the background: of panels that are drawn, and one for each tile."""
    batch, heads, *_ = call.arrays["v"].shape
    return 1 + batch * heads * _v_tiles(call, sizes)


def _scratch(call: Call, sizes: Sizes) -> Mapping[str, Spec]:
    """Return a step's scratch arrays, and the counters of the background."""
    counts = {"v_counts": Spec.dense((_counts(call, sizes),), np.int32)} if _in_background(call, sizes) else {}
    return {**step_scratch(call, sizes), **counts}


FP8 = Stage(
    number=16,
    name="fp8",
    file="16_fp8.cu",
    idea="8 bits: e4m3 products by wgmma, V transposed, each tile of keys added in float32",
    tuning=Tuning(lambda head_dim, shared_limit: pick_fp8(head_dim), variant=_variant),  # no other stage takes e4m3
    launches=_attend,
    scratch=_scratch,
    features=PLAIN | {"descale", "block_descale"},
    dtypes=("uint8",),
    out_dtypes=("bfloat16", "float16", "float32"),
    max_head_dim=256,
    shared_bytes=_with_background,
    **{**ON_HOPPER, "head_dim_step": 16},
)
