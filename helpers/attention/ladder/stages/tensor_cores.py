"""The stages on tensor cores that launch one grid: flash_wmma, flash_mma, flash_cute, tf32; and tiles for the
output projection.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder import launches, limits, tiles
from helpers.attention.ladder.call import CU_SEQLENS, Call
from helpers.attention.ladder.launch import Launch, Part
from helpers.attention.ladder.stage import CallSize, Stage, Tuning
from helpers.attention.ladder.stages import FLOAT, FORWARD_EXTRAS, PLAIN
from helpers.attention.ladder.tiles import KB, Sizes
from helpers.engine.nvrtc import why_no_cute

IN_GRID: Mapping[str, Any] = {"launches": launches.strided, "slots": launches.in_slots}
# flash_mma and stages built on it: rows are copied 16 bytes at a time.
WARPS_OF_MMA: Mapping[str, Any] = {
    "dtypes": ("float16", "bfloat16"),
    "min_cc": 80,
    "head_dim_step": 8,
    "threads": lambda sizes: 32 * sizes["WARPS"],
    "needs_aligned": True,
}

# ---- 06: WMMA

# The first that fits is used.
_WMMA = {
    64: ({"BLOCK_M": 128, "BLOCK_N": 32, "MIN_BLOCKS": 3},),
    128: ({"BLOCK_M": 128, "BLOCK_N": 32, "MIN_BLOCKS": 2}, {"BLOCK_M": 64, "BLOCK_N": 32, "MIN_BLOCKS": 2}),
}


@functools.cache
def pick_wmma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of flash_wmma."""
    return tiles.first_that_fits(tiles.entry(_WMMA, head_dim), _wmma_shared_bytes, head_dim, shared_limit)


def wmma_shared_bytes(head_dim: int, sizes: Sizes) -> int:
    """Count SHARED_BYTES of flash_wmma: tiles of Q, K and V with 8 elements of padding to a row, and S in float32."""
    rows = sizes["BLOCK_M"] + 2 * sizes["BLOCK_N"]
    return 2 * (tiles.round_up(head_dim, 16) + 8) * rows + 4 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 4)


def _wmma_shared_bytes(sizes: Sizes) -> int:
    return wmma_shared_bytes(sizes["HEAD_DIM"], sizes)


FLASH_WMMA = Stage(
    number=6,
    name="flash_wmma",
    file="06_wmma.cu",
    idea="tensor cores by the WMMA interface",
    tuning=Tuning(pick_wmma),
    features=PLAIN | {"rotary"},
    dtypes=("float16", "bfloat16"),
    min_cc=75,
    head_dim_step=8,
    shared_bytes=_wmma_shared_bytes,
    needs_aligned=True,
    **IN_GRID,
)

# ---- 07: mma.sync

# The first that fits is used. From 129 on, acc for 32 rows would not fit a warp's registers: 16 rows each.
_MMA = {
    128: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2},),
    256: (
        {"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1},
        {"BLOCK_M": 128, "BLOCK_N": 32, "WARPS": 8, "MIN_BLOCKS": 1},
        {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4, "MIN_BLOCKS": 1},
    ),
}
# More keys per tile: faster at these head dimensions on an H200 (5 % at 64), slower at 48, and at 128 registers spill.
# Only if a multiprocessor can hold two such blocks.
_MMA_WIDE = {32: 128, 64: 128, 80: 96, 96: 96}
# If a block may have less: the fastest of the 20 tiles of `helpers.bench.studies.presets` on an H200 whose
# multiprocessors were given as many blocks as a GPU with that limit can hold. (head_dim from, to, BLOCK_M, BLOCK_N,
# WARPS, MIN_BLOCKS)
_MMA_PRESETS: Mapping[int, Sequence[tuple[int, int, int, int, int, int]]] = {
    99 * KB: ((65, 96, 256, 64, 8, 1), (97, 128, 256, 32, 8, 1)),
    163 * KB: ((97, 128, 128, 32, 4, 2),),  # 48 keys were 4 % faster there, but spill registers on sm_80
}


@functools.cache
def pick_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of flash_mma."""
    for least, most, *preset in _MMA_PRESETS.get(tiles.known_limit(shared_limit), ()):
        if least <= head_dim <= most:
            return dict(zip(("BLOCK_M", "BLOCK_N", "WARPS", "MIN_BLOCKS"), preset, strict=True))
    sizes = tiles.first_that_fits(tiles.entry(_MMA, head_dim), mma_shared_bytes, head_dim, shared_limit)
    wide = {**sizes, "BLOCK_N": _MMA_WIDE.get(tiles.round_up(head_dim, 16), sizes["BLOCK_N"])}
    blocks = tiles.blocks_in_shared_memory(mma_shared_bytes({**wide, "HEAD_DIM": head_dim}), shared_limit)
    return wide if blocks >= wide["MIN_BLOCKS"] else sizes


@functools.cache
def pick_few_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the tile for a launch whose blocks would leave half a GPU idle: 64 rows per block, 16 per warp.

    Up to head_dim 128 with 128 keys per tile if they fit: a block has its multiprocessor to itself, and fewer
    iterations.
    """
    sizes = {**pick_mma(head_dim, shared_limit), "BLOCK_M": 64, "WARPS": 4}
    wide = {**sizes, "BLOCK_N": 128}
    fits = head_dim <= 128 and mma_shared_bytes({**wide, "HEAD_DIM": head_dim}) <= shared_limit
    return wide if fits else sizes


def mma_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of flash_mma: a tile of Q, and two each of K and V, in rows of whole fragments of 16."""
    return 2 * tiles.round_up(sizes["HEAD_DIM"], 16) * (sizes["BLOCK_M"] + 4 * sizes["BLOCK_N"])


FLASH_MMA = Stage(
    number=7,
    name="flash_mma",
    file="07_mma.cu",
    idea="FlashAttention-2: mma.sync, swizzled tiles, cp.async",
    tuning=Tuning(pick_mma, pick_few_mma),
    features=PLAIN | FORWARD_EXTRAS | FLOAT,
    max_head_dim=256,
    shared_bytes=mma_shared_bytes,
    **IN_GRID,
    **WARPS_OF_MMA,
)

# ---- 11: attention with its output projection, launched by helpers.attention.rotary_and_projection

# O, packed, and the sums of as many columns take most registers: 16 rows per warp from 65 columns on. With 32 rows, the
# form with atomics was 15 % faster on an H200 at 128, but registers spill.
_PROJECTION = {
    64: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2},),
    128: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1}, {"BLOCK_M": 64, "BLOCK_N": 48, "WARPS": 4}),
}


def pick_projection(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of 11_projection.cu, without HEAD_DIM. Its shared memory is flash_mma's."""
    return tiles.first_that_fits(tiles.entry(_PROJECTION, head_dim), mma_shared_bytes, head_dim, shared_limit)


def _projection_sizes(call: Call) -> dict[str, int]:
    return {"HEAD_DIM": call.head_dim, **pick_projection(call.head_dim, limits.most_shared())}


def _launch_projection(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a grid (tiles of rows, heads, sequences), or (tiles of rows, 1, sequences) with ALL_HEADS.

    Y is the array o, (batch, 1, N, columns). There are several launches if a grid cannot hold all sequences.
    """
    names = ("q", "k", "v", "w_o", "o", *launches.given(call, *CU_SEQLENS))
    numbers = np.int32(call.arrays["w_o"].shape[1]), launches.params_of(call)
    grid = max(1, -(-call.rows // sizes["BLOCK_M"])), 1 if sizes["ALL_HEADS"] else call.heads
    own = []
    for some in launches.slices(call.sequences, launches.MAX_GRID_YZ):
        if call.sequences <= launches.MAX_GRID_YZ:
            parts = {}
        elif call.packed:  # a sequence's place in the whole arrays is in cu_seqlens
            parts = {name: Part(name, (slice(some.start, some.stop + 1),)) for name in CU_SEQLENS}
        else:
            parts = {name: Part(name, (some,)) for name in "qkvo"}
        args = *(parts.get(name, name) for name in names), *numbers
        own.append(stage.launch((*grid, some.stop - some.start), sizes, args))
    return own


PROJECTION = Stage(
    number=11,
    name="projection",
    file="11_projection.cu",
    idea="attention with its output projection",
    tuning=Tuning(pick_projection, variant=_projection_sizes),
    launches=_launch_projection,
    direction="project",
    features=PLAIN,
    shared_bytes=mma_shared_bytes,
    **WARPS_OF_MMA,
)


# ---- 12: flash_mma in CuTe


@functools.cache
def pick_cute(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose flash_mma's tile, or one of 64 keys if a flash_cute block's threads cannot share its copies evenly."""
    if head_dim > 128:
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to 128")
    chunks = tiles.round_up(head_dim, 16) // 8  # 16-byte chunks of a row; 8, 4 or 2 threads copy one
    of_a_row = next(threads for threads in (8, 4, 2) if chunks % threads == 0)
    sizes = pick_mma(head_dim, shared_limit)
    even = sizes["BLOCK_N"] % (32 * sizes["WARPS"] // of_a_row) == 0
    return sizes if even else {"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2}


FLASH_CUTE = Stage(
    number=12,
    name="flash_cute",
    file="12_cute.cu",
    idea="07 in CuTe: its layouts, TiledCopy and TiledMMA",
    # flash_mma computes the same, and compiles in a second.
    tuning=Tuning(pick_cute, by_default=lambda size: False),
    features=PLAIN | {"rotary"},
    shared_bytes=mma_shared_bytes,
    unavailable=why_no_cute,
    slow_to_compile=True,
    **IN_GRID,
    **WARPS_OF_MMA,
)

# ---- 15: float32 by TF32

# By head_dim: the first that fits is used. Those of 64 and 128 are the fastest of 12 on an H200, at 4096 rows.
_TF32: dict[int, tuple[dict[str, int], ...]] = {
    64: (
        {"BLOCK_M": 128, "BLOCK_N": 32, "WARPS": 4, "MIN_BLOCKS": 2},
        {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4, "MIN_BLOCKS": 3},
    ),
    128: (
        {"BLOCK_M": 128, "BLOCK_N": 48, "WARPS": 8, "MIN_BLOCKS": 1},
        {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4, "MIN_BLOCKS": 1},
    ),
    256: (
        {"BLOCK_M": 64, "BLOCK_N": 16, "WARPS": 4, "MIN_BLOCKS": 1},
        {"BLOCK_M": 32, "BLOCK_N": 16, "WARPS": 2, "MIN_BLOCKS": 1},
    ),
}


@functools.cache
def pick_tf32(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of tf32."""
    return tiles.first_that_fits(tiles.entry(_TF32, head_dim), tf32_shared_bytes, head_dim, shared_limit)


@functools.cache
def pick_few_tf32(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the tile for a launch whose blocks would leave half a GPU idle: half the rows per block."""
    sizes = pick_tf32(head_dim, shared_limit)
    block_m = max(sizes["BLOCK_M"] // 2, 32)
    return {**sizes, "BLOCK_M": block_m, "WARPS": min(sizes["WARPS"], block_m // 16)}


def packed_tf32(head_dim: int) -> dict[str, int]:
    """Choose the changes for packed sequences: with a slot search, two row fragments per warp spill at head_dim 64."""
    return {"BLOCK_M": 64, "MIN_BLOCKS": 3} if head_dim <= 64 else {}


def _tf32_variant(call: Call) -> dict[str, int]:
    return packed_tf32(call.head_dim) if call.packed else {}


def tf32_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of tf32: a tile of Q, two each of K and V, in rows padded to 128 bytes."""
    return 128 * -(-sizes["HEAD_DIM"] // 32) * (sizes["BLOCK_M"] + 4 * sizes["BLOCK_N"])


def _tf32_by_default(size: CallSize) -> bool:
    """Choose it where it was faster than heads_and_masks on an H200: 0.85× with 4096 rows in all, 1.4× with 8192.

    At head_dim 256 it was slower. On the CPU engine, calls that name no stage get heads_and_masks, so that notebooks'
    outputs do not change.
    """
    return device.ON_GPU and size.all_rows >= 8192 and size.head_dim <= 128


TF32 = Stage(
    number=15,
    name="tf32",
    file="15_tf32.cu",
    idea="float32 on tensor cores: three TF32 products, sums that do not drift",
    tuning=Tuning(pick_tf32, pick_few_tf32, variant=_tf32_variant, by_default=_tf32_by_default),
    features=PLAIN | FORWARD_EXTRAS,
    min_cc=80,
    max_head_dim=256,
    head_dim_step=4,
    threads=lambda sizes: 32 * sizes["WARPS"],
    shared_bytes=tf32_shared_bytes,
    needs_aligned=True,
    **IN_GRID,
)
