"""How the stages are launched: grid, block and arguments, for a call whose arrays are known but for their addresses."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers.attention.ladder import limits, score_mod
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.extras import ROTARY
from helpers.attention.ladder.launch import Launch, Map, Part
from helpers.attention.ladder.params import (
    GRADIENTS,
    ROTATION_PARAMS,
    attention_params,
    backward_params,
    rotary_params,
)
from helpers.attention.ladder.tiles import backward_dq_columns

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
    scalars = np.int32(n), np.int32(call.arrays["k"].shape[2]), np.float32(call.softmax_scale)
    tiles, most = -(-n // sizes["BLOCK_M"]), (max(MAX_GRID_YZ // heads, 1), MAX_GRID_YZ)
    parts = _parts(("q", "k", "v", "o", *scalars), call, batch, most)
    return [stage.launch((tiles, some * of_each), sizes, args) for some, of_each, args in parts]


def strided(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """From 05 on: grid (query tile, head, sequence), and AttentionParams by value."""
    return _tiles_in_grid(stage, call, sizes, ("q", "k", "v"))


def strided_maps(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """The first steps to 10: the same grid; q, k and v as tensor maps."""
    return _tiles_in_grid(stage, call, sizes, _maps(sizes))


def strided_rotating(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """Rotation in the load: as 07, with the tables and positions."""
    given = tuple(name if name in call.arrays else None for name in ROTARY)
    numbers = *_position_steps(call), call.arrays["rotary_cos"].shape[0]
    return _tiles_in_grid(stage, call, sizes, ("q", "k", "v"), given, (np.array([numbers], ROTATION_PARAMS),))


def _position_steps(call: Call) -> tuple[int, ...]:
    """From one batch's positions of q and of k to the next."""
    positions = (call.arrays.get(name) for name in ROTARY[2:])
    return tuple(_steps(given)[0] if given else 0 for given in positions)


ROTARY_FILE, ROTARY_THREADS = "11_rotary.cu", 256
C_NAMES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def rotated(call: Call) -> tuple[list[Launch], dict[str, Spec], Call]:
    """The pass that rotates q and k, the arrays that it writes, and the call that is left, of those."""
    q, k, tables = (call.arrays[name] for name in ("q", "k", "rotary_cos"))
    (batch, heads, n, head_dim), (_, kv_heads, n_kv, _) = q.shape, k.shape
    written = {"rotated_q": Spec.dense(q.shape, q.dtype), "rotated_k": Spec.dense(k.shape, k.dtype)}
    numbers = n, n_kv, heads, kv_heads, *_position_steps(call), tables.shape[0], call.sequences if call.packed else 0
    params = rotary_params([a.steps for a in (q, k, *written.values())], *numbers)
    given = tuple(name if name in call.arrays else None for name in (*ROTARY, *CU_SEQLENS))
    threads_of_a_row = (head_dim * q.dtype.itemsize // 16 + 1) // 2
    blocks = -(-max(n * heads, n_kv * kv_heads) * threads_of_a_row // ROTARY_THREADS)
    sizes = {"HEAD_DIM": head_dim, "ROTARY_DIM": 2 * tables.shape[1], "INTERLEAVED": int(call.rotary_interleaved)}
    name = f"rotary<{C_NAMES[q.dtype.name]}, {C_NAMES[tables.dtype.name]}>"
    args = ("q", "k", *written, *given, params)
    compiled = tuple({**sizes, "THREADS": ROTARY_THREADS}.items())
    all_arrays = call._replace(arrays={**call.arrays, **written})
    launches = [
        Launch(name, (blocks, 2, some), (ROTARY_THREADS,), 0, of_some, ROTARY_FILE, compiled)
        for some, _, of_some in _parts(args, all_arrays, batch, (MAX_GRID_YZ, heads))
    ]
    left = {name: a for name, a in call.arrays.items() if name not in ROTARY}
    left |= {"q": written["rotated_q"], "k": written["rotated_k"]}
    return launches, written, call._replace(arrays=left)


def of_rotated(launch: Launch) -> Launch:
    """The launch with the rotated q and k in place of q and k."""
    names = {"q": "rotated_q", "k": "rotated_k"}

    def renamed(arg: Any) -> Any:
        if isinstance(arg, str):
            return names.get(arg, arg)
        return replace(arg, name=names.get(arg.name, arg.name)) if isinstance(arg, (Part, Map)) else arg

    return launch._replace(args=tuple(map(renamed, launch.args)))


def _steps(spec: Spec) -> tuple[int, ...]:
    """From one element to the next along each axis, in elements; 0 where there is one for all."""
    size = spec.dtype.itemsize
    return tuple(step // size if count > 1 else 0 for count, step in zip(spec.shape, spec.strides, strict=True))


def _tiles_in_grid(
    stage: Stage,
    call: Call,
    sizes: Mapping[str, int],
    qkv: tuple[Any, ...],
    more: tuple[Any, ...] = (),
    more_params: tuple[Any, ...] = (),
) -> list[Launch]:
    params = _attention_params(call)
    optional = [name if name in call.arrays else None for name in ("lse", *CU_SEQLENS)]
    before, functions = functions_of_scores(stage, call, sizes)
    args = *qkv, "o", *optional, *more, params, *more_params, *functions
    return [*before, *_within_grid(stage.launch(_grid(call, "q", sizes), sizes, args), call)]


def functions_of_scores(stage: Stage, call: Call, sizes: Mapping[str, int]) -> tuple[list[Launch], tuple[Any, ...]]:
    """The launch of a block mask, if there is one, and what a kernel gets behind its own arguments."""
    mod = call.mod
    if mod is None:
        return [], ()
    if not mod.mask:
        return [], mod.arguments()
    (array,) = score_mod.block_mask(stage, call, sizes).values()
    sequences, heads, tiles, width = array.shape
    if max(sequences, heads) > MAX_GRID_YZ:
        raise ValueError(f"mask_mod, with {heads:,} heads and {sequences:,} sequences: one grid takes {MAX_GRID_YZ:,}")
    by_keys = stage.direction == "backward"
    steps = (tiles * width if heads > 1 else 0, heads * tiles * width if sequences > 1 else 0)
    if sizes.get("DETERMINISTIC"):  # semaphores count all tiles of a range
        return [], mod.arguments()
    place = "block_mask", np.int64(steps[1]), np.int64(steps[0]), np.int32(width)
    cu_seqlens = tuple(name if name in call.arrays else None for name in CU_SEQLENS)
    args = "block_mask", np.int32(width), *cu_seqlens, _attention_params(call), *mod.without_scores().arguments()
    compiled = tuple({"BLOCK_M": sizes["BLOCK_M"], "BLOCK_N": sizes["BLOCK_N"], "BY_KEYS": int(by_keys)}.items())
    grid, block = (tiles, heads, sequences), (score_mod.BLOCK_MASK_THREADS,)
    once = not (mod.mask_changes or call.packed)
    before = Launch("make_block_mask", grid, block, 0, args, score_mod.BLOCK_MASK, compiled, once)
    return [before], mod.arguments(place)


def _grid(call: Call, name: str, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """By tiles of q's rows or k's: (tiles of the longest sequence, heads, sequences); with SLOTS (slots, heads, 1)."""
    block, longest = (sizes["BLOCK_M"], call.rows) if name == "q" else (sizes["BLOCK_N"], call.keys)
    heads = call.arrays[name].shape[1]
    if sizes.get("SLOTS"):
        return _slots(call, name, block), heads, 1
    return -(-longest // block), heads, call.sequences


def _slots(call: Call, name: str, block: int) -> int:
    """Packed sequences begin anywhere: each may have one tile more than its share of the rows."""
    return call.arrays[name].shape[2] // block + call.sequences


EMPTY_BLOCKS = 64  # of each multiprocessor; fewer are over before a kernel with SLOTS would pay its compilation


def in_slots(call: Call, sizes: Mapping[str, int]) -> bool:
    """Whether packed sequences get a grid of slots, see kernels/packed_tiles.cuh.

    They do where most blocks of the other grid would be empty, and many, or where it has no room for the sequences.
    """

    def mostly_empty(name: str) -> bool:
        (tiles, heads, sequences), (slots, *_) = (_grid(call, name, {**sizes, "SLOTS": i}) for i in (0, 1))
        empty = tiles * sequences - slots
        return empty > slots and empty * heads >= EMPTY_BLOCKS * limits.multiprocessors()

    names = "qk" if "do" in call.arrays else "q"
    return call.packed and (call.sequences > MAX_GRID_YZ or any(map(mostly_empty, names)))


# The first axes of the arrays of which a launch may get a part.
_AXES = {
    **dict.fromkeys(("q", "o", "do", "dq", "bias", "lse", "delta", "alibi_slopes", "rotated_q"), ("batch", "heads")),
    **dict.fromkeys(("k", "v", "dk", "dv", "rotated_k"), ("batch", "kv_heads")),
    **dict.fromkeys(("q_positions", "k_positions"), ("batch",)),
}


def _within_grid(launch: Launch, call: Call, most_heads: int | None = None) -> list[Launch]:
    """The launch, of grid (tiles, heads of q or of k, batch), or several that have room in a grid.

    Args:
        most_heads: of q, in one launch; as many as have room, if it is left out.
    """
    tiles, heads, batch = launch.grid
    group, each = call.heads // call.arrays["k"].shape[1], call.heads // heads
    most = most_heads or MAX_GRID_YZ * each
    if call.heads <= most and batch <= MAX_GRID_YZ:
        return [launch]
    if (call.packed and batch > MAX_GRID_YZ) or any(isinstance(arg, Map) for arg in launch.args):  # steps to 10
        raise ValueError(f"{call.heads:,} heads, {call.sequences:,} sequences; a grid takes {MAX_GRID_YZ:,} at most")
    # Whole groups of heads that share a head of k and v, or a whole share of one.
    step = next(some for some in range(most, 0, -1) if some % group == 0 or group % some == 0)
    if call.mod and call.mod.counts_heads:
        raise ValueError(
            f"functions of scores, with {call.heads:,} heads and {batch:,} batches: one grid takes {MAX_GRID_YZ:,}"
        )
    parts = _parts(launch.args, call, batch, (MAX_GRID_YZ, step))
    return [launch._replace(grid=(tiles, of_each // each, some), args=args) for some, of_each, args in parts]


def _parts(
    args: tuple[Any, ...], call: Call, batch: int, most: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """(batches, heads of q, arguments) of launches with at most so many of each."""
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
    """0 .. size - 1 in parts of at most `most`."""
    yield from (slice(first, min(first + most, size)) for first in range(0, size, most))


def _part(arg: Any, call: Call, where: Mapping[str, slice]) -> Any:
    """The part of an array that a launch gets; other arguments, and axes with one element for all, as they are."""
    if not isinstance(arg, str) or arg not in _AXES:
        return arg
    shape = (row_sums(call, {}) | call.arrays)[arg].shape
    axes = *_AXES[arg][3 - len(shape) if arg == "lse" else 0 :], "rows", "keys or columns"
    of_axes = zip(axes, shape, strict=False)
    return Part(arg, tuple(where.get(axis, slice(size)) if size > 1 else slice(1) for axis, size in of_axes))


def _maps(sizes: Mapping[str, int]) -> tuple[Map, ...]:
    """Q by the 64 rows of a warpgroup, K and V by tiles."""
    return Map("q", 64), Map("k", sizes["BLOCK_N"]), Map("v", sizes["BLOCK_N"])


def persistent(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """10: a block for each multiprocessor, which takes one tile of rows after the other; arrays as tensor maps.

    Another kernel writes which tile that is. Where sequences are packed, each tile is a block: see 10_order.cu.
    """
    return _tiles_in_order(stage, call, sizes, _maps(sizes))


ORDER, ORDER_THREADS, ORDER_PACKED_THREADS = "10_order.cu", 256, 1024


def _tiles_in_order(stage: Stage, call: Call, sizes: Mapping[str, int], maps: tuple[Map, ...]) -> list[Launch]:
    block_m, block_n = np.int32(sizes["BLOCK_M"]), np.int32(sizes["BLOCK_N"])
    lse, *cu_seqlens = (name if name in call.arrays else None for name in ("lse", *CU_SEQLENS))
    params, sequences = _attention_params(call), np.int32(call.sequences)
    rounds, blocks = _rounds_and_blocks(call, sizes)
    if call.packed:
        numbers = np.int32(blocks // call.heads), sequences, block_m, block_n
        args = ("schedule", *cu_seqlens, *numbers, params)
        order = Launch("order_packed_tiles", (1,), (ORDER_PACKED_THREADS,), 0, args, ORDER)
    else:
        numbers = np.int32(blocks), sequences, np.int32(heads_together(call, sizes)), block_m, block_n
        args = ("schedule", *numbers, params)
        order = Launch("order_tiles", (rounds,), (ORDER_THREADS,), 0, args, ORDER, once=True)
    before, functions = functions_of_scores(stage, call, sizes)
    main = (*maps, "o", lse, *cu_seqlens, "schedule", np.int32(rounds), params, *functions)
    return [*before, order, stage.launch((blocks,), sizes, main)]


SPLIT_THREADS, SPLIT_ROWS = 256, 64  # of 15_fp16x3.cu; the rows of Q that share an exponent


def split_and_persistent(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """15 by fp16: Q, K and V in two parts each, by tiles that a block splits; then as 10, with maps of those."""
    cu_seqlens = tuple(name if name in call.arrays else None for name in CU_SEQLENS)
    of_q, of_kv = _exponents(call, sizes)
    parts, exponents = ("q_split", "k_split", "v_split"), ("q_exponents", "kv_exponents")
    args = "q", "k", "v", *parts, *exponents, *cu_seqlens, _attention_params(call)
    split = Launch(stage.kernels[0], (of_q + 2 * of_kv,), (SPLIT_THREADS,), 0, args)
    rows = SPLIT_ROWS, sizes["BLOCK_N"], sizes["BLOCK_N"]
    return [split, *_tiles_in_order(stage, call, sizes, (*map(Map, parts, rows), *exponents))]


def two_parts(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """What 15 by fp16 keeps: hi and lo of each batch of Q, K and V, their tiles' exponents, and what 10 keeps."""
    made = schedule(call, sizes)
    for name in "qkv":
        batch, *others = call.arrays[name].shape
        made[f"{name}_split"] = Spec.dense((2 * batch, *others), np.float16)
    of_q, of_kv = _exponents(call, sizes)
    return made | {"q_exponents": Spec.dense((of_q,), np.int32), "kv_exponents": Spec.dense((of_kv, 2), np.int32)}


def _exponents(call: Call, sizes: Mapping[str, int]) -> Iterator[int]:
    """How many tiles with an exponent Q has, and K: of all heads and sequences."""
    for name, block in (("q", SPLIT_ROWS), ("k", sizes["BLOCK_N"])):
        batch, heads, rows, _ = call.arrays[name].shape
        yield batch * heads * (_slots(call, name, block) if call.packed else -(-rows // block))


def schedule(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """What 10 keeps: the tile of each block in each round, four numbers of 32 bits."""
    return {"schedule": Spec.dense((*_rounds_and_blocks(call, sizes), 4), np.int32)}


def _rounds_and_blocks(call: Call, sizes: Mapping[str, int]) -> tuple[int, int]:
    rows = call.arrays["q"].shape[2]
    if call.packed:
        rounds, blocks = 1, _slots(call, "q", sizes["BLOCK_M"]) * call.heads
    else:
        items = -(-rows // sizes["BLOCK_M"]) * call.heads * call.sequences
        blocks = min(items, limits.for_persistent())
        rounds = -(-items // blocks)
    if blocks * rounds >= 2**27:
        raise ValueError(f"{blocks * rounds:,} tiles of rows; one launch takes 134,217,727 at most")
    return rounds, blocks


def heads_together(call: Call, sizes: Mapping[str, int]) -> int:
    """How many heads of Q are worked on together, longest tiles first.

    Without a mask all tiles take the same time, so that a head's tiles may follow each other.
    """
    if call.window == (-1, -1):
        return 1
    _, heads, rows, _ = call.arrays["q"].shape
    _, kv_heads, keys, head_dim = call.arrays["k"].shape
    more = -rows % sizes["BLOCK_M"]  # to whole tiles: most lengths then are known
    of_head = rows + more, keys + more, head_dim, call.window, sizes["BLOCK_M"], sizes["BLOCK_N"]
    return group_of_heads(heads * call.sequences, heads // kv_heads, *of_head, limits.for_persistent())


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
    """How many heads of Q to work on together: of a few choices the one whose blocks finish first, as they are dealt.

    With more heads K and V are read again later, which at few keys takes longer than it evens out: at N = 512 groups of
    one and a half rounds are 1.2 times as fast on an H100 as those whose K and V fill 32 MB of the L2 cache.

    Args:
        heads: of all sequences. share: heads of Q for each of K and V. rows, keys: of a head. window: keys to the left
            and right, -1 for all. blocks: that take tiles.
    """
    left, right = (keys if side < 0 else side for side in window)
    row_tiles, head_bytes = -(-rows // block_m), 4 * min(keys, left + right + block_m) * head_dim
    fit = min(max(32 * 2**20 // head_bytes, 1) * share, heads)
    if row_tiles == 1 or row_tiles * heads > 8192:  # all alike, or too many to deal in tens of microseconds
        return fit - 1 if fit > 1 and fit * row_tiles % (2 * blocks) == blocks else fit
    first = np.arange(row_tiles) * block_m + keys - rows
    seen = np.minimum(first + block_m + right, keys) - np.maximum(first - left, 0)
    # Key tiles, and what each tile of rows costs; the longest first.
    work = np.sort(1 + np.maximum(-(-seen // block_n), 1))[::-1]

    def time(together: int) -> float:
        tile, groups = np.arange(row_tiles * heads), -(-heads // together)
        group = tile // (row_tiles * together)
        first = group * together
        place = (tile - row_tiles * first) // np.minimum(together, heads - first)
        place = np.where((groups - 1 - group) % 2, row_tiles - 1 - place, place)
        turn, block = tile // blocks, tile % blocks
        dealt = np.bincount(np.where(turn % 2, blocks - 1 - block, block), work[place])
        again = 0.008 * together / share * head_bytes / 2**20 * min(1, 512 / keys)  # measured on an H100
        return float(dealt.max()) / work.sum() / heads * blocks + again

    rounds = (max(round(many * blocks / row_tiles / share), 1) * share for many in (1.33, 1.45, 1.95, 2.67))
    return min({fit, *(few for few in rounds if few < fit)}, key=time)


def backward(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """08: D and zeros; dK, dV and dQ by tiles of keys, or dQ by tiles of rows in a launch of its own."""
    params = _backward_params(call)
    before, functions = functions_of_scores(stage, call, sizes)
    cu_seqlens = tuple(name if name in call.arrays else None for name in ("cu_seqlens_q", "cu_seqlens_k"))
    given, factors = ("q", "k", "v", "do"), ("lse", "delta")
    # A warp computes a row of D, whichever sequence it is of. Packed sequences are one batch here.
    batch, heads, n, _ = call.arrays["q"].shape
    each_row = -(-n // (stage.threads(sizes) // 32)), heads, batch
    row_tiles, key_tiles = _grid(call, "q", sizes), _grid(call, "k", sizes)
    adds = None if call.deterministic else "dq"
    launches = [
        stage.launch(each_row, sizes, ("o", "do", "delta", adds, params), "backward_preprocess"),
        stage.launch(
            key_tiles, sizes, (*given, *factors, adds, "dk", "dv", *cu_seqlens, params, *functions), "backward"
        ),
    ]
    if adds is None:
        launches.append(
            stage.launch(row_tiles, sizes, (*given, *factors, "dq", *cu_seqlens, params, *functions), "backward_dq"),
        )
    return [*before, *(part for launch in launches for part in _within_grid(launch, call))]


def backward_mma(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """08 in half types: D and zeros, by tiles of rows; dK, dV and sums of dQ, by tiles of keys; dQ in its own type.

    Only the second one has dynamic shared memory. DETERMINISTIC=1 orders its sums: the launches stay as they are. Steps
    before that mode have no scratch array "dq_semaphore", and their kernels no such parameter. Where there are more
    heads or batches than a grid has room for, the parts of the call use the same scratch, one after the other.
    """
    return _backward_in_half(stage, call, sizes, ("q", "k", "v", "do"))


def hopper_backward(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """13: the same three launches, and arrays as tensor maps; for long rows without semaphores."""
    rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
    return _backward_in_half(stage, call, sizes, (Map("q", rows), Map("do", rows), Map("k", keys), Map("v", keys)))


def _backward_in_half(stage: Stage, call: Call, sizes: Mapping[str, int], given: tuple[Any, ...]) -> list[Launch]:
    group = call.heads // call.arrays["k"].shape[1]
    if group > MAX_GRID_YZ:
        raise ValueError(f"{group:,} heads of q share one of k and v; gradients take {MAX_GRID_YZ:,} at most")
    params = _backward_params(call)
    cu_q, cu_k = (name if name in call.arrays else None for name in ("cu_seqlens_q", "cu_seqlens_k"))
    row_tiles, key_tiles = _grid(call, "q", sizes), _grid(call, "k", sizes)
    block = (stage.threads(sizes),)
    scratch = tuple(stage.scratch(call, sizes))
    before, functions = functions_of_scores(stage, call, sizes)
    main = (*given, *scratch, "dk", "dv", cu_q, cu_k, params, *functions)
    first, _, last = stage.kernels
    launches = (
        Launch(first, row_tiles, block, 0, ("o", "do", "lse", *scratch, cu_q, params)),
        stage.launch(key_tiles, sizes, main),
        Launch(last, row_tiles, block, 0, ("dq_accum", "dq", cu_q, params)),
    )
    each_in_parts = (_within_grid(launch, call, MAX_GRID_YZ) for launch in launches)
    return [*before, *(launch for part in zip(*each_in_parts, strict=True) for launch in part)]


def tiles_of_rows(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """What 08 in half types keeps for each tile of rows of each head: lse and delta, dQ in float32, a semaphore.

    Behind the semaphores, a number counts blocks.
    """
    rows, block_m = call.arrays["q"].shape[2], sizes["BLOCK_M"]
    of_a_head = _slots(call, "q", block_m) if call.packed else call.sequences * -(-rows // block_m)
    tiles = call.heads * of_a_head
    return {
        "lse_delta": Spec.dense((tiles, 2 * block_m), np.float32),
        "dq_accum": Spec.dense((tiles, block_m * backward_dq_columns(sizes["HEAD_DIM"], sizes)), np.float32),
        "dq_semaphore": Spec.dense((tiles + 1,), np.int32),
    }


def tiles_of_long_rows(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """The same for rows as long as they can be, and without semaphores."""
    scratch = tiles_of_rows(call, {**sizes, "HEAD_DIM": 256})
    return {name: spec for name, spec in scratch.items() if name != "dq_semaphore"}


def row_sums(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """08 keeps delta, a number for each row of each head: laid out as lse is."""
    return {"delta": Spec.dense(call.arrays["q"].shape[:3], np.float32)}


def _strides(call: Call, names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """From one batch, row and head to the next, in elements; packed sequences are in one batch."""
    steps = {name: call.arrays[name].steps for name in names}
    return {name: (0, *by_row_and_head) for name, (_, *by_row_and_head) in steps.items()} if call.packed else steps


def _attention_params(call: Call) -> Any:
    q, k = call.arrays["q"].shape, call.arrays["k"].shape
    return attention_params(
        _strides(call, "qkvo"),
        n=q[2],
        n_kv=k[2],
        heads=q[1],
        kv_heads=k[1],
        window=call.window,
        softmax_scale=call.softmax_scale,
        sequences=call.sequences if call.packed else 0,
    )


def _backward_params(call: Call) -> Any:
    return backward_params(_attention_params(call), _strides(call, GRADIENTS))
