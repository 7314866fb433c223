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
    FEWEST_KEYS,
    MOST_DEALT,
    ON_HOPPER,
    in_order,
    launch_in_order,
    mbarrier_bytes,
    schedule,
)
from helpers.attention.ladder.tiles import Sizes

TRANSPOSE, TRANSPOSE_THREADS, CLEAR_THREADS = "16_transpose.cu", 128, 256
BACKGROUND = "16_background.cu"
LEAVE_TILES = ("16_fp8.cu", "steps/16_03_codes.cu")  # their consumers do not compute tiles of keys that they do not see
STAGES = 2
ONES = 8  # rows of V^T after its columns: one of ones, which sums the weights, and seven of zeros

# By head_dim: BLOCK_M and BLOCK_N. O of a tile of keys has its own accumulators.
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
    background = transpose_shared_bytes(sizes) + _raw_bytes(sizes) + 2 * 16 if sizes.get("BACKGROUND") else 0
    return tiles_of_q_k_v + mbarrier_bytes(sizes, 2 * stages) + background


def transpose_shared_bytes(sizes: Sizes) -> int:
    """Count TRANSPOSE_BYTES of v_transpose.cuh: a panel of V, and its V^T."""
    return _raw_bytes(sizes) + _panel_keys(sizes) * (sizes["HEAD_DIM"] + ONES)


def _raw_bytes(sizes: Sizes) -> int:
    """Count RAW_BYTES of v_transpose.cuh: a panel of V, whose rows have an odd number of 16-byte chunks."""
    return _panel_keys(sizes) * (sizes["HEAD_DIM"] // 16 | 1) * 16


def _transpose_and_attend(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a block for each tile of V, which transposes it; then like hopper, with these tiles for V's map."""
    cu_seqlens_k, params = launches.given(call, "cu_seqlens_k"), launches.params_of(call)
    panels, kv_heads = _v_tiles(call, sizes) * (sizes["BLOCK_N"] // _panel_keys(sizes)), call.arrays["v"].shape[1]
    of_transpose = tuple((name, sizes[name]) for name in ("HEAD_DIM", "BLOCK_N"))
    inputs = Map("q", 64), Map("k", sizes["BLOCK_N"]), "v_image"
    descales, leaves = launches.given(call, *DESCALES), stage.file in LEAVE_TILES

    def transpose(heads: int, sequences: int) -> Launch:
        args, shared = ("v", "v_image", *cu_seqlens_k, params), transpose_shared_bytes(sizes)
        grid = panels, heads, sequences
        return Launch("transpose_v", grid, (TRANSPOSE_THREADS,), shared, args, TRANSPOSE, of_transpose)

    if sizes.get("BACKGROUND"):
        together = heads_together(call, sizes)
        *order, main = launch_in_order(stage, call, sizes, inputs, descales, leaves_tiles=leaves, together=together)
        heads_of_v, together_of_v = call.sequences * kv_heads, max(together * kv_heads // call.heads, 1)
        before = heads_before(call, together_of_v)
        args = "v_counts", np.int32(_counts(call, sizes))
        clear = Launch("clear_counts", (1,), (CLEAR_THREADS,), 0, args, TRANSPOSE, of_transpose, once=True)
        args = *main.args, "v", "v_counts", *map(np.int32, (heads_of_v, together_of_v, before))
        name = stage.kernel_name(call.arrays["o"].dtype.name)
        main = main._replace(kernel=name, args=args, file=BACKGROUND, sizes=tuple(sizes.items()))
        return [clear, *order, *([transpose(before, 1)] if before else []), main]
    order_and_main = launch_in_order(stage, call, sizes, inputs, descales, leaves_tiles=leaves)
    return [transpose(kv_heads, 1 if call.packed else call.sequences), *order_and_main]


# For the background: V^T has to be there in time, so a head of V needs as many tiles of rows; under a causal mask,
# a head of Q twice as many.
FEWEST_TILES = 10
# On an H200, V's transposition before the launch takes so many keys' part of the time of a causal call.
_TRANSPOSITION_KEYS = 360


def _in_background(call: Call) -> bool:
    """Decide whether the kernel transposes V itself, but for its first tiles. Up to 64 columns an H200 lost by it."""
    if call.packed or call.window not in ((-1, -1), (-1, 0)) or call.head_dim <= 64:
        return False
    tiles_of_rows = -(-call.rows // pick_fp8(call.head_dim)["BLOCK_M"])
    of_v = tiles_of_rows * call.heads // call.arrays["v"].shape[1]
    dealt = -(-tiles_of_rows * call.heads * call.sequences // limits.persistent_blocks()) <= MOST_DEALT
    enough = of_v >= FEWEST_TILES if call.window == (-1, -1) else tiles_of_rows >= 2 * FEWEST_TILES
    if not enough or call.arrays["k"].shape[2] < FEWEST_KEYS:
        return False
    if call.window == (-1, -1):
        return True
    return dealt and heads_together(call, pick_fp8(call.head_dim)) < call.heads * call.sequences


def heads_together(call: Call, sizes: Sizes) -> int:
    """Return how many heads of Q are needed at the same time if V is transposed in the background.

    Without a mask, those of a round. With one, the tiles of so many heads are sorted by length together.
    """
    heads, blocks = call.heads * call.sequences, limits.persistent_blocks()
    rows, keys = (call.arrays[name].shape[2] for name in "qk")
    if call.window == (-1, -1):
        return min(-(-blocks // -(-rows // sizes["BLOCK_M"])), heads)
    share, more = call.heads // call.arrays["k"].shape[1], -rows % sizes["BLOCK_M"]
    # To whole tiles: then most lengths share a plan.
    return _causal_together(heads, share, rows + more, keys + more, sizes["BLOCK_M"], sizes["BLOCK_N"], blocks)


def heads_before(call: Call, together: int) -> int:
    """Return how many heads of V are transposed before the launch. Without a mask, their first tiles come in time."""
    return 0 if call.window == (-1, -1) else together


@functools.lru_cache(maxsize=1024)
def _causal_together(heads: int, share: int, rows: int, keys: int, block_m: int, block_n: int, blocks: int) -> int:
    """Choose how many heads of Q have their tiles sorted together: V of so many is transposed before the launch.

    Of the numbers that fill one round to four, the one for which this transposition and the block with the most work
    take the least time.

    Args:
        heads: of all sequences. share: heads of Q for each of K and V. rows: of a head, in whole tiles. keys: of a
            head. blocks: that take tiles.
    """
    work = work_of_tiles(rows, keys, block_m, block_n)
    fewest = -(-9 * blocks // (10 * len(work) * share)) * share
    transposition = _TRANSPOSITION_KEYS / keys / share

    def time(together: int) -> float:
        most = most_work(in_order(work, heads, together), blocks)
        return most * blocks / (work.sum() * heads) + transposition * together / heads

    return min(range(min(fewest, heads), min(4 * fewest, heads) + 1, share), key=time)


def work_of_tiles(rows: int, keys: int, block_m: int, block_n: int) -> np.ndarray:
    """Return what each tile of rows costs under a causal mask, the longest first, as work_of of 10_order.cu."""
    consumers, last = block_m // 64, np.arange(64, rows + 1, 64) + keys - rows
    tiles = np.maximum(-(-last // block_n), 1).reshape(-1, consumers)
    return (consumers * tiles.max(1) + tiles.sum(1) + 2 * consumers)[::-1]


def most_work(work: np.ndarray, blocks: int) -> int:
    """Return the work of the block that gets the most, as deal_tiles of 10_order.cu deals tiles in this order."""
    so_far = np.zeros(blocks, int)
    for of_round in np.pad(work, (0, -len(work) % blocks)).reshape(-1, blocks):
        so_far[np.argsort(so_far, kind="stable")] += -np.sort(-of_round)
    return int(so_far.max())


def _counts(call: Call, sizes: Sizes) -> int:
    """Count the counters of v_background.cuh, and the three that may be cleared after them."""
    batch, heads, *_ = call.arrays["v"].shape
    return 2 + batch * heads * (1 + _v_tiles(call, sizes)) + 3


def variant_of_descales(call: Call) -> dict[str, int]:
    """Return the -D options for descales of blocks of rows: a tile of keys has one."""
    blocks = any(name in call.arrays and call.arrays[name].ndim == 3 for name in DESCALES)
    return {"DESCALE_ROWS": DESCALE_ROWS, "BLOCK_N": DESCALE_ROWS} if blocks else {}


def _variant(call: Call) -> dict[str, int]:
    """Return the -D options for a call. Steps have only those for descales: their files do not transpose V."""
    return variant_of_descales(call) or ({"BACKGROUND": 1} if _in_background(call) else {})


def _panel_keys(sizes: Sizes) -> int:
    """Return KEY_BYTES: the keys of a panel of V^T, and its bytes in a row."""
    return next(keys for keys in (128, 64, 32) if sizes["BLOCK_N"] % keys == 0)


def _v_tiles(call: Call, sizes: Sizes) -> int:
    """Count a head's tiles of V: in one sequence, or in all packed ones."""
    keys, block = call.arrays["v"].shape[2], sizes["BLOCK_N"]
    return launches.slots(call, "v", block) if call.packed else -(-keys // block)


def _fp8_scratch(call: Call, sizes: Sizes) -> Mapping[str, Spec]:
    """Return the scratch arrays: V^T in tiles, and the schedule."""
    batch, heads, _, head_dim = call.arrays["v"].shape
    shape = batch * heads, _v_tiles(call, sizes), sizes["BLOCK_N"] * (head_dim + ONES)
    counts = {"v_counts": Spec.dense((_counts(call, sizes),), np.int32)} if sizes.get("BACKGROUND") else {}
    return {**schedule(call, sizes), "v_image": Spec.dense(shape, np.uint8), **counts}


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
