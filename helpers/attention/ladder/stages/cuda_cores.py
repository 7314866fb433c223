"""The stages on CUDA cores, in float32: naive, tiled, online_softmax, register_tiles, heads_and_masks.

python3 -m helpers.attention.ladder.stages.cuda_cores            # the table of register tiles
from helpers.attention.ladder.stages.cuda_cores import pick
print(pick(64, 99 * 1024).why)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from helpers.attention.ladder import launches
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.launch import Launch, Part
from helpers.attention.ladder.stage import Stage, Tuning
from helpers.attention.ladder.stages import FORWARD_EXTRAS, PLAIN
from helpers.attention.ladder.tiles import KB, LIMITS, MAX_HEAD_DIM, Sizes, Tiles, known_limit, other_entry

# ---- 01 to 03: one head a launch


def _launch_each_head(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch once per head, with a block for each tile of BLOCK_M rows. All heads use one scratch in turn."""
    q, k = call.arrays["q"], call.arrays["k"]
    n, n_kv = q.shape[2], k.shape[2]
    grid = (-(-n // sizes["BLOCK_M"]),)
    scratch = stage.scratch(call, sizes)
    scalars = np.int32(n), np.int32(n_kv), np.float32(call.softmax_scale)
    return [
        stage.launch(grid, sizes, (*(Part(name, head) for name in "qkv"), *scratch, Part("o", head), *scalars))
        for head in np.ndindex(q.shape[:2])
    ]


def _scores_of_a_head(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch array S: the scores of one head, float32 (N, N_kv)."""
    return {"S": Spec.dense((call.arrays["q"].shape[2], call.arrays["k"].shape[2]), np.float32)}


def _shared_tiles(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the most query rows whose tiles of Q, K and V fit 48 KB, because they share each tile of K and V."""
    block_n, row_stride = 16, head_dim | 1
    for block_m in (128, 64, 32):
        if 4 * (block_m * row_stride + 2 * block_n * head_dim) <= 48 * KB:
            break
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


NAIVE = Stage(
    number=1,
    name="naive",
    file="01_naive.cu",
    idea="one thread per query row",
    tuning=Tuning(lambda head_dim, shared_limit: {"BLOCK_M": 64}),
    launches=_launch_each_head,
    scratch=_scores_of_a_head,
)
TILED = Stage(
    number=2,
    name="tiled",
    file="02_tiled.cu",
    idea="K and V tiles in shared memory, two passes",
    tuning=Tuning(_shared_tiles),
    launches=_launch_each_head,
)
ONLINE_SOFTMAX = Stage(
    number=3,
    name="online_softmax",
    file="03_online_softmax.cu",
    idea="running max and sum, one pass",
    tuning=Tuning(_shared_tiles),
    launches=_launch_each_head,
)

# ---- 04 and 05: register tiles

# (head_dim, limit in KB) -> sizes, and TFLOP/s of an H200 whose multiprocessors were given as many blocks as a GPU with
# that limit can hold (4096 rows and keys; 64 heads, 32 from head_dim 96 on, 16 at 256). The best of 33 tiles; if
# another was within 2 % of it, the smaller of the two.
_MEASURED: dict[tuple[int, int], tuple[int, int, int, int, float | None]] = {
    (32, 48): (64, 32, 64, 8, 31.5),
    (32, 64): (64, 32, 64, 8, 31.5),
    (32, 99): (128, 64, 128, 8, 36.8),
    (32, 163): (128, 64, 128, 8, 43.0),
    (32, 227): (128, 64, 128, 8, 43.0),
    (64, 48): (64, 16, 64, 8, 30.4),
    (64, 64): (64, 48, 128, 16, 31.5),
    (64, 99): (128, 64, 128, 8, 39.0),
    (64, 163): (64, 64, 128, 8, 40.3),
    (64, 227): (128, 64, 128, 8, 45.3),
    (96, 48): (32, 16, 64, 16, 22.2),
    (96, 64): (64, 32, 128, 16, 26.9),
    (96, 99): (64, 64, 128, 8, 35.3),
    (96, 163): (64, 48, 128, 16, 36.4),
    (96, 227): (128, 32, 128, 8, 43.2),
    (128, 48): (16, 16, 32, 8, 13.3),
    (128, 64): (32, 32, 64, 16, 16.9),
    (128, 99): (64, 48, 128, 16, 35.3),
    (128, 163): (128, 64, 256, 16, 42.6),
    (128, 227): (128, 96, 256, 16, 45.0),
    (256, 48): (16, 8, 32, 8, None),
    (256, 64): (16, 16, 32, 8, 3.5),
    (256, 99): (32, 16, 64, 16, 7.5),
    (256, 163): (64, 32, 128, 16, 22.0),
    (256, 227): (128, 32, 256, 16, 38.5),
}


@functools.cache
def pick(head_dim: int, shared_limit: int = 48 * KB) -> Tiles:
    """Choose the tiles for a head dimension if a block may have `shared_limit` bytes of shared memory.

    Between two head dimensions of the table, the larger one's tiles are used; between two limits, the smaller one's,
    because they fit.

    Raises:
        ValueError: a head_dim outside 1 to 256, or a limit below 48 KB.
    """
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {MAX_HEAD_DIM}")
    if shared_limit < min(LIMITS):
        raise ValueError(f"shared_limit = {shared_limit:,} bytes; every GPU gives a block at least {min(LIMITS):,}")
    limit = known_limit(shared_limit)
    column = min(known for known, _ in _MEASURED if known >= head_dim)
    *sizes, tflops = _MEASURED[column, limit // KB]
    tiles = Tiles(*sizes)
    rows, columns = tiles.scores
    blocks = tiles.blocks(head_dim, limit)
    why = (
        f"{rows} x {columns} scores a thread; {tiles.shared_bytes(head_dim):,} of {limit:,} bytes of shared memory: "
        f"room for {blocks} block{'s' * (blocks > 1)} of {tiles.threads} threads"
    )
    if tflops is not None:
        why += f"; the best with as many blocks on an H200, at head_dim {column}: {tflops} TFLOP/s"
    return replace(tiles, why=why)


# If a launch has few blocks, every multiprocessor should have one. Up to this head_dim: fewer rows per block. On an
# H200, one head of 4096 rows: 29.6 instead of 9.6 TFLOP/s at 64, 24.6 instead of 11.3 at 128.
_FEW = {64: (32, 128, 128, 16), 128: (32, 64, 128, 16)}
# If each has one and none a second, twice the threads per block: one head of 16384 rows, 43.1 instead of 39.2 TFLOP/s
# at 64. Not at 32: 27.7 instead of 37.0.
_LONE = {32: None, 64: (128, 128, 256, 16)}


@functools.cache
def pick_few(head_dim: int, shared_limit: int = 48 * KB) -> Tiles | None:
    """Choose the tiles for a launch whose blocks would leave half a GPU idle; None if `pick` has no better ones.

    Raises:
        ValueError: as for `pick`.
    """
    usual = pick(head_dim, shared_limit)
    few = _fitting(_FEW, head_dim, shared_limit, "fewer rows a block: more blocks")
    return few if few and few.block_m < usual.block_m else None


@functools.cache
def pick_lone(head_dim: int, shared_limit: int = 48 * KB) -> Tiles | None:
    """Choose the tiles for a launch with at most one block per multiprocessor; None if `pick` has no better ones.

    Raises:
        ValueError: as for `pick`.
    """
    usual = pick(head_dim, shared_limit)
    lone = _fitting(_LONE, head_dim, shared_limit, "a block that is alone has room for twice the threads")
    return lone if lone and (lone.block_m, lone.threads) == (usual.block_m, 2 * usual.threads) else None


def _fitting(
    table: Mapping[int, tuple[int, int, int, int] | None], head_dim: int, shared_limit: int, why: str
) -> Tiles | None:
    sizes = other_entry(table, head_dim)
    tiles = Tiles(*sizes, why=why) if sizes else None
    return tiles if tiles and tiles.shared_bytes(head_dim) <= shared_limit else None


def _defines(tiles: Tiles | None) -> dict[str, int]:
    return tiles.defines if tiles else {}


def _shared_bytes(sizes: Sizes) -> int:
    tiles = Tiles(sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["THREADS"], sizes["THREADS_X"])
    return tiles.shared_bytes(sizes["HEAD_DIM"])


def vector_loads(call: Call) -> dict[str, int]:
    """Turn off 16-byte loads (VECTOR=0) if rows do not start at multiples of 16 bytes."""
    return {} if call.aligned else {"VECTOR": 0}


def _launch_all_heads(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a grid (tiles of rows, heads of all batches), or several if blockIdx.y cannot hold all heads."""
    batch, heads, n, _ = call.arrays["q"].shape
    scalars = np.int32(n), np.int32(call.arrays["k"].shape[2]), np.float32(call.softmax_scale)
    tiles, most = -(-n // sizes["BLOCK_M"]), (max(launches.MAX_GRID_YZ // heads, 1), launches.MAX_GRID_YZ)
    parts = launches.parts_of_call(("q", "k", "v", "o", *scalars), call, batch, most)
    return [stage.launch((tiles, some * of_each), sizes, args) for some, of_each, args in parts]


_REGISTER_TILED: Mapping[str, Any] = {
    "tuning": Tuning(
        lambda head_dim, shared_limit: pick(head_dim, shared_limit).defines,
        small_grid=lambda head_dim, shared_limit: _defines(pick_few(head_dim, shared_limit)),
        single_wave=lambda head_dim, shared_limit: _defines(pick_lone(head_dim, shared_limit)),
        variant=vector_loads,
    ),
    "threads": lambda sizes: sizes["THREADS"],
    "shared_bytes": _shared_bytes,
    "max_head_dim": MAX_HEAD_DIM,
}
REGISTER_TILES = Stage(
    number=4,
    name="register_tiles",
    file="04_register_tiles.cu",
    idea="a register tile per thread, float4",
    launches=_launch_all_heads,
    **_REGISTER_TILED,
)
HEADS_AND_MASKS = Stage(
    number=5,
    name="heads_and_masks",
    file="05_heads_and_masks.cu",
    idea="strides, masks, lengths: only the tiles that are seen",
    launches=launches.strided,
    slots=launches.in_slots,
    features=PLAIN | FORWARD_EXTRAS,
    **_REGISTER_TILED,
)


def table() -> str:
    """Write in words what `pick` chooses for each limit and head dimension of the table."""
    lines = []
    for limit, gpus in LIMITS.items():
        lines.append(f"{limit // KB} KB: {gpus}")
        for head_dim in sorted({head_dim for head_dim, _ in _MEASURED}):
            tiles = pick(head_dim, limit)
            sizes = " ".join(f"{name}={size}" for name, size in tiles.defines.items())
            lines.append(f"  head_dim <= {head_dim:3}: {sizes:52} {tiles.why}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
