"""The stages of compute capability 9.0 that compute the output: hopper, and fp16x3 for float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder import launches, limits, tiles
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.stage import CallSize, Stage, Tuning
from helpers.attention.ladder.stages import FLOAT, FORWARD_EXTRAS, PLAIN
from helpers.attention.ladder.tiles import Sizes

ON_HOPPER: Mapping[str, Any] = {
    "min_cc": 90,
    "only_cc": True,
    "head_dim_step": 8,
    "threads": lambda sizes: 128 + 2 * sizes["BLOCK_M"],  # a producer warpgroup, and one per 64 rows
    "needs_aligned": True,
}

# ---- the order of tiles, which another kernel writes

ORDER, ORDER_THREADS, ORDER_PACKED_THREADS = "10_order.cu", 256, 1024
MOST_DEALT = 64  # rounds that one block reorders: about a microsecond each
FEWEST_KEYS = 2048  # with fewer, reading K and V again may take longer than balancing gains


def launch_in_order(
    stage: Stage,
    call: Call,
    sizes: Sizes,
    maps: tuple[Any, ...],
    more: tuple[Any, ...] = (),
    *,
    leaves_tiles: bool = False,
    together: int | None = None,
) -> list[Launch]:
    """Launch the kernel that orders tiles, then the stage's own with these tensor maps, and arrays, as inputs.

    more: the stage's own arguments after lse. leaves_tiles: its consumers skip tiles of keys that only other consumers'
    rows see, so tiles of rows are dealt by the sum of their costs. together: heads of Q whose tiles are sorted by
    length together; by default as many as fit the L2 cache.
    """
    block_m, block_n = np.int32(sizes["BLOCK_M"]), np.int32(sizes["BLOCK_N"])
    lse, *cu_seqlens = launches.given(call, "lse", *CU_SEQLENS)
    params, sequences = launches.params_of(call), np.int32(call.sequences)
    rounds, blocks = _rounds_and_blocks(call, sizes)
    if call.packed:
        numbers = np.int32(blocks // call.heads), sequences, block_m, block_n
        args = ("schedule", *cu_seqlens, *numbers, params)
        order = [Launch("order_packed_tiles", (1,), (ORDER_PACKED_THREADS,), 0, args, ORDER)]
    else:
        order = _order(call, sizes, rounds, blocks, leaves_tiles, together)
    before, functions = launches.functions_of_scores(stage, call, sizes)
    joined = _continuation(call) if "lse_so_far" in call.arrays else ()
    main = (*maps, "o", lse, *more, *cu_seqlens, "schedule", np.int32(rounds), params, *functions, *joined)
    return [*before, *order, stage.launch((blocks,), sizes, main)]


def _order(
    call: Call, sizes: Sizes, rounds: int, blocks: int, leaves_tiles: bool, together: int | None
) -> list[Launch]:
    """Launch the kernel that writes the order of tiles, for sequences of equal length."""
    block_m, block_n = np.int32(sizes["BLOCK_M"]), np.int32(sizes["BLOCK_N"])
    of_blocks, params = (np.int32(blocks), np.int32(call.sequences)), launches.params_of(call)

    def launch(name: str, grid: int, threads: int, *numbers: np.int32) -> Launch:
        return Launch(name, (grid,), (threads,), 0, ("schedule", *numbers, params), ORDER, once=True)

    keys = call.arrays["k"].shape[2]
    dealt = leaves_tiles and keys >= FEWEST_KEYS
    if dealt and call.window == (-1, -1):
        return [launch("order_unmasked_tiles", rounds, ORDER_THREADS, *of_blocks, block_m)]
    dealt &= rounds <= MOST_DEALT
    in_group = np.int32((together or _fit(call)) if dealt else heads_together(call, sizes))
    order = launch("order_tiles", rounds, ORDER_THREADS, *of_blocks, in_group, block_m, block_n)
    threads = -(-blocks // 32) * 32
    deal = launch("deal_tiles", 1, threads, np.int32(rounds), of_blocks[0], block_m, block_n)
    return [order, deal] if dealt else [order]


def _fit(call: Call) -> int:
    """Count the heads of Q that fit the L2 cache, see `heads_that_fit`."""
    k = call.arrays["k"]
    of_head = 2 * k.dtype.itemsize * k.shape[2] * k.shape[3]
    return heads_that_fit(of_head, call.heads // k.shape[1], call.heads * call.sequences)


def _continuation(call: Call) -> tuple[Any, ...]:
    """Return the arguments of ring_continue.cuh."""
    lse, rows = call.arrays["lse_so_far"], call.arrays["q"].shape[2]
    still_open = call.arrays["o_after"].shape[1] if "o_after" in call.arrays else 0
    arrays = launches.given(call, "o_before", "o_after", "lse_so_far")
    return *arrays, np.int32(lse.strides[1] // lse.dtype.itemsize), np.int32(rows - still_open)


def schedule(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Describe the array in which 10_order.cu writes each block's tile in each round: int32 (rounds, blocks, 4)."""
    return {"schedule": Spec.dense((*_rounds_and_blocks(call, sizes), 4), np.int32)}


def _rounds_and_blocks(call: Call, sizes: Sizes) -> tuple[int, int]:
    rows = call.arrays["q"].shape[2]
    if call.packed:
        rounds, blocks = 1, launches.slots(call, "q", sizes["BLOCK_M"]) * call.heads
    else:
        items = -(-rows // sizes["BLOCK_M"]) * call.heads * call.sequences
        blocks = min(items, limits.persistent_blocks())
        rounds = -(-items // blocks)
    if blocks * rounds >= 2**27:
        raise ValueError(f"{blocks * rounds:,} tiles of rows; one launch takes 134,217,727 at most")
    return rounds, blocks


def heads_together(call: Call, sizes: Sizes) -> int:
    """Return how many heads of Q are worked on together, longest tiles first.

    Without a mask all tiles take the same time, so that a head's tiles may follow each other.
    """
    if call.window == (-1, -1):
        return 1
    _, heads, rows, _ = call.arrays["q"].shape
    _, kv_heads, keys, head_dim = call.arrays["k"].shape
    more = -rows % sizes["BLOCK_M"]  # to whole tiles: then most lengths share a plan
    of_head = rows + more, keys + more, head_dim, call.window, sizes["BLOCK_M"], sizes["BLOCK_N"]
    return group_of_heads(heads * call.sequences, heads // kv_heads, *of_head, limits.persistent_blocks())


@functools.lru_cache(maxsize=1024)
def group_of_heads(
    heads: int,
    share: int,
    rows: int,
    keys: int,
    head_dim: int,
    window: tuple[int, int],
    block_m: int,
    block_n: int,
    blocks: int,
) -> int:
    """Choose how many heads of Q to work on together: of a few numbers the one whose blocks finish first.

    With more heads K and V are read again later, which at few keys takes longer than it evens out: at N = 512 groups of
    one and a half rounds are 1.2 times as fast on an H100 as those whose K and V fill 32 MB of the L2 cache.

    Args:
        heads: of all sequences. share: heads of Q for each of K and V. rows, keys: of a head. window: keys to the left
            and right, -1 for all. blocks: that take tiles.
    """
    left, right = (keys if side < 0 else side for side in window)
    row_tiles, head_bytes = -(-rows // block_m), 4 * min(keys, left + right + block_m) * head_dim
    fit = heads_that_fit(head_bytes, share, heads)
    if row_tiles == 1 or row_tiles * heads > 8192:  # all alike, or too many to deal in tens of microseconds
        return fit - 1 if fit > 1 and fit * row_tiles % (2 * blocks) == blocks else fit
    first = np.arange(row_tiles) * block_m + keys - rows
    seen = np.minimum(first + block_m + right, keys) - np.maximum(first - left, 0)
    # Key tiles, and what each tile of rows costs; the longest first.
    work = np.sort(1 + np.maximum(-(-seen // block_n), 1))[::-1]

    def time(together: int) -> float:
        again = 0.008 * together / share * head_bytes / 2**20 * min(1, 512 / keys)  # measured on an H100
        return longest_block(work, heads, together, blocks) / work.sum() / heads * blocks + again

    rounds = (max(round(many * blocks / row_tiles / share), 1) * share for many in (1.33, 1.45, 1.95, 2.67))
    return min({fit, *(few for few in rounds if few < fit)}, key=time)


def heads_that_fit(head_bytes: int, share: int, heads: int) -> int:
    """Count the heads of Q whose K and V fill 32 MB of the L2 cache, at least those that share one of K and V.

    Args:
        head_bytes: of K and V of a head. share: heads of Q for each of K and V. heads: all heads of Q.
    """
    return min(max(32 * 2**20 // head_bytes, 1) * share, heads)


def longest_block(work: np.ndarray, heads: int, together: int, blocks: int) -> float:
    """Return the work of the block that gets the most, as order_tiles of 10_order.cu deals the tiles.

    Args:
        work: of each tile of rows of a head, the longest first.
    """
    tile = np.arange(len(work) * heads)
    turn, block = tile // blocks, tile % blocks
    dealt = np.where(turn % 2, blocks - 1 - block, block)
    return float(np.bincount(dealt, in_order(work, heads, together)).max())


def in_order(work: np.ndarray, heads: int, together: int) -> np.ndarray:
    """Return the work of the tiles of all heads, in the order of order_tiles. work: as for `longest_block`."""
    row_tiles = len(work)
    tile, groups = np.arange(row_tiles * heads), -(-heads // together)
    group = tile // (row_tiles * together)
    first = group * together
    place = (tile - row_tiles * first) // np.minimum(together, heads - first)
    return work[np.where((groups - 1 - group) % 2, row_tiles - 1 - place, place)]


# ---- 10: TMA, wgmma, warp specialisation

# By head_dim, without a mask and with one: BLOCK_M, BLOCK_N. A mask wastes less of a narrower tile.
_HOPPER: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {
    64: ((192, 128), (192, 128)),
    96: ((128, 144), (128, 128)),
    128: ((128, 160), (128, 128)),
    192: ((128, 96), (128, 96)),
    256: ((128, 64), (128, 64)),
}
_FEW_KEYS = 1024  # up to here the last of the wide tiles would be a large part of the work
# At 512 keys, causal, head_dim 64, two blocks per multiprocessor, with one consumer of 64 rows each, take 0.99 to 1.06
# of the time on an H200: not enough gain for a separate tile.
HOPPER_STAGES = 2


@functools.cache
def pick_hopper(head_dim: int, masked: bool = False, keys: int | None = None) -> dict[str, int]:
    """Choose the -D options of hopper.

    Args:
        masked: causal, or a window. keys: N_kv; None for many.
    """
    block_m, block_n = tiles.entry(_HOPPER, head_dim)[masked]
    if keys is not None and keys <= _FEW_KEYS:
        block_n = min(block_n, 128)
        block_m = 128 if masked else block_m
    elif keys is not None and block_n == 160 and 1.04 * (-(-keys // 176) * 176) <= -(-keys // 160) * 160:
        block_n = 176  # takes 1.016 times as long per key, and saves a tile here, as at 2112 keys
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


def _sizes_with_functions(head_dim: int, *, masked: bool, biased: bool) -> dict[str, int]:
    """Choose the tile for functions of scores, which need registers. masked: by a mask_mod. biased: by an array."""
    if head_dim <= 64 and not masked:
        return {"BLOCK_M": 192, "BLOCK_N": 96 if biased else 128}
    return {"BLOCK_M": 128, "BLOCK_N": 128} if head_dim <= 128 else pick_hopper(head_dim, masked=True)


TALL = {"BLOCK_M": 192, "BLOCK_N": 64}  # three consumers share a tile of keys
# Their time relative to the usual tiles for the same number of scores: at head_dim 128, and below, where they are
# slower.
_TALL_TIME, _TALL_TIME_BELOW = 0.957, 0.8
_TILE_KEYS = 128  # the time between two tiles of rows, in keys per tile of rows


def _takes_tall_tiles(call: Call) -> bool:
    """Choose tiles of 192 rows for head_dims of 97 to 128, if the block with the most work ends earlier.

    More of their rows may be past the end, a causal mask leaves them more scores that no row sees, and the last round,
    in which some blocks have no tile, is longer. The study tall_tiles measures both kinds, and this rule's loss.
    """
    (*_, rows, _), (*_, keys, _) = call.arrays["q"].shape, call.arrays["k"].shape
    if call.packed or not 96 < call.head_dim <= 128 or keys < 768 or call.window not in ((-1, -1), (-1, 0)):
        return False
    masked, heads = call.window == (-1, 0), call.heads * call.sequences
    usual = pick_hopper(call.head_dim, masked, keys)
    of_call = heads, call.heads // call.arrays["k"].shape[1], call.head_dim, limits.persistent_blocks()

    def longest(sizes: Mapping[str, int]) -> float:
        block_m = sizes["BLOCK_M"]
        more = -rows % block_m  # to whole tiles: then most lengths share a plan
        return _most_scores(rows + more, keys + more * masked, masked, block_m, sizes["BLOCK_N"], *of_call)

    return (_TALL_TIME if call.head_dim == 128 else _TALL_TIME_BELOW) * longest(TALL) <= longest(usual)


@functools.lru_cache(maxsize=1024)
def _most_scores(
    rows: int,
    keys: int,
    masked: bool,
    block_m: int,
    block_n: int,
    heads: int,
    share: int,
    head_dim: int,
    blocks: int,
) -> float:
    """Return the largest number of scores that a block computes, counting _TILE_KEYS extra keys per row.

    Args: see `group_of_heads`.
    """
    row_tiles = rows // block_m
    if not masked:
        return block_m * (_TILE_KEYS + -(-keys // block_n) * block_n) * -(-row_tiles * heads // blocks)
    seen = np.arange(row_tiles, 0, -1) * block_m + keys - rows
    scores = block_m * (_TILE_KEYS + np.maximum(-(-seen // block_n), 1) * block_n)
    if row_tiles * heads > 8192:
        return float(scores.sum()) * heads / blocks
    window = (-1, 0)
    together = group_of_heads(heads, share, rows, keys, head_dim, window, block_m, block_n, blocks)
    return longest_block(scores, heads, together, blocks)


def _hopper_variant(call: Call) -> dict[str, int]:
    """Choose the tile for the call's mask and sizes, or for its functions of scores."""
    keys, (left, right) = call.rows if call.packed else call.arrays["k"].shape[2], call.window
    if left >= 0 and right >= 0:
        keys = min(keys, left + right + 1)  # the keys that a row sees
    if call.mod:
        return _sizes_with_functions(call.head_dim, masked=bool(call.mod.mask), biased="bias" in call.arrays)
    return dict(TALL) if _takes_tall_tiles(call) else pick_hopper(call.head_dim, call.window != (-1, -1), keys)


def mbarrier_bytes(sizes: Sizes, tiles: int) -> int:
    """Count the bytes of mbarriers: two of Q for each consumer warpgroup, two for each tile of K or V."""
    return 8 * 2 * (sizes["BLOCK_M"] // 64 + tiles)


def hopper_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of hopper: Q, STAGES tiles each of K and V, in panels of 64 columns; one of O; mbarriers."""
    stages = sizes.get("STAGES", HOPPER_STAGES)
    row = 128 * -(-sizes["HEAD_DIM"] // 64)
    tiles_of_q_k_v = row * (sizes["BLOCK_M"] + 2 * stages * sizes["BLOCK_N"])
    return tiles_of_q_k_v + 128 * sizes["BLOCK_M"] + mbarrier_bytes(sizes, 2 * stages)


def _hopper_by_default(size: CallSize) -> bool:
    """Choose it where it is faster than flash_mma on an H200: not for little work, for which that has smaller tiles.

    In 372 small shapes the choice takes 1.008 times as long as the faster of the two, on average; by the number of rows
    alone it was 1.08. Flash_mma is faster with short packed sequences, and at head_dim 64 with functions of scores.

    Nor on the CPU engine, which reports compute capability 9.0: there, calls that name no stage get flash_mma, as on
    every GPU except Hopper, so that notebooks' outputs are the same everywhere.
    """
    if size.head_dim > 64:
        enough = size.rows >= 512 or (size.rows >= 128 and size.all_rows > 8448 and not size.packed)
        return device.ON_GPU and enough and (size.all_rows >= 16384 or not size.functions)
    if size.functions or size.head_dim <= 32 or size.packed:
        return device.ON_GPU and size.rows >= (1024 if size.packed else 512) and size.all_rows >= 32768
    return device.ON_GPU and size.all_rows >= (16384 if size.rows >= 512 else 49152) and size.rows >= 128


def qkv_maps(sizes: Sizes) -> tuple[Map, ...]:
    """Name the tensor maps of Q, by the 64 rows of a warpgroup, and of K and V, by tiles."""
    return Map("q", 64), Map("k", sizes["BLOCK_N"]), Map("v", sizes["BLOCK_N"])


def persistent(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a block per multiprocessor, which takes one tile of rows after the other; arrays as tensor maps.

    Another kernel writes the order of tiles. If sequences are packed, each tile is a block: see 10_order.cu.
    """
    return launch_in_order(stage, call, sizes, qkv_maps(sizes))


HOPPER = Stage(
    number=10,
    name="hopper",
    file="10_hopper.cu",
    idea="FlashAttention-3: TMA, wgmma, a producer and two consumers",
    tuning=Tuning(
        lambda head_dim, shared_limit: pick_hopper(head_dim), variant=_hopper_variant, by_default=_hopper_by_default
    ),
    launches=persistent,
    scratch=schedule,
    features=PLAIN | FORWARD_EXTRAS | FLOAT | {"continues"},
    dtypes=("float16", "bfloat16"),
    max_head_dim=256,
    shared_bytes=hopper_shared_bytes,
    **ON_HOPPER,
)

# ---- 15: float32 by three products of fp16

# By head_dim: keys per tile, and the number of tiles of K and V, in two parts each, that fit shared memory. On an H200,
# at 4096 rows, fewer keys were slower; with more, the scores and two accumulators of O would spill.
_FP16X3: dict[int, dict[str, int]] = {
    64: {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 5},
    96: {"BLOCK_M": 128, "BLOCK_N": 80, "STAGES": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 5},
}
SPLIT_THREADS, SPLIT_ROWS = 256, 64  # of 15_fp16x3.cu; the rows of Q that share an exponent


@functools.cache
def pick_fp16x3(head_dim: int) -> dict[str, int]:
    """Choose the -D options of fp16x3."""
    return dict(tiles.entry(_FP16X3, head_dim))


def fp16x3_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of fp16x3: Q and STAGES tiles of K and V, each in two parts, in panels; mbarriers."""
    row = 2 * 128 * -(-sizes["HEAD_DIM"] // 64)
    tiles_of_q_k_v = row * (sizes["BLOCK_M"] + sizes["STAGES"] * sizes["BLOCK_N"])
    return tiles_of_q_k_v + mbarrier_bytes(sizes, sizes["STAGES"])


def _split_and_multiply(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch a block for each tile of Q, K and V to split it into two parts; then like hopper, with maps of these."""
    of_q, of_kv = _exponents(call, sizes)
    parts, exponents = ("q_split", "k_split", "v_split"), ("q_exponents", "kv_exponents")
    args = "q", "k", "v", *parts, *exponents, *launches.given(call, *CU_SEQLENS), launches.params_of(call)
    split = Launch(stage.kernels[0], (of_q + 2 * of_kv,), (SPLIT_THREADS,), 0, args)
    rows = SPLIT_ROWS, sizes["BLOCK_N"], sizes["BLOCK_N"]
    return [split, *launch_in_order(stage, call, sizes, (*map(Map, parts, rows), *exponents))]


def _fp16x3_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch arrays: hi and lo of each batch of Q, K and V, their tiles' exponents, and the schedule."""
    scratch = schedule(call, sizes)
    for name in "qkv":
        batch, *others = call.arrays[name].shape
        scratch[f"{name}_split"] = Spec.dense((2 * batch, *others), np.float16)
    of_q, of_kv = _exponents(call, sizes)
    return scratch | {"q_exponents": Spec.dense((of_q,), np.int32), "kv_exponents": Spec.dense((of_kv, 2), np.int32)}


def _exponents(call: Call, sizes: Sizes) -> Iterator[int]:
    """Yield the number of scale exponents for Q, then for K and V, over all heads and sequences."""
    for name, block in (("q", SPLIT_ROWS), ("k", sizes["BLOCK_N"])):
        batch, heads, rows, _ = call.arrays[name].shape
        yield batch * heads * (launches.slots(call, name, block) if call.packed else -(-rows // block))


FP16X3 = Stage(
    number=15,
    name="fp16x3",
    file="15_fp16x3.cu",
    idea="float32 by wgmma: three products of fp16, a scale for each tile",
    # Only by name: float32 is chosen for its accuracy, some of which this loses if a tile spans over 16 bits or so.
    tuning=Tuning(lambda head_dim, shared_limit: pick_fp16x3(head_dim), by_default=lambda size: False),
    launches=_split_and_multiply,
    scratch=_fp16x3_scratch,
    kernels=("fp16x3_split", "fp16x3"),
    features=PLAIN | FORWARD_EXTRAS,
    shared_bytes=fp16x3_shared_bytes,
    **ON_HOPPER,
)
