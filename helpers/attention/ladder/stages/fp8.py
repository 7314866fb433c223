"""The stage fp8: attention on e4m3 elements, for compute capability 9.0."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from helpers.attention.fp8 import DESCALE_ROWS
from helpers.attention.ladder import launches, tiles
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.extras import DESCALES
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.stage import Stage, Tuning
from helpers.attention.ladder.stages import PLAIN
from helpers.attention.ladder.stages.hopper import ON_HOPPER, launch_in_order, mbarrier_bytes, schedule
from helpers.attention.ladder.tiles import Sizes

TRANSPOSE, UNIT_BYTES = "16_transpose.cu", 4096  # a warp transposes as many bytes of V
LEAVE_TILES = ("16_fp8.cu", "steps/16_03_codes.cu")  # whose consumers compute no tile of keys that they do not see
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


def fp8_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of fp8: Q, STAGES tiles each of K and V^T, mbarriers."""
    row, stages = _row_bytes(sizes["HEAD_DIM"]), sizes.get("STAGES", STAGES)
    tiles_of_q_k_v = sizes["BLOCK_M"] * row + stages * sizes["BLOCK_N"] * (row + sizes["HEAD_DIM"] + ONES)
    return tiles_of_q_k_v + mbarrier_bytes(sizes, 2 * stages)


def transpose_block(sizes: Sizes) -> tuple[int, int]:
    """Return THREADS and SHARED_BYTES of transpose_v."""
    keys, chunks = _panel_keys(sizes), sizes["HEAD_DIM"] // 16
    unit = min(UNIT_BYTES // 16 // keys, next(n for n in (1, 2, 4, 8) if n >= min(chunks, 8)))
    warps = sizes["BLOCK_N"] // keys * -(-chunks // unit)
    return 32 * warps, warps * keys * unit * 16


def _transpose_and_attend(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a block for each tile of V, which transposes it; then as hopper, with the tiles for V's map."""
    cu_seqlens_k, params = launches.given(call, "cu_seqlens_k"), launches.params_of(call)
    threads, shared = transpose_block(sizes)
    grid = (_v_tiles(call, sizes), call.arrays["v"].shape[1], 1 if call.packed else call.sequences)
    of_transpose = tuple((name, sizes[name]) for name in ("HEAD_DIM", "BLOCK_N"))
    args = ("v", "v_image", *cu_seqlens_k, params)
    transpose = Launch("transpose_v", grid, (threads,), shared, args, TRANSPOSE, of_transpose)
    inputs = Map("q", 64), Map("k", sizes["BLOCK_N"]), "v_image"
    descales = launches.given(call, *DESCALES)
    of_stage = launch_in_order(stage, call, sizes, inputs, descales, leaves_tiles=stage.file in LEAVE_TILES)
    return [transpose, *of_stage]


def _variant(call: Call) -> dict[str, int]:
    """Return the -D options for descales of blocks of rows: a tile of keys has one."""
    blocks = any(name in call.arrays and call.arrays[name].ndim == 3 for name in DESCALES)
    return {"DESCALE_ROWS": DESCALE_ROWS, "BLOCK_N": DESCALE_ROWS} if blocks else {}


def _panel_keys(sizes: Sizes) -> int:
    """Return KEY_BYTES: the keys of a panel of V^T, and its bytes in a row."""
    return next(keys for keys in (128, 64, 32) if sizes["BLOCK_N"] % keys == 0)


def _v_tiles(call: Call, sizes: Sizes) -> int:
    """Count the tiles of V of a head: of one sequence, or of all that are packed."""
    keys, block = call.arrays["v"].shape[2], sizes["BLOCK_N"]
    return launches.slots(call, "v", block) if call.packed else -(-keys // block)


def _fp8_scratch(call: Call, sizes: Sizes) -> Mapping[str, Spec]:
    """Return the scratch arrays: V^T in tiles, and the schedule."""
    batch, heads, _, head_dim = call.arrays["v"].shape
    shape = batch * heads, _v_tiles(call, sizes), sizes["BLOCK_N"] * (head_dim + ONES)
    return {**schedule(call, sizes), "v_image": Spec.dense(shape, np.uint8)}


FP8 = Stage(
    number=16,
    name="fp8",
    file="16_fp8.cu",
    idea="8 bits: e4m3 products by wgmma, V transposed, each tile of keys added in float32",
    tuning=Tuning(lambda head_dim, shared_limit: pick_fp8(head_dim), variant=_variant),  # no other stage takes e4m3
    launches=_transpose_and_attend,
    scratch=_fp8_scratch,
    features=PLAIN | {"descale", "block_descale"},
    dtypes=("uint8",),
    out_dtypes=("bfloat16", "float16", "float32"),
    max_head_dim=256,
    shared_bytes=fp8_shared_bytes,
    **{**ON_HOPPER, "head_dim_step": 16},
)
