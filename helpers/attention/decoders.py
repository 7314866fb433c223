"""The decoders: kernels/14_split_kv.cu and the steps to it, their sizes, launches and scratch.

They are stages of the direction "decode", in a table of their own, because calls of the ladder have no cache. A new
step is one file and one entry of DECODERS.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from helpers.attention.ladder import Stage, launches, limits
from helpers.attention.ladder.call import Call
from helpers.attention.ladder.extras import POSITIONS, ROTARY_TABLES
from helpers.attention.ladder.launch import Launch
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.params import ATTENTION_PARAMS, STRIDES, attention_params
from helpers.attention.ladder.score_mod import ScoreMod
from helpers.attention.ladder.stage import Tuning
from helpers.attention.ladder.tiles import KB
from helpers.attention.scalars import whole_number

TILE_ROWS = 16  # rows of an MMA atom
MIN_KEYS = 128  # keys per stretch: with fewer, a merge costs more than it saves
SMALLEST_TILE = 16  # keys: BLOCK_N is this or more
NEARLY_ALL = 0.9  # of the resident blocks
_NO_TABLE = 30  # page_bits for a single page with all keys


# The tile's columns: the smallest of these that holds those of K and V.
HEAD_DIMS = (64, 128, 256)
OTHER_DIMS = "head_dim of another length, or of V alone"


class DecodeCall(NamedTuple):
    """A call after every check: everything that its launches depend on, except addresses.

    arrays: by name, including q and o, and lse, block_table, k and v if the call has them.
    """

    arrays: Mapping[str, Spec]
    window: tuple[int, int]
    softmax_scale: float
    num_splits: int
    mod: ScoreMod | None
    rotary_interleaved: bool = False

    @property
    def kv_heads(self) -> int:
        """Number of heads in the cache."""
        return self.arrays["k_cache"].shape[2]

    @property
    def is_e4m3(self) -> bool:
        """Return True if the cache's numbers are e4m3."""
        return self.arrays["k_cache"].dtype == np.uint8

    @property
    def rows(self) -> int:
        """Rows of all tokens and of the heads that share a KV head."""
        _, tokens, heads, _ = self.arrays["q"].shape
        return tokens * (heads // self.kv_heads)

    @property
    def room(self) -> int:
        """Number of keys per sequence that fit into the cache."""
        rows = self.arrays["k_cache"].shape[1]
        return rows * self.arrays["block_table"].shape[1] if "block_table" in self.arrays else rows

    def params(self, *, min_tiles: int = 1, num_splits: int | None = None) -> Any:
        """Fill one DecodeParams of kernels/decode_params.cuh, an array of shape (1,).

        Args:
            min_tiles: per stretch. num_splits: replaces the call's.
        """
        arrays = self.arrays
        batch, tokens, heads, _ = arrays["q"].shape
        attention = attention_params(
            {
                name: arrays[of].heads_first.element_strides
                for name, of in zip("qkvo", ("q", "k_cache", "v_cache", "o"), strict=True)
            },
            n=tokens,
            n_kv=self.room,
            heads=heads,
            kv_heads=self.kv_heads,
            window=self.window,
            softmax_scale=self.softmax_scale,
            sequences=batch,
        )
        of_k, of_v = (arrays[name].heads_first.element_strides if name in arrays else (0, 0, 0) for name in "kv")
        table = arrays.get("block_table")
        page = arrays["k_cache"].shape[1] if table else 0
        # The largest power of two that divides it: this many neighbouring keys are in one page.
        page_bits = (page & -page).bit_length() - 1 if table else _NO_TABLE
        numbers = page_bits, table.strides[0] // 4 if table else 0, num_splits or self.num_splits, min_tiles, page
        return np.frombuffer(bytearray(attention.tobytes() + _REST.pack(*of_k, *of_v, *numbers)), DECODE_PARAMS)


DECODE_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((name, STRIDES) for name in ("k_new", "v_new")),
        *((name, np.int32) for name in ("page_bits", "table_row", "num_splits", "min_tiles", "page_size")),
    ],
    align=True,
)
_REST = struct.Struct("=6q5i4x")


# ---- the decoders


def _decoder(
    name: str,
    file: str,
    idea: str,
    sizes: Callable[[DecodeCall], Mapping[str, int]],
    launch: Callable[[DecodeCall, Mapping[str, int]], Sequence[Launch]],
    scratch: Callable[[DecodeCall, Mapping[str, int]], Mapping[str, Spec]],
    dtypes: tuple[str, ...] = ("float16", "bfloat16"),
    features: Sequence[str] = (),
) -> Stage:
    """Describe a stage that decodes.

    Args:
        sizes: the -D options of a call. scratch: arrays that blocks hand to each other. features: beyond a cache whose
            rows may have gaps.
    """
    return Stage(
        *(14, name, file, idea),
        Tuning(lambda *_: {}, variant=sizes),
        launches=lambda stage, call, sizes: launch(call, sizes),
        scratch=scratch,
        direction="decode",
        features=frozenset({"strides", *features}),
        dtypes=dtypes,
        max_head_dim=256,
        min_cc=80,
        zeroed=frozenset({_TICKETS}),
        needs_aligned=True,
    )


def pick_sizes(
    head_dim: int, itemsize: int, rows: int, shared: int, *, short: bool = False, e4m3: bool = False
) -> dict[str, int]:
    """Choose split_kv's sizes for this much shared memory: the most warps that leave each a ring of two stages.

    Args:
        rows: those of all tokens and of the heads that share a KV head. short: a stretch has many units. Then two
            blocks with half the warps each share a multiprocessor, so that one reads while the other is between units:
            1.03 times as fast at 128 x 512 keys on an H200, and 0.95 times at 8 x 8192. e4m3: the cache's numbers are
            bytes.
    """
    rows, row = whole_number("rows", rows, least=1), head_dim * (1 if e4m3 else itemsize)
    block_n = 32 if row <= 128 else 16
    state_rows = min(TILE_ROWS, 1 << (rows - 1).bit_length())
    more = 2 if row <= 64 else 1  # small tiles: the same number of bytes in flight, and of blocks per multiprocessor
    usual = [(warps, 2 * more, shared) for warps in (8, 6, 4, 2)] + [(2, 1, shared)]
    for warps, stages, room in [(4, 3 * more, shared // 2 - KB)] * short + usual:
        sizes = {"HEAD_DIM": head_dim, "BLOCK_N": block_n, "WARPS": warps, "STATE_ROWS": state_rows, "STAGES": stages}
        sizes |= {"CACHE_E4M3": 1} if e4m3 else {}
        if shared_bytes(sizes, itemsize) + RESERVED <= room:
            return sizes
    raise ValueError(f"head_dim = {head_dim}: no tile fits {shared:,} bytes of shared memory")


RESERVED = 256  # bytes of static shared memory


def shared_bytes(sizes: Mapping[str, int], itemsize: int) -> int:
    """Return SHARED_BYTES of split_kv."""
    row = sizes["HEAD_DIM"] * itemsize
    of_cache = sizes["HEAD_DIM"] if sizes.get("CACHE_E4M3") else row
    rings = sizes["WARPS"] * sizes["STAGES"] * 2 * sizes["BLOCK_N"] * of_cache
    return TILE_ROWS * row + rings + sizes["WARPS"] * sizes["STATE_ROWS"] * (4 * (sizes["HEAD_DIM"] + 8) + 8)


def _sizes(call: DecodeCall) -> dict[str, int]:
    q = call.arrays["q"]
    short = q.shape[0] * call.kv_heads >= 2 * limits.multiprocessors()
    paged = "block_table" in call.arrays
    columns = {"K_COLUMNS": q.shape[3], "V_COLUMNS": call.arrays["v_cache"].shape[3]}
    wide = next(d for d in HEAD_DIMS if d >= max(columns.values()))
    picked = pick_sizes(wide, q.dtype.itemsize, call.rows, limits.most_shared(), short=short, e4m3=call.is_e4m3)
    picked |= {name: n for name, n in columns.items() if n != wide}
    if short and q.dtype.itemsize == 2 and call.rows <= TILE_ROWS and not call.is_e4m3 and not paged:
        picked["READ_ONCE"] = 1
    if not paged:
        return picked
    page = call.arrays["k_cache"].shape[1]
    return {**picked, "PAGED": 2 if page & (page - 1) else 1}


def _grid(call: DecodeCall, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return (blocks, tiles of rows): all resident blocks, or one for each part of each unit."""
    tiles = -(-call.rows // TILE_ROWS)
    units = call.arrays["q"].shape[0] * call.kv_heads
    if call.num_splits:
        return units * call.num_splits, tiles
    most = units * max(1, -(-call.room // sizes["BLOCK_N"]))
    at_once = limits.most_shared() // (shared_bytes(sizes, call.arrays["q"].dtype.itemsize) + RESERVED + KB)
    blocks = limits.multiprocessors() * max(at_once, 1) // tiles
    return max(1, min(most, blocks if call.is_e4m3 else even_blocks(units, blocks))), tiles


def even_blocks(units: int, most: int) -> int:
    """Return how many blocks have equal shares of units of equal length, or `most` if these are few.

    On an H200, 128 blocks for 64 units were 1.01 to 1.03 times as fast as 132 of which four have nothing to do, 256 of
    264 for 512 units 1.01 times. With a cache in e4m3 and many short units they were slower.
    """
    even = units * (most // units) if 0 < units <= most else next((n for n in range(most, 0, -1) if units % n == 0), 0)
    return even if even >= NEARLY_ALL * most else most


def _launches(call: DecodeCall, sizes: Mapping[str, int], *, lacks: frozenset[str] = frozenset()) -> list[Launch]:
    """Launch split_kv, after the rotary embedding. lacks: the arguments that a step's kernel does not have."""
    blocks, tiles = _grid(call, sizes)
    if blocks >= 2**31 or tiles >= 2**16:
        raise ValueError(f"a grid of {blocks:,} x {tiles:,} blocks; 2,147,483,647 x 65,535 is the largest")
    before, names, call = _rotated(call)
    named = ("q", "k_cache", "v_cache", "k", "v", "o", "lse", "cache_seqlens", "block_table", "k_descale", "v_descale")
    arrays = [names.get(name, name) if name in call.arrays else None for name in named if name not in lacks]
    params = call.params(min_tiles=max(1, MIN_KEYS // sizes["BLOCK_N"]))
    functions = call.mod.arguments() if call.mod else ()
    shared = shared_bytes(sizes, call.arrays["q"].dtype.itemsize)
    args = (*arrays, *_PARTS, _TICKETS, params, *functions)
    return [*before, Launch("split_kv", (blocks, tiles), (32 * sizes["WARPS"],), shared, args)]


def _rotated(call: DecodeCall) -> tuple[list[Launch], dict[str, str], DecodeCall]:
    """Return the launch that rotates q and k, the names of the arrays that it writes, and the call of those."""
    if "rotary_cos" not in call.arrays:
        return [], {}, call
    batch, tokens, _, _ = call.arrays["q"].shape
    if batch > launches.MAX_GRID_YZ:
        raise ValueError(f"a rotary embedding of {batch:,} sequences: one grid takes {launches.MAX_GRID_YZ:,}")
    written = _rotary_scratch(call)
    names = dict(zip("qk", written, strict=True))
    arrays = {name: call.arrays[name] for name in ROTARY_TABLES}
    arrays |= dict.fromkeys(POSITIONS, call.arrays["cache_seqlens"])  # of each sequence's first token
    for name, of in names.items():
        arrays |= {name: call.arrays[name].heads_first, f"rotated_{name}": written[of].heads_first}
    own = Call(arrays, 1.0, (-1, -1), tokens, batch, True, rotary_interleaved=call.rotary_interleaved)
    renamed = {f"rotated_{name}": of for name, of in names.items()} | dict.fromkeys(POSITIONS, "cache_seqlens")
    before = launches.rotation_before(own, renamed, FIRST_POSITIONS=1)
    return before, names, call._replace(arrays={**call.arrays, **{name: written[of] for name, of in names.items()}})


def _rotary_scratch(call: DecodeCall) -> dict[str, Spec]:
    if "rotary_cos" not in call.arrays:
        return {}
    arrays = {name: call.arrays[name] for name in "qk"}  # plans of all dtypes share scratch by name
    return {f"rotated_{name}_{a.dtype.name}": Spec.dense(a.shape, a.dtype) for name, a in arrays.items()}


_PARTS, _TICKETS = ("partial_o", "partial_ml"), "tickets"


def _scratch(call: DecodeCall, sizes: Mapping[str, int]) -> dict[str, Spec]:
    blocks = 1 if call.num_splits == 1 else math.prod(_grid(call, sizes))  # uncut units have no partial results
    rows = 2 * blocks * sizes["STATE_ROWS"]
    if rows >= 2**31:
        raise ValueError(f"num_splits = {call.num_splits}: the parts have {rows:,} rows; 2,147,483,647 is the most")
    return _parts(rows, sizes) | {_TICKETS: Spec.dense((blocks,), np.int32)} | _rotary_scratch(call)


def _parts(rows: int, sizes: Mapping[str, int]) -> dict[str, Spec]:
    """Describe partial results: of each row its part of O, and maximum and sum."""
    shapes = (rows, sizes["HEAD_DIM"]), (rows, 2)
    return {name: Spec.dense(shape, np.float32) for name, shape in zip(_PARTS, shapes, strict=True)}


SPLIT_KV = _decoder(
    *("split_kv", "14_split_kv.cu", "pages, new tokens, any type", _sizes, _launches, _scratch),
    dtypes=("float32", "float16", "bfloat16"),
    features=(
        *("block_table", "k", "tree", "alibi_slopes", "sinks", "score_mod", "e4m3"),
        *("rotary_cos", "rotates", OTHER_DIMS),
    ),
)


# ---- the steps, in half types


def _units(call: DecodeCall, packed: bool) -> int:
    """Count sequences times KV heads, or times query heads if heads are not packed."""
    batch, _, heads, _ = call.arrays["q"].shape
    return batch * (call.kv_heads if packed else heads)


def _splits(call: DecodeCall, packed: bool) -> int:
    """Return the parts of a unit: as the call asks, or enough to fill the multiprocessors."""
    most = -(-call.room // MIN_KEYS)
    return call.num_splits or max(1, min(limits.multiprocessors() // _units(call, packed), most))


def _step_sizes(call: DecodeCall, *, packed: bool = True, stages: int = 0) -> dict[str, int]:
    q = call.arrays["q"]
    rows = call.rows if packed else q.shape[1]
    sizes = pick_sizes(q.shape[3], q.dtype.itemsize, rows, limits.most_shared())
    return {**sizes, "STAGES": stages} if stages else sizes


def _step_launches(
    call: DecodeCall, sizes: Mapping[str, int], *, packed: bool = True, cut: bool = True, ticket: bool = False
) -> list[Launch]:
    """Plan a step's launches. packed: heads are packed. cut: units are cut; without a ticket a second launch merges."""
    rows = call.rows if packed else call.arrays["q"].shape[1]
    tiles, units, splits = -(-rows // TILE_ROWS), _units(call, packed), _splits(call, packed) if cut else 1
    params, scratch = call.params(num_splits=splits), (*_PARTS, *([_TICKETS] if ticket else ()))
    lse, block = "lse" if "lse" in call.arrays else None, (32 * sizes["WARPS"],)
    shared = shared_bytes(sizes, call.arrays["q"].dtype.itemsize)
    args = ("q", "k_cache", "v_cache", "o", lse, "cache_seqlens", *(scratch if cut else ()), params)
    made = [Launch("split_kv", (units * splits, tiles), block, shared, args)]
    if splits > 1 and not ticket:
        made.append(Launch("merge_parts", (units, tiles), block, 0, ("o", lse, *scratch, params)))
    return made


def _step_scratch(
    call: DecodeCall, sizes: Mapping[str, int], *, packed: bool = True, ticket: bool = False
) -> dict[str, Spec]:
    rows = call.rows if packed else call.arrays["q"].shape[1]
    tiles, units, splits = -(-rows // TILE_ROWS), _units(call, packed), _splits(call, packed)
    made = _parts(units * splits * tiles * sizes["STATE_ROWS"], sizes)
    return {**made, _TICKETS: Spec.dense((units * tiles,), np.int32)} if ticket else made


def _step(file: str, *rest: Any) -> Stage:
    return _decoder(file[len("14_00_") :].removesuffix(".cu"), f"steps/{file}", *rest)


_BY_HEAD = {"packed": False}
_LATER = frozenset({"k", "v", "block_table", "k_descale", "v_descale"})
_STEPS = (
    _step(
        "14_00_one_block_a_head.cu",
        "a block for each head",
        partial(_step_sizes, stages=1, **_BY_HEAD),
        partial(_step_launches, cut=False, **_BY_HEAD),
        lambda call, sizes: {},
    ),
    _step(
        "14_01_split_keys.cu",
        "split keys",
        partial(_step_sizes, stages=1, **_BY_HEAD),
        partial(_step_launches, **_BY_HEAD),
        partial(_step_scratch, **_BY_HEAD),
    ),
    _step("14_02_packed_heads.cu", "packed heads", partial(_step_sizes, stages=1), _step_launches, _step_scratch),
    _step("14_03_copies_in_flight.cu", "copies in flight", _step_sizes, _step_launches, _step_scratch),
    _step(
        "14_04_last_block.cu",
        "merged by the last block",
        _step_sizes,
        partial(_step_launches, ticket=True),
        partial(_step_scratch, ticket=True),
    ),
    _step("14_05_equal_stretches.cu", "equal stretches", _step_sizes, partial(_launches, lacks=_LATER), _scratch),
)
# By the names that `stage` accepts: the steps, each made from the previous one, and split_kv.
DECODERS: Mapping[str, Stage] = {decoder.name: decoder for decoder in (*_STEPS, SPLIT_KV)}
