"""Pieces that launches of several stages share: arguments, grids, calls too large for one grid, preparatory passes.

The launches of each stage are in stages/. Everything about a call's arrays is known here except their addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from helpers.attention.ladder import limits
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.extras import POSITIONS, ROTARY
from helpers.attention.ladder.launch import Launch, Map, Part
from helpers.attention.ladder.params import attention_params, rotary_params
from helpers.attention.ladder.stage import C_NAMES, Stage
from helpers.attention.ladder.tiles import Sizes

MAX_GRID_YZ = 65535


# ---- arguments


def given(call: Call, *names: str) -> tuple[str | None, ...]:
    """Name those of the arrays that the call has; None, a null pointer, for the others."""
    return tuple(name if name in call.arrays else None for name in names)


def strides_of(call: Call, names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Return the steps from one batch, row and head to the next, in elements; packed sequences are in one batch."""
    steps = {name: call.arrays[name].element_strides for name in names}
    return {name: (0, *by_row_and_head) for name, (_, *by_row_and_head) in steps.items()} if call.packed else steps


def params_of(call: Call, sequences: int | None = None) -> Any:
    """Fill the call's AttentionParams, an array of shape (1,). sequences: replaces the call's in the struct."""
    q, k = call.arrays["q"].shape, call.arrays["k"].shape
    return attention_params(
        strides_of(call, "qkvo"),
        n=q[2],
        n_kv=k[2],
        heads=q[1],
        kv_heads=k[1],
        window=call.window,
        softmax_scale=call.softmax_scale,
        sequences=sequences if sequences is not None else call.sequences if call.packed else 0,
    )


def position_strides(call: Call) -> tuple[int, ...]:
    """Return the steps from one batch's positions of q, and of k, to the next, in elements; 0 for a broadcast axis."""
    positions = [call.arrays.get(name) for name in POSITIONS]
    return tuple(a.strides[0] // a.dtype.itemsize if a and a.shape[0] > 1 else 0 for a in positions)


# ---- a grid of tiles


def tile_grid(call: Call, name: str, sizes: Sizes) -> tuple[int, int, int]:
    """Return the grid by tiles of q's or k's rows: (tiles of the longest sequence, heads, sequences).

    With SLOTS it is (slots, heads, 1).
    """
    block, longest = (sizes["BLOCK_M"], call.rows) if name == "q" else (sizes["BLOCK_N"], call.keys)
    heads = call.arrays[name].shape[1]
    if sizes.get("SLOTS"):
        return slots(call, name, block), heads, 1
    return -(-longest // block), heads, call.sequences


def slots(call: Call, name: str, block: int) -> int:
    """Count tiles of packed sequences, which may begin anywhere: each may have one more than its share of the rows."""
    return call.arrays[name].shape[2] // block + call.sequences


EMPTY_BLOCKS = 64  # per multiprocessor; fewer end sooner than the compilation of a kernel with SLOTS would pay off


def in_slots(call: Call, sizes: Sizes) -> bool:
    """Decide whether packed sequences get a grid of slots, see kernels/packed_tiles.cuh.

    They do if most blocks of the other grid would be empty, and there are many, or if it cannot hold the sequences.
    """

    def mostly_empty(name: str) -> bool:
        (tiles, heads, sequences), (some, *_) = (tile_grid(call, name, {**sizes, "SLOTS": i}) for i in (0, 1))
        empty = tiles * sequences - some
        return empty > some and empty * heads >= EMPTY_BLOCKS * limits.multiprocessors()

    names = "qk" if "do" in call.arrays else "q"
    return call.packed and (call.sequences > MAX_GRID_YZ or any(map(mostly_empty, names)))


def strided(
    stage: Stage,
    call: Call,
    sizes: Sizes,
    qkv: tuple[Any, ...] = ("q", "k", "v"),
    tables: tuple[Any, ...] = (),
    more_params: tuple[Any, ...] = (),
) -> list[Launch]:
    """Launch a grid (tiles of rows, heads, sequences), with AttentionParams by value: from heads_and_masks on.

    Args:
        qkv: arguments for q, k and v. tables: those after lse and cu_seqlens. more_params: those after AttentionParams.
    """
    before, functions = functions_of_scores(stage, call, sizes)
    args = *qkv, "o", *given(call, "lse", *CU_SEQLENS), *tables, params_of(call), *more_params, *functions
    return [*before, *split_to_grid_limit(stage.launch(tile_grid(call, "q", sizes), sizes, args), call)]


# ---- calls too large for one grid

# The leading axes of the arrays of which a launch may get a part.
_AXES = {
    **dict.fromkeys(("q", "o", "do", "dq", "bias", "lse", "delta", "alibi_slopes", "rotated_q"), ("batch", "heads")),
    **dict.fromkeys(("k", "v", "dk", "dv", "rotated_k"), ("batch", "kv_heads")),
    **dict.fromkeys(("q_positions", "k_positions"), ("batch",)),
}


def split_to_grid_limit(launch: Launch, call: Call, most_heads: int | None = None) -> list[Launch]:
    """Return the launch, of grid (tiles, heads of q or of k, batch), or several that each fit a grid.

    Args:
        most_heads: of q, in one launch; by default as many as fit.
    """
    tiles, heads, batch = launch.grid
    group, each = call.heads // call.arrays["k"].shape[1], call.heads // heads
    most = most_heads or MAX_GRID_YZ * each
    if call.heads <= most and batch <= MAX_GRID_YZ:
        return [launch]
    if (call.packed and batch > MAX_GRID_YZ) or any(isinstance(arg, Map) for arg in launch.args):  # steps to hopper
        raise ValueError(f"{call.heads:,} heads, {call.sequences:,} sequences; a grid takes {MAX_GRID_YZ:,} at most")
    # Whole groups of heads that share a KV head, or a whole fraction of one.
    step = next(some for some in range(most, 0, -1) if some % group == 0 or group % some == 0)
    if call.mod and call.mod.depends_on_head_index:
        raise ValueError(
            f"functions of scores, with {call.heads:,} heads and {batch:,} batches: one grid takes {MAX_GRID_YZ:,}"
        )
    parts = parts_of_call(launch.args, call, batch, (MAX_GRID_YZ, step))
    return [launch._replace(grid=(tiles, of_each // each, some), args=args) for some, of_each, args in parts]


def parts_of_call(
    args: tuple[Any, ...], call: Call, batch: int, most: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """Yield (batches, heads of q, arguments) of launches with at most this many of each."""
    if batch <= most[0] and call.heads <= most[1]:
        yield batch, call.heads, args
        return
    group = call.heads // call.arrays["k"].shape[1]
    for some in slices(batch, most[0]):
        for heads in slices(call.heads, most[1]):
            kv_heads = slice(heads.start // group, -(-heads.stop // group))
            where = {"heads": heads, "kv_heads": kv_heads, **({} if call.packed else {"batch": some})}
            yield some.stop - some.start, heads.stop - heads.start, tuple(_part(arg, call, where) for arg in args)


def slices(size: int, most: int) -> Iterator[slice]:
    """Yield 0 .. size - 1 in slices of at most `most`."""
    yield from (slice(first, min(first + most, size)) for first in range(0, size, most))


def _part(arg: Any, call: Call, where: Mapping[str, slice]) -> Any:
    """Return the part of an array that a launch gets; other arguments and broadcast axes are unchanged."""
    if not isinstance(arg, str) or arg not in _AXES:
        return arg
    shape = call.arrays[arg].shape if arg in call.arrays else call.arrays["q"].shape[:3]  # the latter for delta
    axes = *_AXES[arg][3 - len(shape) if arg == "lse" else 0 :], "rows", "keys or columns"
    of_axes = zip(axes, shape, strict=False)
    return Part(arg, tuple(where.get(axis, slice(size)) if size > 1 else slice(1) for axis, size in of_axes))


# ---- functions of scores, and their block mask

BLOCK_MASK, BLOCK_MASK_THREADS = "11_block_mask.cu", 512


def functions_of_scores(stage: Stage, call: Call, sizes: Sizes) -> tuple[list[Launch], tuple[Any, ...]]:
    """Return the launch that makes the block mask, if one is needed, and the arguments for the functions of scores.

    A kernel takes these arguments after its own.

    Raises:
        ValueError: with a mask, more heads or sequences than a grid can hold.
    """
    mod = call.mod
    if mod is None:
        return [], ()
    if not mod.mask:
        return [], mod.arguments()
    (array,) = block_mask_scratch(stage, call, sizes).values()
    sequences, heads, tiles, width = array.shape
    if max(sequences, heads) > MAX_GRID_YZ:
        raise ValueError(f"mask_mod, with {heads:,} heads and {sequences:,} sequences: one grid takes {MAX_GRID_YZ:,}")
    if sizes.get("DETERMINISTIC"):  # semaphores count all tiles of a range
        return [], mod.arguments()
    steps = (tiles * width if heads > 1 else 0, heads * tiles * width if sequences > 1 else 0)
    place = "block_mask", np.int64(steps[1]), np.int64(steps[0]), np.int32(width)
    inputs = *given(call, *CU_SEQLENS), params_of(call), *mod.without_scores().arguments()
    by_keys = int(stage.direction == "backward")
    compiled = tuple({"BLOCK_M": sizes["BLOCK_M"], "BLOCK_N": sizes["BLOCK_N"], "BY_KEYS": by_keys}.items())
    grid, block, args = (tiles, heads, sequences), (BLOCK_MASK_THREADS,), ("block_mask", np.int32(width), *inputs)
    once = not (mod.mask_changes or call.packed)
    return [Launch("make_block_mask", grid, block, 0, args, BLOCK_MASK, compiled, once)], mod.arguments(place)


def block_mask_scratch(stage: Stage, call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return the scratch array for a call with a mask: each tile's visible tiles of the other side, after their number.

    int32 (sequences, heads, tiles, 1 + tiles of the other side); with a single sequence and head if all have the same
    mask.
    """
    mod = call.mod
    if mod is None or not mod.mask or stage.direction == "bias":  # this stage evaluates the mask for each score
        return {}
    q, k = call.arrays["q"].shape, call.arrays["k"].shape
    rows, keys = (call.rows, call.keys) if call.packed else (q[2], k[2])
    tiles = -(-rows // sizes["BLOCK_M"]), -(-keys // sizes["BLOCK_N"])
    own, other = tiles[::-1] if stage.direction == "backward" else tiles
    sequences = call.sequences if call.packed or "batch" in mod.names_used else 1
    heads = call.heads if mod.names_used & {"head", "kv_head"} else 1
    return {"block_mask": Spec.dense((sequences, heads, own, 1 + other), np.int32)}


# ---- the rotary embedding, in a separate pass

ROTARY_FILE, ROTARY_THREADS = "11_rotary.cu", 256


def rotary_sizes(call: Call) -> dict[str, int]:
    """Return the -D options of 11_rotary.cu."""
    rotary_dim = 2 * call.arrays["rotary_cos"].shape[1]
    form = {"ROTARY_DIM": rotary_dim, "INTERLEAVED": int(call.rotary_interleaved)}
    return {"HEAD_DIM": call.head_dim, **form, "THREADS": ROTARY_THREADS}


def launch_rotary(call: Call, sizes: Sizes) -> list[Launch]:
    """Launch the kernel that rotates q and k into the call's arrays rotated_q and rotated_k."""
    q, k, tables = (call.arrays[name] for name in ("q", "k", "rotary_cos"))
    (batch, heads, n, head_dim), (_, kv_heads, n_kv, _) = q.shape, k.shape
    names = ("q", "k", "rotated_q", "rotated_k")
    numbers = n, n_kv, heads, kv_heads, *position_strides(call), tables.shape[0], call.sequences if call.packed else 0
    params = rotary_params([call.arrays[name].element_strides for name in names], *numbers)
    threads_of_a_row = (head_dim * q.dtype.itemsize // 16 + 1) // 2
    threads = max(n * heads, n_kv * kv_heads) * threads_of_a_row
    if threads >= 2**31:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; a launch has 2^31 threads a batch at most")
    grid = -(-threads // sizes["THREADS"]), 2
    name = f"rotary<{C_NAMES[q.dtype.name]}, {C_NAMES[tables.dtype.name]}>"
    args = (*names, *given(call, *ROTARY, *CU_SEQLENS), params)
    parts = parts_of_call(args, call, batch, (MAX_GRID_YZ, heads))
    return [Launch(name, (*grid, some), (sizes["THREADS"],), 0, of_some) for some, _, of_some in parts]


def rotation_before(call: Call, names: Mapping[str, str] = {}, **more_sizes: int) -> list[Launch]:
    """Launch 11_rotary.cu before a kernel of another file. names: other names of its arrays."""
    sizes = {**rotary_sizes(call), **more_sizes}
    own = {"file": ROTARY_FILE, "sizes": tuple(sizes.items())}
    return [renamed(launch, names)._replace(**own) for launch in launch_rotary(call, sizes)]


def rotated(call: Call) -> tuple[list[Launch], dict[str, Spec], Call]:
    """Return the launches that rotate q and k, the arrays that they write, and the remaining call on these."""
    written = {f"rotated_{name}": Spec.dense(call.arrays[name].shape, call.arrays[name].dtype) for name in "qk"}
    launches = rotation_before(call._replace(arrays={**call.arrays, **written}))
    left = {name: a for name, a in call.arrays.items() if name not in ROTARY}
    left |= {"q": written["rotated_q"], "k": written["rotated_k"]}
    return launches, written, call._replace(arrays=left)


def renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return the launch with other arrays in place of those that `names` has."""

    def of_argument(arg: Any) -> Any:
        if isinstance(arg, str):
            return names.get(arg, arg)
        return replace(arg, name=names.get(arg.name, arg.name)) if isinstance(arg, (Part, Map)) else arg

    return launch._replace(args=tuple(map(of_argument, launch.args)))
