"""The stages that compute gradients: backward in float32, backward_mma and hopper_backward in half types."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.ladder import launches, limits, tiles
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.params import GRADIENTS, backward_params
from helpers.attention.ladder.stage import C_NAMES, CallSize, Stage, Tuning
from helpers.attention.ladder.stages import FLOAT, PLAIN
from helpers.attention.ladder.stages.cuda_cores import vector_loads
from helpers.attention.ladder.stages.tensor_cores import WARPS_OF_MMA
from helpers.attention.ladder.tiles import MAX_HEAD_DIM, Sizes, Tiles

_GRADIENTS: Mapping[str, Any] = {"direction": "backward", "slots": launches.in_slots}


def params_of_gradients(call: Call, sequences: int | None = None) -> Any:
    """Fill the call's BackwardParams, an array of shape (1,). sequences: see `launches.params_of`."""
    return backward_params(launches.params_of(call, sequences), launches.strides_of(call, GRADIENTS))


# ---- 08: float32

# By head_dim: the first that fits is used.
_BACKWARD: dict[int, tuple[Tiles, ...]] = {
    32: (Tiles(64, 64, 128, 8), Tiles(64, 32, 128, 8)),
    64: (Tiles(64, 128, 256, 16), Tiles(64, 64, 128, 8), Tiles(32, 32, 64, 8)),
    96: (Tiles(64, 64, 128, 8), Tiles(32, 64, 128, 16), Tiles(32, 32, 128, 16), Tiles(16, 16, 64, 16)),
    128: (
        *(Tiles(64, 96, 256, 16), Tiles(64, 64, 256, 16), Tiles(32, 48, 128, 16)),
        *(Tiles(16, 32, 128, 32), Tiles(16, 16, 64, 16)),
    ),
    256: (Tiles(32, 32, 256, 32), Tiles(16, 16, 64, 16)),
}
# If a multiprocessor can hold two such blocks: 35.4 instead of 33.8 TFLOP/s on an H200, at 4 x 16 heads of 4096 rows.
_BACKWARD_PAIRS = {32: None, 64: Tiles(32, 128, 128, 16)}
# If a launch has few blocks: fewer keys per block. On an H200 each of these blocks gets its own multiprocessor, and
# runs at the rate that the tile reaches with all of them: 29.2 TFLOP/s at 64, 29.0 at 128. One head of 4096 rows has 64
# such blocks instead of 32 at 64, 86 instead of 43 at 128.
_BACKWARD_FEW = {32: None, 64: Tiles(64, 64, 256, 16), 96: None, 128: Tiles(64, 48, 256, 16)}


@functools.cache
def pick_backward(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of backward."""
    choices = [each.defines for each in tiles.entry(_BACKWARD, head_dim)]
    usual = tiles.first_that_fits(choices, backward_shared_bytes, head_dim, shared_limit)
    pair = tiles.other_entry(_BACKWARD_PAIRS, head_dim)
    if pair is None:
        return usual
    shared = backward_shared_bytes({**pair.defines, "HEAD_DIM": head_dim})
    return pair.defines if tiles.blocks_in_shared_memory(shared, shared_limit) >= 2 else usual


@functools.cache
def pick_few_backward(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the tiles for a launch whose blocks would leave half a GPU idle; empty if there are no better ones."""
    usual, few = pick_backward(head_dim, shared_limit), tiles.other_entry(_BACKWARD_FEW, head_dim)
    if few is None or few.block_n >= usual["BLOCK_N"]:
        return {}
    return few.defines if backward_shared_bytes({**few.defines, "HEAD_DIM": head_dim}) <= shared_limit else {}


def backward_shared_bytes(sizes: Sizes) -> int:
    """Count sizeof(Shared) of backward: Q, dO, K, V and P, with their padding, and two numbers per row."""
    rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
    row = -(-sizes["HEAD_DIM"] // 4) | 1  # in float4
    return 16 * 2 * (rows + keys) * row + 4 * keys * (rows + 8) + 8 * rows


def _launch_backward(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch for delta and zeros, then for dK, dV and dQ by tiles of keys; deterministic dQ by tiles of rows."""
    params = params_of_gradients(call)
    before, functions = launches.functions_of_scores(stage, call, sizes)
    inputs = "q", "k", "v", "do", "lse", "delta"
    more = *launches.given(call, *CU_SEQLENS), params, *functions
    # A warp computes a row of delta, whatever its sequence. Packed sequences are one batch here.
    batch, heads, n, _ = call.arrays["q"].shape
    each_row = -(-n // (stage.threads(sizes) // 32)), heads, batch
    adds = None if call.deterministic else "dq"
    own = [
        stage.launch(each_row, sizes, ("o", "do", "delta", adds, params), "backward_preprocess"),
        stage.launch(launches.tile_grid(call, "k", sizes), sizes, (*inputs, adds, "dk", "dv", *more), "backward"),
    ]
    if call.deterministic:
        own.append(stage.launch(launches.tile_grid(call, "q", sizes), sizes, (*inputs, "dq", *more), "backward_dq"))
    return [*before, *(part for launch in own for part in launches.split_to_grid_limit(launch, call))]


def _delta_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch array delta: a number per row and head, in lse's layout."""
    return {"delta": Spec.dense(call.arrays["q"].shape[:3], np.float32)}


BACKWARD_FLOAT = Stage(
    number=8,
    name="backward",
    file="08_backward.cu",
    idea="the gradients: P again from lse, five products or seven",
    tuning=Tuning(pick_backward, pick_few_backward, variant=vector_loads),
    launches=_launch_backward,
    scratch=_delta_scratch,
    kernels=("backward_preprocess", "backward", "backward_dq"),
    features=PLAIN | {"deterministic", "mod"},
    max_head_dim=MAX_HEAD_DIM,
    threads=lambda sizes: sizes["THREADS"],
    shared_bytes=backward_shared_bytes,
    **_GRADIENTS,
)

# ---- three launches and their scratch, in half types


def _launch_in_half(stage: Stage, call: Call, sizes: Sizes, inputs: tuple[Any, ...]) -> list[Launch]:
    """Plan the three launches for gradients in half types, after the one for a block mask if it is needed.

    Only the second kernel has dynamic shared memory. Steps before DETERMINISTIC have no scratch array "dq_semaphore",
    and their kernels do not take it. A call with more heads or batches than a grid has room for is split into parts,
    which use the same scratch one after the other. With FIRST_STORES=1 the first kernel does not clear dq_accum. With
    PERSISTENT=1 the second has a block for each multiprocessor, and the struct the number of sequences. With
    GROUP_SPLITS its dk and dv are parts of sums, which a launch after the three adds.

    Args:
        inputs: the first arguments of the second kernel, in its order: names or tensor maps of q, k, v and do.

    Raises:
        ValueError: more heads of q share a KV head than a grid can hold.
    """
    group, most = call.heads // call.arrays["k"].shape[1], launches.MAX_GRID_YZ
    if group > most:
        raise ValueError(f"{group:,} heads of q share one of k and v; gradients take {most:,} at most")
    splits = sizes.get("GROUP_SPLITS", 1)
    params = params_of_gradients(call, call.sequences if sizes.get("PERSISTENT") else None)
    of_keys, dk_dv, added = (params, ("dk", "dv"), []) if splits == 1 else _split(call, sizes, params)
    cu_q, cu_k = launches.given(call, *CU_SEQLENS)
    row_tiles, (n_tiles, kv_heads, grid_z) = (launches.tile_grid(call, name, sizes) for name in "qk")
    key_tiles = n_tiles, kv_heads * splits, grid_z
    block = (stage.threads(sizes),)
    scratch = tuple(name for name in stage.scratch(call, sizes) if name not in SPLITS)
    cleared = [None if sizes.get("FIRST_STORES") and name == "dq_accum" else name for name in scratch]
    before, functions = launches.functions_of_scores(stage, call, sizes)
    first, _, last = stage.kernels
    if sizes.get("PERSISTENT"):
        key_tiles = min(math.prod(key_tiles), limits.persistent_blocks()), 1, 1
    own = (
        Launch(first, row_tiles, block, 0, ("o", "do", "lse", *cleared, cu_q, params)),
        stage.launch(key_tiles, sizes, (*inputs, *scratch, *dk_dv, cu_q, cu_k, of_keys, *functions)),
        Launch(last, row_tiles, block, 0, ("dq_accum", "dq", cu_q, params)),
    )
    each_in_parts = (launches.split_to_grid_limit(launch, call, most) for launch in own)
    return [*before, *(launch for part in zip(*each_in_parts, strict=True) for launch in part), *added]


# ---- blocks that share the heads of a group

SPLITS = ("dk_splits", "dv_splits")
_SUM_FILE, _SUM_THREADS = "08_sum_splits.cu", 256


def _split(call: Call, sizes: Sizes, params: Any) -> tuple[Any, tuple[str, str], list[Launch]]:
    """Return what blocks that share heads take: the struct, the names of dk and dv; and the launch that adds these.

    Args:
        params: the struct of the call.
    """
    splits, (batch, kv_heads, keys, d) = sizes["GROUP_SPLITS"], call.arrays["k"].shape
    arrays = {**call.arrays, **dict(zip(("dk", "dv"), _split_scratch(call, sizes).values(), strict=True))}
    of_keys = backward_params(params["forward"].copy(), launches.strides_of(call._replace(arrays=arrays), GRADIENTS))
    of_keys["forward"]["kv_heads"] *= splits
    compiled = {"HEAD_DIM": d, "GROUP_SPLITS": splits, "THREADS": _SUM_THREADS}
    name = f"sum_splits<{C_NAMES[call.arrays['dk'].dtype.name]}>"
    grid = -(-keys * (d // 8) // _SUM_THREADS), kv_heads, batch
    args = (*SPLITS, "dk", "dv", params)
    add = Launch(name, grid, (_SUM_THREADS,), 0, args, _SUM_FILE, tuple(compiled.items()))
    return of_keys, SPLITS, [add]


def _split_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch arrays dk and dv in float32 of all blocks that share heads, if there are some."""
    if sizes.get("GROUP_SPLITS", 1) == 1:
        return {}
    batch, kv_heads, keys, d = call.arrays["dk"].shape
    return dict.fromkeys(SPLITS, Spec.dense((batch, kv_heads * sizes["GROUP_SPLITS"], keys, d), np.float32))


def backward_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch arrays for each tile of rows and head: lse and delta, dQ in float32, a semaphore.

    After the semaphores, a number counts blocks.
    """
    rows, block_m = call.arrays["q"].shape[2], sizes["BLOCK_M"]
    of_a_head = launches.slots(call, "q", block_m) if call.packed else call.sequences * -(-rows // block_m)
    count = call.heads * of_a_head
    # Columns of dq_accum: whole fragments of 16 for each warp along them; in hopper_backward whole panels of 64.
    columns = 16 * (sizes["WARPS"] // sizes["WARPS_DQ"]) if "WARPS" in sizes else 64
    return {
        "lse_delta": Spec.dense((count, 2 * block_m), np.float32),
        "dq_accum": Spec.dense((count, block_m * tiles.round_up(sizes["HEAD_DIM"], columns)), np.float32),
        "dq_semaphore": Spec.dense((count + 1,), np.int32),
        **_split_scratch(call, sizes),
    }


def without_semaphores(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch arrays of `backward_scratch` without the semaphores, for sums in any order."""
    return {name: spec for name, spec in backward_scratch(call, sizes).items() if name != "dq_semaphore"}


# In steps of an H200, of 2.0 to 2.4 us each: what a block takes besides its own, and what the sum of splits takes, with
# and for each of its bytes. How much faster a split has to be; how many blocks a multiprocessor gets, at most, which
# bounds the scratch arrays.
_BLOCK_STEPS, _SUM_STEPS, _STEPS_OF_A_BYTE = 3.0, 2.3, 5e-8
_LEAST_GAIN, _MOST_BLOCKS = 1.06, 8
# As in the kernels: bytes of the heads whose blocks run together; in a fixed order, how many blocks these have.
_L2_BYTES, _TURN_BLOCKS = 16 << 20, 256
# About how many runs of blocks a simulation starts, if tiles are so many.
_RUNS = 48


class _Shared(NamedTuple):
    """Blocks that share the heads of groups. A block has a step for each head and each tile of rows that it sees.

    kv_heads: of all sequences, each with `group` heads of Q. rows, keys: of a sequence. tile: of rows and keys.
    in_turns: a few heads together, one group of them after the other. columns: of a row of Q, padded. resident: blocks
    that run at a time. split_bytes: of dK and dV in float32.
    """

    kv_heads: int
    group: int
    rows: int
    keys: int
    tile: tuple[int, int]
    window: tuple[int, int]
    deterministic: bool
    in_turns: bool
    columns: int
    resident: int
    split_bytes: int


def _shares(call: Call, sizes: Sizes, least_gain: float = _LEAST_GAIN) -> dict[str, int]:
    """Choose GROUP_SPLITS, how many blocks share the heads of a group: those that are done first; nothing for 1.

    Packed sequences are taken to be as long as the longest. On an H200, in 124 cases of groups of 4 and 8 heads, with
    and without a causal mask or a fixed order, it took at most 1.08 times as long as the best number of blocks; on
    average 1.001 times.
    """
    _, kv_heads, keys, d = call.arrays["k"].shape
    group = call.heads // kv_heads
    if group == 1 or "dq_accum" in call.arrays or max(call.heads, call.sequences) > launches.MAX_GRID_YZ:
        return {}
    longest = max(call.keys if call.packed else keys, 1)
    shared = _Shared(
        kv_heads=kv_heads * (-(-keys // longest) if call.packed else call.sequences),
        group=group,
        rows=call.rows,
        keys=longest,
        tile=(sizes["BLOCK_M"], sizes["BLOCK_N"]),
        window=call.window,
        deterministic=call.deterministic,
        in_turns="MIN_BLOCKS" not in sizes,  # in 13, with the last keys first in a fixed order
        columns=tiles.round_up(d, 64),
        resident=limits.persistent_blocks() * sizes.get("MIN_BLOCKS", 1),
        split_bytes=2 * 4 * math.prod(call.arrays["k"].shape),
    )
    splits = _best_splits(shared, _MOST_BLOCKS * limits.persistent_blocks(), least_gain)
    return {"GROUP_SPLITS": splits} if splits > 1 else {}


@functools.lru_cache(maxsize=256)
def _best_splits(shared: _Shared, most_blocks: int, least_gain: float) -> int:
    """Return the number of splits whose blocks and sum are done first; 1 if that is not `least_gain` times as fast."""
    group, most = shared.group, most_blocks // (shared.kv_heads * -(-shared.keys // shared.tile[1]))
    choices = [splits for splits in range(2, min(group, most) + 1) if group % splits == 0]
    if not choices:
        return 1
    row_tiles = _row_tiles(shared)
    total, longest = sum(row_tiles), max(row_tiles)

    def adds(splits: int) -> float:
        return _SUM_STEPS + _STEPS_OF_A_BYTE * splits * shared.split_bytes if splits > 1 else 0.0

    def at_least(splits: int) -> float:
        """Return the longest block's steps, or the mean of all multiprocessors' if that is more."""
        heads = group // splits
        steps = shared.kv_heads * splits * (heads * total + _BLOCK_STEPS * len(row_tiles))
        return max(heads * longest + _BLOCK_STEPS, steps / shared.resident) + adds(splits)

    def taken(splits: int) -> float:
        return _steps_until_done(shared, splits, row_tiles) + adds(splits)

    best, least = 1, math.inf
    for splits in sorted(choices, key=at_least):
        if at_least(splits) >= least:
            break
        if (steps := taken(splits)) < least:
            best, least = splits, steps
    return best if at_least(1) > least_gain * least or taken(1) > least_gain * least else 1


def _row_tiles(shared: _Shared) -> list[int]:
    """Count the tiles of rows that see each tile of keys."""
    (block_m, block_n), (left, right), rows = shared.tile, shared.window, shared.rows
    first = np.arange(0, shared.keys, block_n) - (shared.keys - rows)  # the row that the first key of a tile is for
    begin = np.maximum(first - right, 0) // block_m if right >= 0 else 0
    end = np.minimum(first + block_n + left, rows) if left >= 0 else np.full_like(first, rows)
    return np.maximum(-(-end // block_m) - begin, 0).tolist()


def _steps_until_done(shared: _Shared, splits: int, row_tiles: Sequence[int]) -> float:
    """Start blocks in the kernels' order, `resident` at a time; return after how many steps the last one is done.

    Multiprocessors that are free at the same time are counted, not listed. If there are many tiles of keys, neighbours
    form runs of equally long blocks.
    """
    heads, group, n_tiles, right = shared.kv_heads * splits, shared.group // splits, len(row_tiles), shared.window[1]
    deterministic, together = shared.deterministic, heads
    if shared.in_turns and (deterministic or right >= 0):
        of_a_head = 4 * 2 * shared.columns * max(shared.rows, 1) * group
        together = min(max(_TURN_BLOCKS // n_tiles if deterministic else _L2_BYTES // of_a_head, 1), heads)
    of_a_run = max(min(n_tiles // 8, n_tiles * -(-heads // together) // _RUNS), 1)  # tiles
    if not deterministic and min(row_tiles) == max(row_tiles):
        of_a_run, together = n_tiles, heads
    parts = [row_tiles[i : i + of_a_run] for i in range(0, n_tiles, of_a_run)]
    runs = [(len(part), group * sum(part) / len(part) + _BLOCK_STEPS) for part in parts]
    free = {0.0: shared.resident}  # how many multiprocessors are free from when on
    times = [0.0]  # a heap of them
    for first in range(0, heads, together):
        some = min(together, heads - first)
        last_first = shared.in_turns and deterministic and right >= 0 and first + some < heads
        before: list[tuple[float, int]] = []  # in a fixed order: when how many blocks that others wait for were done
        for tiles_of_run, steps in reversed(runs) if last_first else runs:
            left, ends, waited_for = some * tiles_of_run, [], iter(before)
            earliest, of_these = 0.0, 0
            while left:
                if before and not of_these:
                    earliest, of_these = next(waited_for)
                begin, end = times[0], times[0] + steps
                count = free[begin] if free[begin] < left else left
                if before:
                    count = min(count, of_these)
                    of_these -= count
                    end = max(end, earliest + (right < 0) * of_a_run)
                if count == free[begin]:
                    del free[heapq.heappop(times)]
                else:
                    free[begin] -= count
                if end in free:
                    free[end] += count
                else:
                    free[end] = count
                    heapq.heappush(times, end)
                left -= count
                if deterministic:
                    ends.append((end, count))
            if tiles_of_run == of_a_run:
                before = ends
    return max(free)


# ---- 08: half types, on tensor cores

_NAMES = ("BLOCK_M", "BLOCK_N", "WARPS", "WARPS_KEYS", "WARPS_DKV", "WARPS_DQ", "SLICE_M", "MIN_BLOCKS", "DQ_LATER")
# By head_dim: the first for which a multiprocessor can hold MIN_BLOCKS blocks. The first of 64 and of 128 are the
# fastest on an H200 in bfloat16. The others merely fit: no GPU that needs them was measured.
_BACKWARD_MMA: dict[int, tuple[tuple[int, ...], ...]] = {
    64: ((64, 128, 4, 4, 4, 2, 32, 2, 1), (128, 128, 8, 4, 4, 4, 64, 1, 0), (64, 128, 8, 4, 4, 2, 32, 1, 0)),
    128: ((64, 128, 8, 4, 4, 2, 32, 1, 1), (64, 128, 8, 4, 4, 2, 32, 1, 0), (32, 64, 8, 4, 2, 2, 16, 1, 1)),
    256: ((32, 64, 8, 4, 2, 2, 16, 1, 1), (32, 32, 4, 2, 2, 2, 16, 1, 1), (16, 32, 2, 2, 2, 1, 16, 1, 1)),
}
# If a launch has few blocks, by head_dim: the fastest, or within 7 % of it, of 56 tiles at 128 and 156 at 64 without
# spills, in bfloat16 on an H200, at 14 shapes of 1 to 24 heads and 512 to 4096 rows. With fewer keys per block more
# multiprocessors are busy; a block that has a multiprocessor to itself gets twice the warps.
_OTHER_BACKWARD_MMA: dict[str, dict[int, tuple[int, ...]]] = {
    "small_grid": {64: (64, 64, 8, 2, 2, 4, 16, 1, 1), 128: (64, 64, 8, 2, 2, 4, 16, 1, 1)},
    "tiny_grid": {64: (64, 32, 4, 2, 2, 2, 32, 1, 1), 128: (64, 32, 8, 2, 2, 2, 16, 1, 1)},
    "single_wave": {64: (128, 128, 8, 4, 4, 4, 32, 1, 1)},
}


@functools.cache
def pick_backward_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of backward_mma."""

    def shared_bytes(sizes: Sizes) -> int:
        """Count the bytes of one block; more than the limit if MIN_BLOCKS of them do not fit."""
        needed = backward_mma_shared_bytes(sizes)
        blocks = tiles.blocks_in_shared_memory(needed, shared_limit)
        return needed if blocks >= sizes["MIN_BLOCKS"] else shared_limit + 1

    choices = [dict(zip(_NAMES, sizes, strict=True)) for sizes in tiles.entry(_BACKWARD_MMA, head_dim)]
    return tiles.first_that_fits(choices, shared_bytes, head_dim, shared_limit)


@functools.cache
def pick_other_backward_mma(grid: str, head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the sizes for a "small_grid", "tiny_grid" or "single_wave", see `Tuning`; empty for the usual ones."""
    sizes = dict(zip(_NAMES, tiles.other_entry(_OTHER_BACKWARD_MMA[grid], head_dim) or (), strict=False))
    return sizes if sizes and backward_mma_shared_bytes({**sizes, "HEAD_DIM": head_dim}) <= shared_limit else {}


def backward_mma_candidates(head_dim: int) -> list[dict[str, int]]:
    """Return the sizes of backward_mma for a head dimension that compute dQ a step later, the best first.

    Without DQ_LATER, so that the steps before that idea can use them as well.
    """
    choices = tiles.entry(_BACKWARD_MMA, head_dim)
    return [dict(zip(_NAMES[:-1], sizes[:-1], strict=True)) for sizes in choices if sizes[-1]]


def backward_mma_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of backward_mma: K and V, two tiles each of Q and dO, dS, lse and delta twice.

    dS has two buffers if dQ is computed later (DQ_LATER, the default). P has one, unless it stays in registers.
    """
    rows, keys, warps = sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["WARPS"]
    in_registers = sizes["WARPS_KEYS"] == sizes["WARPS_DKV"] == warps
    scores = 1 + sizes.get("DQ_LATER", 1) + (not in_registers)
    return 2 * tiles.round_up(sizes["HEAD_DIM"], 16) * (2 * keys + 4 * rows) + 2 * scores * keys * rows + 2 * 8 * rows


# Where blocks of the usual tiles that share groups are faster than those of smaller tiles that do not: on an H200, by
# 1.2 to 3.1 times in 22 causal cases; by 1.17 times in one that is not chosen.
_GAIN_OVER_SMALL_TILES = 1.7


def _mma_variant(call: Call) -> dict[str, int]:
    """Keep the usual tiles where blocks share groups, or add to dQ in order: with smaller ones, more would wait.

    With those an H200 took 2.2 to 6.6 times the time of atomics, at 1 and 4 heads of 4096 rows.
    """
    usual = pick_backward_mma(call.head_dim, limits.most_shared())
    if call.deterministic:
        return {"DETERMINISTIC": 1, **usual, **_shares(call, usual)}
    shares = _shares(call, usual, _GAIN_OVER_SMALL_TILES)
    return {**usual, **shares} if shares else {}


def _launch_backward_mma(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch for delta and zeros, by tiles of rows; for dK, dV and sums of dQ, by tiles of keys; to convert dQ.

    DETERMINISTIC=1 orders the sums of dQ, by the same launches.
    """
    return _launch_in_half(stage, call, sizes, ("q", "k", "v", "do"))


BACKWARD_MMA = Stage(
    number=8,
    name="backward_mma",
    file="08_backward_mma.cu",
    idea="the gradients on tensor cores: transposed scores, five products",
    tuning=Tuning(
        pick_backward_mma,
        **{grid: functools.partial(pick_other_backward_mma, grid) for grid in _OTHER_BACKWARD_MMA},
        variant=_mma_variant,
    ),
    launches=_launch_backward_mma,
    scratch=backward_scratch,
    kernels=("backward_mma_preprocess", "backward_mma", "backward_mma_convert"),
    features=PLAIN | FLOAT | {"deterministic", "mod"},
    max_head_dim=256,
    shared_bytes=backward_mma_shared_bytes,
    **_GRADIENTS,
    **WARPS_OF_MMA,
)

# ---- 13: wgmma and TMA

# By head_dim: BLOCK_M, and BLOCK_M with the derivative of a score_mod, which needs registers.
_HOPPER_BACKWARD = {64: (128, 64), 128: (64, 32)}


@functools.cache
def pick_hopper_backward(head_dim: int, derivative: bool = False) -> dict[str, int]:
    """Choose the -D options of hopper_backward."""
    return {"BLOCK_M": tiles.entry(_HOPPER_BACKWARD, head_dim)[derivative], "BLOCK_N": 128}


# The number of keys up to which, and the bytes of dq_accum from which on, FIRST_STORES=1 was measured, see
# `_first_block_stores`.
_FIRST_STORES_KEYS, _FIRST_STORES_BYTES = 4096, 2**27


def _first_block_stores(call: Call) -> bool:
    """Choose FIRST_STORES=1 if dq_accum is larger than the L2 cache: zeros would be written to memory, and read again.

    On an H200 it gains 4 to 8 % at 512 and 1024 keys, and 1 % at 4096. Each row must see a key, and blocks must be
    allowed to add in any order.
    """
    q, k = call.arrays["q"], call.arrays["k"]
    if call.packed or call.deterministic or call.mod or (call.window[1] >= 0 and q.shape[2] > k.shape[2]):
        return False
    return 0 < k.shape[2] <= _FIRST_STORES_KEYS and 4 * math.prod(q.shape) >= _FIRST_STORES_BYTES


# The number of blocks from which on PERSISTENT=1 was measured to gain, at head_dims above 64; at others also the number
# of keys up to which, without a mask and with one. See `_blocks_persist`.
_PERSISTENT_BLOCKS, _PERSISTENT_KEYS = 512, (1024, 4096)


def _blocks_persist(call: Call, splits: int) -> bool:
    """Choose PERSISTENT=1 where each multiprocessor gets many blocks: it starts the next one under the end of the last.

    On an H200 it gains 1 to 8 % at head_dim 128; at 64, up to 16 % at 512 keys, but it loses 2 % at 16,384. See the
    study first_store.
    """
    k, most = call.arrays["k"], launches.MAX_GRID_YZ
    if call.packed or call.deterministic or call.mod or call.heads > most or call.sequences > most:
        return False
    if call.head_dim <= 64 and k.shape[2] > _PERSISTENT_KEYS[call.window != (-1, -1)]:
        return False
    return -(-k.shape[2] // 128) * k.shape[1] * splits * call.sequences >= _PERSISTENT_BLOCKS


def _hopper_variant(call: Call) -> dict[str, int]:
    derivative = bool(call.mod and call.mod.has_derivative)
    continues = "dq_accum" in call.arrays  # which holds sums of other keys
    sizes = pick_hopper_backward(call.head_dim, derivative)
    shares = _shares(call, sizes)
    if call.deterministic:
        how = {"DETERMINISTIC": 1}
    else:
        how = {"CONTINUES": 1} if continues else {"FIRST_STORES": 1} if _first_block_stores(call) else {}
        how |= {"PERSISTENT": 1} if _blocks_persist(call, shares.get("GROUP_SPLITS", 1)) else {}
    return {**how, **shares, **sizes}


# By head_dim: keys of all heads, without a mask and with one, from which on it is faster than backward_mma's smaller
# tiles, which more multiprocessors share. With fewer it took 1.01 to 1.39 times as long, with more 0.55 to 1.05 times.
_HOPPER_BACKWARD_FROM = {32: (8192, 12288), 64: (6144, 8704), 128: (5120, 8704)}


def _hopper_by_default(size: CallSize) -> bool:
    """Choose it where it is faster than backward_mma on an H200.

    In 677 shapes of up to 16,384 keys of all heads the choice takes 1.009 times as long as the faster of the two, on
    average; by the number of keys alone it was 1.16. Backward_mma has no smaller tiles for groups that blocks share, in
    a fixed order and above head_dim 128. With a derivative of scores, tiles are half as high here.
    """
    if size.grouped or size.deterministic or size.head_dim > 128:
        return device.ON_GPU and (size.all_rows >= 2048 or size.deterministic)
    keys = tiles.entry(_HOPPER_BACKWARD_FROM, size.head_dim)[size.masked]
    return device.ON_GPU and size.all_rows >= keys * (1 + size.derivative)


TILE_MAIL_BYTES = 48  # of hopper_backward_persistent.cuh


def hopper_backward_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of hopper_backward: K, V; two of Q, dO, dS, lse, delta; one of dQ; mbarriers, TileMail."""
    rows, keys, panels = sizes["BLOCK_M"], sizes["BLOCK_N"], -(-sizes["HEAD_DIM"] // 64)
    return (
        128 * panels * (2 * keys + 4 * rows) + 4 * rows * keys + 256 * panels * rows + 16 * rows + 64 + TILE_MAIL_BYTES
    )


def _launch_hopper_backward(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch like backward_mma, with tensor maps of q, do, k and v."""
    rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
    return _launch_in_half(stage, call, sizes, (Map("q", rows), Map("do", rows), Map("k", keys), Map("v", keys)))


_ON_HOPPER: Mapping[str, Any] = {
    "launches": _launch_hopper_backward,
    "dtypes": ("float16", "bfloat16"),
    "min_cc": 90,
    "only_cc": True,
    "head_dim_step": 8,
    "threads": lambda sizes: 384,
    "needs_aligned": True,
    **_GRADIENTS,
}
HOPPER_BACKWARD = Stage(
    number=13,
    name="hopper_backward",
    file="13_hopper_backward.cu",
    idea="the gradients by wgmma and TMA, FlashAttention-3's way",
    tuning=Tuning(
        lambda head_dim, shared_limit: pick_hopper_backward(head_dim),
        variant=_hopper_variant,
        by_default=_hopper_by_default,
    ),
    scratch=backward_scratch,
    kernels=("hopper_backward_preprocess", "hopper_backward", "hopper_backward_convert"),
    features=PLAIN | FLOAT | {"deterministic", "mod"},
    max_head_dim=128,
    shared_bytes=hopper_backward_shared_bytes,
    **_ON_HOPPER,
)


_WIDE = {"BLOCK_M": 64, "BLOCK_N": 64}


def _wide_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch arrays for rows of 256 elements, whatever the call's head_dim."""
    return backward_scratch(call, {**sizes, "HEAD_DIM": 256})


# On an H200, at 4 x 16 heads of 4096 rows of 256 in bfloat16: 5.95 ms, causal 3.37; in a fixed order 7.92 and 5.01,
# causal at half of the heads 2.13 in place of 2.52 since the last keys come first; with ALiBi 6.22 and 3.33.
# backward_mma: 11.04 and 6.05; in a fixed order 12.99 and 6.88; with ALiBi 11.30 and 5.96.
HOPPER_BACKWARD_WIDE = Stage(
    number=13,
    name="hopper_backward_wide",
    file="13_hopper_backward_wide.cu",
    idea="the same for rows of more than 128 elements",
    tuning=Tuning(
        lambda head_dim, shared_limit: _WIDE,
        variant=lambda call: {**({"DETERMINISTIC": 1} if call.deterministic else {}), **_shares(call, _WIDE)},
        by_default=_hopper_by_default,
    ),
    scratch=_wide_scratch,
    kernels=("hopper_backward_wide_preprocess", "hopper_backward_wide", "hopper_backward_wide_convert"),
    features=PLAIN | FLOAT | {"deterministic", "mod"},
    max_head_dim=256,
    # K, V, two tiles of Q and dO in rows of 512 bytes; P and dS twice; lse and delta; mbarriers.
    shared_bytes=lambda sizes: 512 * (2 * 64 + 4 * 64) + 4 * 2 * 64 * 64 + 16 * 64 + 64,
    **_ON_HOPPER,
)
