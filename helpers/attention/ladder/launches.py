"""How the stages are launched: grid, block and arguments, for a call whose arrays are known but for their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers.attention.ladder import limits
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.contract import Constant, Launch, Map, Part
from helpers.attention.ladder.fused import ARRAYS
from helpers.attention.ladder.params import GRADIENTS, attention_params, backward_params, fused_params
from helpers.attention.ladder.tiles import backward_mma_dq_columns

if TYPE_CHECKING:
    from helpers.attention.ladder.contract import Stage

MAX_GRID_YZ = 65535


def one_head_each(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """01 to 03 know one head: a launch for each."""
    q, k = call.arrays["q"], call.arrays["k"]
    n, n_kv = q.shape[2], k.shape[2]
    grid = (-(-n // sizes["BLOCK_M"]),)
    scratch = stage.scratch(call, sizes)  # one for all heads, which use it in turn
    scalars = np.int32(n), np.int32(n_kv), np.float32(call.softmax_scale)
    return [
        stage.launch(grid, sizes, (*(Part(name, head) for name in "qkv"), *scratch, Part("o", head), *scalars))
        for head in np.ndindex(q.shape[:2])
    ]


def scores_of_one_head(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """01 keeps the scores of a head: N x N_kv."""
    return {"S": Spec.dense((call.arrays["q"].shape[2], call.arrays["k"].shape[2]), np.float32)}


def heads_in_grid(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """04: all heads of all batches along blockIdx.y."""
    batch, heads, n, _ = call.arrays["q"].shape
    _check_grid(batch * heads, "heads of all batches")
    scalars = np.int32(n), np.int32(call.arrays["k"].shape[2]), np.float32(call.softmax_scale)
    return [stage.launch((-(-n // sizes["BLOCK_M"]), batch * heads), sizes, ("q", "k", "v", "o", *scalars))]


def strided(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """From 05 on: grid (query tile, head, sequence), and AttentionParams by value."""
    return [_tiles_in_grid(stage, call, sizes, ("q", "k", "v"))]


def strided_maps(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """The first steps to 10: the same grid; q, k and v as tensor maps."""
    return [_tiles_in_grid(stage, call, sizes, _maps(sizes))]


def strided_fused(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """11: as 05 and 07, with the arrays of helpers.attention.ladder.fused, and FusedParams after AttentionParams."""
    given = tuple(name if name in call.arrays else None for name in ARRAYS)
    strides = {name: _steps(call.arrays[name]) for name in given if name is not None}
    tables = call.arrays.get("rotary_cos")
    return [
        _tiles_in_grid(
            stage, call, sizes, ("q", "k", "v"), given, (fused_params(strides, tables.shape[0] if tables else 0),)
        )
    ]


def _steps(spec: Spec) -> tuple[int, ...]:
    """From one element to the next along each axis, in elements; 0 where there is one for all."""
    size = np.dtype(spec.dtype).itemsize
    return tuple(step // size if count > 1 else 0 for count, step in zip(spec.shape, spec.strides, strict=True))


def _tiles_in_grid(
    stage: Stage,
    call: Call,
    sizes: Mapping[str, int],
    qkv: tuple[Any, ...],
    more: tuple[Any, ...] = (),
    more_params: tuple[Any, ...] = (),
) -> Launch:
    _check_grid(call.heads, "heads")
    _check_grid(call.sequences, "sequences")
    params = _attention_params(call)
    optional = (name if name in call.arrays else None for name in ("lse", "cu_seqlens_q", "cu_seqlens_k"))
    grid = -(-call.rows // sizes["BLOCK_M"]), call.heads, call.sequences
    return stage.launch(grid, sizes, (*qkv, "o", *optional, *more, params, *more_params))


def _maps(sizes: Mapping[str, int]) -> tuple[Map, ...]:
    """Q by the 64 rows of a warpgroup, K and V by tiles."""
    return Map("q", 64), Map("k", sizes["BLOCK_N"]), Map("v", sizes["BLOCK_N"])


def persistent(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """10: a block for each multiprocessor, which takes one tile of rows after the other; arrays as tensor maps.

    Packed sequences differ in length, so that no order known now gives all blocks the same work: each tile is a block,
    and the hardware starts the next one wherever one has ended.
    """
    return [_tiles_by_table(stage, call, sizes, _maps(sizes))]


def persistent_o_map(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """The same, and O as a tensor map too, for the 16 rows of a warp."""
    return [_tiles_by_table(stage, call, sizes, (*_maps(sizes), Map("o", 16)))]


def _tiles_by_table(stage: Stage, call: Call, sizes: Mapping[str, int], maps: tuple[Map, ...]) -> Launch:
    row_tiles = -(-call.rows // sizes["BLOCK_M"])
    items = row_tiles * call.heads * call.sequences
    if items >= 2**27:  # 16 bytes each
        raise ValueError(f"{items:,} tiles of rows; one launch takes 134,217,727 at most")
    blocks = items if call.packed else min(items, limits.multiprocessors())
    together = min(heads_together(call), call.heads * call.sequences)
    order = schedule(steps_of_tiles(call, row_tiles, sizes), call.heads * call.sequences, together, blocks)
    entries = entries_of(order, row_tiles, call.heads, call.arrays["k"].shape[1], sizes["BLOCK_M"])
    optional = (name if name in call.arrays else None for name in ("lse", "cu_seqlens_q", "cu_seqlens_k"))
    table = Constant(entries)
    args = (*maps, "o", *optional, table, np.int32(len(order)), _attention_params(call))
    return stage.launch((blocks,), sizes, args)


def steps_of_tiles(call: Call, row_tiles: int, sizes: Mapping[str, int]) -> np.ndarray:
    """How many tiles of keys each tile of rows sees, and one more for its beginning and its end: its share of the work.

    Returns:
        shape (row_tiles,), int64. Packed: as if all sequences were as long as the longest, with as many keys as rows.
    """
    keys = call.rows if call.packed else call.arrays["k"].shape[2]
    return steps_of_rows(call.rows, keys, call.window, row_tiles, sizes["BLOCK_M"], sizes["BLOCK_N"])


# The next three know sizes and NumPy alone, so that a file of their own can have them: see helpers/attention/export.


def steps_of_rows(
    rows: int, keys: int, window: tuple[int, int], row_tiles: int, block_m: int, block_n: int
) -> np.ndarray:
    """How many tiles of keys each tile of rows sees, and one more for its beginning and its end: (row_tiles,)."""
    first = np.arange(row_tiles) * block_m
    last = np.minimum(first + block_m, rows) - 1
    left, right = (keys + rows if side < 0 else side for side in window)
    begin = np.maximum(first + keys - rows - left, 0)
    end = np.minimum(last + keys - rows + right + 1, keys)
    return np.maximum(-(-(end - begin) // block_n), 1) + 1


def schedule(steps: np.ndarray, heads: int, together: int, blocks: int) -> np.ndarray:
    """Which tile of rows a block computes in each round: longest-first (LPT) order, spread evenly.

    The tiles of `together` heads come first, the longest ones of them first, then those of the next heads. In each
    round every block gets one tile, the longest of them where there is least work so far.

    Args:
        steps: (row tiles,), the work of each.

    Returns:
        shape (rounds, blocks), int64: head * row tiles + row tile; -1 where there is none left.
    """
    row_tiles = len(steps)
    longest_first = np.argsort(-steps, kind="stable")
    parts = []
    for first in range(0, heads, together):
        part = np.arange(first, min(first + together, heads))
        parts.append((part[None, :] * row_tiles + longest_first[:, None]).ravel())
    order = np.concatenate(parts)
    if blocks >= len(order):  # one tile each: the hardware starts blocks in this order
        return order[None]
    rounds = -(-len(order) // blocks)
    table = np.full((rounds, blocks), -1)
    work = np.zeros(blocks, np.int64)
    for i in range(rounds):
        tiles = order[i * blocks : (i + 1) * blocks]
        tiles = tiles[np.argsort(-steps[tiles % row_tiles], kind="stable")]
        least = np.argsort(work, kind="stable")[: len(tiles)]
        table[i, least] = tiles
        work[least] += steps[tiles % row_tiles]
    return table


def entries_of(order: np.ndarray, row_tiles: int, heads: int, kv_heads: int, block_m: int) -> np.ndarray:
    """What a block reads of each of its tiles: (sequence, head of q, head of k and v, first row or -1 for no tile).

    Args:
        order: as `schedule` returns it.

    Returns:
        shape (rounds, blocks, 4), int32.
    """
    all_heads, row_tile = np.divmod(order, row_tiles)
    sequence, head = np.divmod(all_heads, heads)
    first_row = np.where(order < 0, -1, row_tile * block_m)
    entries = np.stack([sequence, head, head // (heads // kv_heads), first_row], axis=-1)
    return np.ascontiguousarray(entries, np.int32)


L2_SHARE = 32 * 2**20  # bytes of the L2 cache, 50 MB on an H200, for the K and V in use


def heads_together(call: Call) -> int:
    """How many heads of Q are worked on together, longest tiles first: as many as find their K and V in the L2 cache.

    Without a mask all tiles take the same time, so that a head's tiles may follow each other.
    """
    if call.window == (-1, -1):
        return 1
    _, kv_heads, keys, head_dim = call.arrays["k"].shape
    bytes_of_head = 2 * keys // (call.sequences if call.packed else 1) * head_dim * 2
    return max(L2_SHARE // max(bytes_of_head, 1), 1) * (call.heads // kv_heads)


def backward(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """08: D and zeros; dK, dV and dQ by tiles of keys, or dQ by tiles of rows in a launch of its own."""
    q, k = call.arrays["q"], call.arrays["k"]
    _check_grid(call.heads, "heads")
    _check_grid(call.sequences, "sequences")
    params = _backward_params(call)
    cu_seqlens = tuple(name if name in call.arrays else None for name in ("cu_seqlens_q", "cu_seqlens_k"))
    given, factors = ("q", "k", "v", "do"), ("lse", "delta")
    # A warp computes a row of D, whichever sequence it is of. Packed sequences are one batch here.
    batch, heads, n, _ = q.shape
    each_row = -(-n // (stage.threads(sizes) // 32)), heads, batch
    row_tiles = -(-call.rows // sizes["BLOCK_M"]), heads, call.sequences
    key_tiles = -(-call.keys // sizes["BLOCK_N"]), k.shape[1], call.sequences
    adds = None if call.deterministic else "dq"
    launches = [
        stage.launch(each_row, sizes, ("o", "do", "delta", adds, params), "backward_preprocess"),
        stage.launch(key_tiles, sizes, (*given, *factors, adds, "dk", "dv", *cu_seqlens, params), "backward"),
    ]
    if adds is None:
        launches.append(
            stage.launch(row_tiles, sizes, (*given, *factors, "dq", *cu_seqlens, params), "backward_dq"),
        )
    return launches


def backward_mma(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """08 in half types: D and zeros, by tiles of rows; dK, dV and sums of dQ, by tiles of keys; dQ in its own type.

    Only the second one has dynamic shared memory. DETERMINISTIC=1 orders its sums: the launches stay as they are. Steps
    before that mode have no scratch array "turns", and their kernels no such parameter.
    """
    _check_grid(call.heads, "heads")
    _check_grid(call.sequences, "sequences")
    params = _backward_params(call)
    cu_q, cu_k = (name if name in call.arrays else None for name in ("cu_seqlens_q", "cu_seqlens_k"))
    row_tiles = -(-call.rows // sizes["BLOCK_M"]), call.heads, call.sequences
    key_tiles = -(-call.keys // sizes["BLOCK_N"]), call.arrays["k"].shape[1], call.sequences
    block = (stage.threads(sizes),)
    scratch = tuple(stage.scratch(call, sizes))
    main = ("q", "k", "v", "do", *scratch, "dk", "dv", cu_q, cu_k, params)
    return [
        Launch("backward_mma_preprocess", row_tiles, block, 0, ("o", "do", "lse", *scratch, cu_q, params)),
        stage.launch(key_tiles, sizes, main),
        Launch("backward_mma_convert", row_tiles, block, 0, ("dq_accum", "dq", cu_q, params)),
    ]


def tiles_of_rows(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """What 08 in half types keeps for each tile of rows of each head: lse and delta, dQ in float32, whose turn it is.

    Packed sequences begin anywhere: each may have one tile more than its share of the rows. The last of turns counts
    blocks.
    """
    rows, block_m = call.arrays["q"].shape[2], sizes["BLOCK_M"]
    of_a_head = rows // block_m + call.sequences if call.packed else call.sequences * -(-rows // block_m)
    tiles = call.heads * of_a_head
    return {
        "lse_delta": Spec.dense((tiles, 2 * block_m), np.float32),
        "dq_accum": Spec.dense((tiles, block_m * backward_mma_dq_columns(sizes["HEAD_DIM"], sizes)), np.float32),
        "turns": Spec.dense((tiles + 1,), np.int32),
    }


def row_sums(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """08 keeps delta, a number for each row of each head: laid out as lse is."""
    return {"delta": Spec.dense(call.arrays["q"].shape[:3], np.float32)}


def _strides(spec: Spec, packed: bool) -> tuple[int, int, int]:
    """From one batch, row and head to the next, in elements."""
    batch, head, row, _ = (step // np.dtype(spec.dtype).itemsize for step in spec.strides)
    return (0 if packed else batch), row, head


def _attention_params(call: Call) -> Any:
    q, k = call.arrays["q"], call.arrays["k"]
    return attention_params(
        {name: _strides(call.arrays[name], call.packed) for name in "qkvo"},
        n=q.shape[2],
        n_kv=k.shape[2],
        heads=call.heads,
        kv_heads=k.shape[1],
        window=call.window,
        softmax_scale=call.softmax_scale,
    )


def _backward_params(call: Call) -> Any:
    strides = {name: _strides(call.arrays[name], call.packed) for name in GRADIENTS}
    return backward_params(_attention_params(call), strides)


def _check_grid(size: int, what: str) -> None:
    if size > MAX_GRID_YZ:
        raise ValueError(f"{size:,} {what}; one launch takes {MAX_GRID_YZ:,} at most")
