"""Tile sizes from 04 on: which for a head dimension and a GPU's shared memory; and why, of the register tiles.

    python3 -m helpers.attention.ladder.tiles            # the table
    from helpers.attention.ladder.tiles import pick
    print(pick(64, 99 * 1024).why)

The sizes are compiled into the kernel, so this is where they are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

KB = 1024
# Bytes of shared memory that a block may have at most, and where (CUDA C++ Programming Guide, compute capabilities).
LIMITS: dict[int, str] = {
    48 * KB: "any GPU, if nobody asks for more",
    64 * KB: "T4, RTX 20 (sm_75)",
    99 * KB: "RTX 30, 40, 50 (sm_86, sm_89, sm_120)",
    163 * KB: "A100 (sm_80)",
    227 * KB: "H100, H200, B200 (sm_90, sm_100)",
}
# Bytes that all blocks of a multiprocessor share, by the limit of one. A block takes 1 KB more than it asks for.
PER_MULTIPROCESSOR = {48 * KB: 64 * KB, 64 * KB: 64 * KB, 99 * KB: 100 * KB, 163 * KB: 164 * KB, 227 * KB: 228 * KB}
RESERVED = KB
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """Sizes of one launch: `threads` share BLOCK_M x BLOCK_N scores, `threads_x` of them a row."""

    block_m: int
    block_n: int
    threads: int
    threads_x: int
    why: str = ""

    @property
    def defines(self) -> dict[str, int]:
        """The -D options of the kernel, without HEAD_DIM."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "THREADS": self.threads,
            "THREADS_X": self.threads_x,
        }

    @property
    def scores(self) -> tuple[int, int]:
        """Rows and columns of S that one thread computes: TILE_M x TILE_N."""
        return self.block_m * self.threads_x // self.threads, self.block_n // self.threads_x

    def shared_bytes(self, head_dim: int) -> int:
        """sizeof(Shared) of the kernel: Q, P, K and V, with their padding, in bytes."""
        row = -(-head_dim // 4)  # in float4
        k_row, v_row = row | 1, -(-row // self.threads_x) * self.threads_x
        p = 4 * self.block_n * (self.block_m + 8)
        return 16 * (self.block_m * row + self.block_n * (k_row + v_row)) + p

    def blocks(self, head_dim: int, limit: int) -> int:
        """How many blocks a multiprocessor with that limit has shared memory for."""
        return _room(self.shared_bytes(head_dim), limit)


@dataclass(frozen=True)
class Gpu:
    """What one multiprocessor of a GPU has. limit: bytes of shared memory of one block; shared: of all its blocks."""

    name: str
    arch: str
    limit: int
    shared: int
    threads: int
    registers: int = 65536

    def resident(self, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
        """How many blocks run on a multiprocessor at a time, and which resource is too scarce for one more.

        Args:
            threads: of a block; registers: of a thread; shared_bytes: of a block.
        """
        warps = -(-threads // 32)
        # Each of the 4 schedulers has a quarter of the registers. A warp takes them in units of 256: 8 for a lane.
        warps_there = 4 * (self.registers // 4 // (32 * (-(-registers // 8) * 8)))
        room = {
            "shared memory": self.shared // (shared_bytes + RESERVED) if shared_bytes <= self.limit else 0,
            "registers": warps_there // warps,
            "threads": self.threads // threads,
        }
        what = min(room, key=lambda name: room[name])
        return room[what], what


GPUS = (
    Gpu("T4", "sm_75", 64 * KB, 64 * KB, 1024),
    Gpu("A100", "sm_80", 163 * KB, 164 * KB, 2048),
    Gpu("RTX 4090", "sm_89", 99 * KB, 100 * KB, 1536),
    Gpu("H100", "sm_90", 227 * KB, 228 * KB, 2048),
)


def this_gpu() -> Gpu | None:
    """The GPU of this machine, or None on the CPU engine."""
    from helpers.device import ON_GPU, cp

    if not ON_GPU:
        return None
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    return Gpu(
        properties["name"].decode(),
        f"sm_{properties['major']}{properties['minor']}",
        properties["sharedMemPerBlockOptin"],
        properties["sharedMemPerMultiprocessor"],
        properties["maxThreadsPerMultiProcessor"],
        properties["regsPerMultiprocessor"],
    )


# (head_dim, limit in KB) -> sizes, and TFLOP/s of an H200 whose multiprocessors were given as many blocks as a GPU with
# that limit has room for (4096 rows and keys; 64 heads, 32 from head_dim 96 on, 16 at 256). The best of 33 tiles; where
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
    """The tiles for a head dimension where a block may have `shared_limit` bytes of shared memory.

    Between two head dimensions of the table the larger one's tiles are taken, between two limits the smaller one's:
    what fits there fits here.

    Raises:
        ValueError: a head_dim outside 1 to 256, or a limit below 48 KB.
    """
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {MAX_HEAD_DIM}")
    if shared_limit < min(LIMITS):
        raise ValueError(f"shared_limit = {shared_limit:,} bytes; every GPU gives a block at least {min(LIMITS):,}")
    limit = _known(shared_limit)
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


def _known(shared_limit: int) -> int:
    """The largest limit of the table that a GPU with this one keeps."""
    return max((limit for limit in LIMITS if limit <= shared_limit), default=min(LIMITS))


def _room(shared_bytes: int, limit: int) -> int:
    """For how many such blocks a multiprocessor has shared memory, where one block may have `limit` bytes."""
    return PER_MULTIPROCESSOR[limit] // (shared_bytes + RESERVED)


# Where a launch has few blocks, what counts is that every multiprocessor has one. Up to this head_dim: fewer rows a
# block. On an H200, one head of 4096 rows: 29.6 TFLOP/s for 9.6 at 64, 24.6 for 11.3 at 128.
_FEW = {64: (32, 128, 128, 16), 128: (32, 64, 128, 16)}
# Where each has one and none a second, twice the threads a block: one head of 16384 rows, 43.1 for 39.2 TFLOP/s at 64.
# Not at 32: 27.7 for 37.0.
_LONE = {32: None, 64: (128, 128, 256, 16)}


@functools.cache
def pick_few(head_dim: int, shared_limit: int = 48 * KB) -> Tiles | None:
    """The tiles for a launch whose blocks would leave half a GPU idle; None where `pick` has no better ones.

    Raises:
        ValueError: as `pick` does.
    """
    usual = pick(head_dim, shared_limit)
    few = _other(_FEW, head_dim, shared_limit, "fewer rows a block: more blocks")
    return few if few and few.block_m < usual.block_m else None


@functools.cache
def pick_lone(head_dim: int, shared_limit: int = 48 * KB) -> Tiles | None:
    """The tiles for a launch that gives a multiprocessor one block at most; None where `pick` has no better ones.

    Raises:
        ValueError: as `pick` does.
    """
    usual = pick(head_dim, shared_limit)
    lone = _other(_LONE, head_dim, shared_limit, "a block that is alone has room for twice the threads")
    return lone if lone and (lone.block_m, lone.threads) == (usual.block_m, 2 * usual.threads) else None


def _other(
    table: Mapping[int, tuple[int, int, int, int] | None], head_dim: int, shared_limit: int, why: str
) -> Tiles | None:
    """The table's tiles for a head dimension, where there are some and they fit."""
    sizes = next((sizes for most, sizes in table.items() if head_dim <= most), None)
    other = Tiles(*sizes, why=why) if sizes else None
    return other if other and other.shared_bytes(head_dim) <= shared_limit else None


# ---- 08, the backward in float32

# By head_dim: the first that fits is taken.
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


# Where a multiprocessor has room for two such blocks: 35.4 TFLOP/s for 33.8 on an H200, at 4 x 16 heads of 4096 rows.
_BACKWARD_PAIRS = {32: None, 64: Tiles(32, 128, 128, 16)}
# Where a launch has few blocks: fewer keys a block. An H200 gives each of these blocks a multiprocessor, so those that
# have one compute at the rate that the tile reaches with all of them: 29.2 TFLOP/s at 64, 29.0 at 128. One head of 4096
# rows has 64 such blocks in place of 32 at 64, 86 in place of 43 at 128.
_BACKWARD_FEW = {32: None, 64: Tiles(64, 64, 256, 16), 96: None, 128: Tiles(64, 48, 256, 16)}


def backward_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """sizeof(Shared) of 08: Q, dO, K, V and P, with their padding, and two numbers for each row."""
    rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
    row = -(-head_dim // 4) | 1  # in float4
    return 16 * 2 * (rows + keys) * row + 4 * keys * (rows + 8) + 8 * rows


@functools.cache
def pick_backward(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 08, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 256."""
    sizes = {most: [tiles.defines for tiles in found] for most, found in _BACKWARD.items()}
    usual = _first(sizes, backward_shared_bytes, head_dim, shared_limit)
    pair = next((tiles for most, tiles in _BACKWARD_PAIRS.items() if head_dim <= most), None)
    if pair and _room(backward_shared_bytes(head_dim, pair.defines), _known(shared_limit)) >= 2:
        return pair.defines
    return usual


@functools.cache
def pick_few_backward(head_dim: int, shared_limit: int) -> dict[str, int]:
    """As `pick_backward`, for a launch whose blocks would leave half a GPU idle; empty where it has no better ones."""
    usual = pick_backward(head_dim, shared_limit)
    few = next((tiles for most, tiles in _BACKWARD_FEW.items() if head_dim <= most), None)
    if few is None or few.block_n >= usual["BLOCK_N"]:
        return {}
    return few.defines if backward_shared_bytes(head_dim, few.defines) <= shared_limit else {}


# ---- 08, the backward in half types

_BACKWARD_MMA_NAMES = (
    *("BLOCK_M", "BLOCK_N", "WARPS", "WARPS_KEYS", "WARPS_DKV", "WARPS_DQ", "SLICE_M", "MIN_BLOCKS", "DQ_LATER"),
)
# By head_dim: the first of which a multiprocessor has room for MIN_BLOCKS blocks. The first of 64 and of 128 are the
# fastest on an H200 in bfloat16. The others are what fits: no GPU that needs them was measured.
_BACKWARD_MMA: dict[int, tuple[tuple[int, ...], ...]] = {
    64: ((64, 128, 4, 4, 4, 2, 32, 2, 1), (128, 128, 8, 4, 4, 4, 64, 1, 0), (64, 128, 8, 4, 4, 2, 32, 1, 0)),
    128: ((64, 128, 8, 4, 4, 2, 32, 1, 1), (64, 128, 8, 4, 4, 2, 32, 1, 0), (32, 64, 8, 4, 2, 2, 16, 1, 1)),
    256: ((32, 64, 8, 4, 2, 2, 16, 1, 1), (32, 32, 4, 2, 2, 2, 16, 1, 1), (16, 32, 2, 2, 2, 1, 16, 1, 1)),
}

# Where a launch has few blocks, by head_dim: the fastest, or within 7 % of it, of 56 tiles at 128 and 156 at 64 that
# spill no registers, in bfloat16 on an H200, at 14 shapes of 1 to 24 heads and 512 to 4096 rows. With fewer keys a
# block more multiprocessors are at work; a block that has a multiprocessor for itself gets twice the warps.
_OTHER_BACKWARD_MMA: dict[str, dict[int, tuple[int, ...]]] = {
    "few": {64: (64, 64, 8, 2, 2, 4, 16, 1, 1), 128: (64, 64, 8, 2, 2, 4, 16, 1, 1)},
    "fewest": {64: (64, 32, 4, 2, 2, 2, 32, 1, 1), 128: (64, 32, 8, 2, 2, 2, 16, 1, 1)},
    "lone": {64: (128, 128, 8, 4, 4, 4, 32, 1, 1)},
}


def backward_mma_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """SHARED_BYTES of 08 in half types: K and V, two tiles each of Q and dO, dS, lse and delta twice.

    dS has two buffers where dQ is computed later (DQ_LATER, the default). P has one, unless it stays in registers.
    """
    rows, keys, warps = sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["WARPS"]
    in_registers = sizes["WARPS_KEYS"] == sizes["WARPS_DKV"] == warps
    scores = 1 + sizes.get("DQ_LATER", 1) + (not in_registers)
    return 2 * _fragments(head_dim) * (2 * keys + 4 * rows) + 2 * scores * keys * rows + 2 * 8 * rows


def backward_mma_candidates(head_dim: int) -> list[dict[str, int]]:
    """The sizes of 08 in half types for a head dimension that compute dQ a step later, the best first.

    Without DQ_LATER, so that they are those of the steps before that idea as well.
    """
    found = _BACKWARD_MMA[min(most for most in _BACKWARD_MMA if most >= head_dim)]
    return [dict(zip(_BACKWARD_MMA_NAMES[:-1], sizes[:-1], strict=True)) for sizes in found if sizes[-1]]


def backward_dq_columns(head_dim: int, sizes: Mapping[str, int]) -> int:
    """DQ_COLUMNS of 08 in half types and of 13: columns of dQ_accum.

    Whole fragments of 16 for each warp along them; in 13 whole panels of 64.
    """
    columns = 16 * (sizes["WARPS"] // sizes["WARPS_DQ"]) if "WARPS" in sizes else 64
    return -(-head_dim // columns) * columns


@functools.cache
def pick_backward_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 08 in half types, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 256."""

    def shared_bytes(d: int, sizes: Mapping[str, int]) -> int:
        """Of one block; more than there is where MIN_BLOCKS of them do not fit."""
        needed = backward_mma_shared_bytes(d, sizes)
        return needed if _room(needed, _known(shared_limit)) >= sizes["MIN_BLOCKS"] else shared_limit + 1

    sizes = {
        most: [dict(zip(_BACKWARD_MMA_NAMES, t, strict=True)) for t in found] for most, found in _BACKWARD_MMA.items()
    }
    return _first(sizes, shared_bytes, head_dim, shared_limit)


@functools.cache
def pick_other_backward_mma(blocks: str, head_dim: int, shared_limit: int) -> dict[str, int]:
    """As `pick_backward_mma`, for a launch of "few", "fewest" or "lone" blocks; empty where it has no better ones.

    "few": half a GPU would be idle with the usual tile; "fewest": with the tile for few blocks as well; "lone": no
    multiprocessor has two blocks.
    """
    found = next((t for most, t in _OTHER_BACKWARD_MMA[blocks].items() if head_dim <= most), None)
    sizes = dict(zip(_BACKWARD_MMA_NAMES, found or (), strict=False))
    return sizes if found and backward_mma_shared_bytes(head_dim, sizes) <= shared_limit else {}


# ---- 06 and 07, in half types


def wmma_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """SHARED_BYTES of 06: tiles of Q, K and V with 8 elements of padding to a row, and S."""
    rows = sizes["BLOCK_M"] + 2 * sizes["BLOCK_N"]
    return 2 * (_fragments(head_dim) + 8) * rows + 4 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 4)


def mma_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """Of 07: tiles of Q, and two each of K and V."""
    return 2 * _fragments(head_dim) * (sizes["BLOCK_M"] + 4 * sizes["BLOCK_N"])


def _fragments(head_dim: int) -> int:
    """Elements of a row in shared memory: filled up to whole fragments of 16."""
    return -(-head_dim // 16) * 16


# The first that fits is taken. From 129 on, acc of 32 rows would not fit a warp's registers: 16 rows each.
_WMMA = {
    64: ({"BLOCK_M": 128, "BLOCK_N": 32, "MIN_BLOCKS": 3},),
    128: ({"BLOCK_M": 128, "BLOCK_N": 32, "MIN_BLOCKS": 2}, {"BLOCK_M": 64, "BLOCK_N": 32, "MIN_BLOCKS": 2}),
}
_MMA = {
    128: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2},),
    256: (
        {"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1},
        {"BLOCK_M": 128, "BLOCK_N": 32, "WARPS": 8, "MIN_BLOCKS": 1},
        {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4, "MIN_BLOCKS": 1},
    ),
}
# More keys to a tile: faster at these head dimensions on an H200 (5 % at 64), slower at 48, where registers spill at
# 128. Only where a multiprocessor has room for two such blocks.
_MMA_WIDE = {32: 128, 64: 128, 80: 96, 96: 96}


@functools.cache
def pick_wmma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 06, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 128."""
    return _first(_WMMA, wmma_shared_bytes, head_dim, shared_limit)


# Where a block may have less: the fastest of the 20 tiles of `helpers.bench.studies.presets` on an H200 whose
# multiprocessors
# were given as many blocks as a GPU with that limit has room for. (head_dim
# from, to, BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS)
_MMA_PRESETS: Mapping[int, Sequence[tuple[int, int, int, int, int, int]]] = {
    99 * KB: ((65, 96, 256, 64, 8, 1), (97, 128, 256, 32, 8, 1)),
    163 * KB: ((97, 128, 128, 32, 4, 2),),  # 48 keys were 4 % faster there, but spill registers on sm_80
}


@functools.cache
def pick_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 07, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 256."""
    for least, most, *preset in _MMA_PRESETS.get(_known(shared_limit), ()):
        if least <= head_dim <= most:
            return dict(zip(("BLOCK_M", "BLOCK_N", "WARPS", "MIN_BLOCKS"), preset, strict=True))
    sizes = _first(_MMA, mma_shared_bytes, head_dim, shared_limit)
    wide = {**sizes, "BLOCK_N": _MMA_WIDE.get(_fragments(head_dim), sizes["BLOCK_N"])}
    blocks = _room(mma_shared_bytes(head_dim, wide), _known(shared_limit))
    return wide if blocks >= wide["MIN_BLOCKS"] else sizes


@functools.cache
def pick_few_mma(head_dim: int, shared_limit: int) -> dict[str, int]:
    """As `pick_mma`, for a launch whose blocks would leave half a GPU idle: 64 rows a block, 16 a warp.

    Up to head_dim 128 with 128 keys a tile where they fit: a block has its multiprocessor for itself, and fewer turns.
    """
    sizes = {**pick_mma(head_dim, shared_limit), "BLOCK_M": 64, "WARPS": 4}
    wide = {**sizes, "BLOCK_N": 128}
    return wide if head_dim <= 128 and mma_shared_bytes(head_dim, wide) <= shared_limit else sizes


# ---- 11, attention with its output projection

# O, packed, and the sums of as many columns take most registers: 16 rows a warp from 65 columns on. With 32 rows, the
# form with atomics was 15 % faster on an H200 at 128, but registers spill.
_PROJECTION = {
    64: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2},),
    128: ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1}, {"BLOCK_M": 64, "BLOCK_N": 48, "WARPS": 4}),
}


def pick_projection(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 11_projection.cu, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 128."""
    return _first(_PROJECTION, mma_shared_bytes, head_dim, shared_limit)


# ---- 11, half types


# ---- 12, 07 in CuTe


@functools.cache
def pick_cute(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 12, without HEAD_DIM: 07's, or 64 keys a tile where its block would not copy 07's tile evenly.

    Raises:
        ValueError: no tile fits, or head_dim is above 128.
    """
    if head_dim > 128:
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to 128")
    chunks = _fragments(head_dim) // 8  # of 16 bytes in a row; 8, 4 or 2 threads copy one
    of_a_row = next(threads for threads in (8, 4, 2) if chunks % threads == 0)
    sizes = pick_mma(head_dim, shared_limit)
    even = sizes["BLOCK_N"] % (32 * sizes["WARPS"] // of_a_row) == 0
    return sizes if even else {"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2}


# ---- 10, Hopper

# By head_dim, without a mask and with one: BLOCK_M, BLOCK_N. A mask wastes less of a narrower tile.
_HOPPER: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {
    64: ((192, 128), (192, 128)),
    96: ((128, 144), (128, 128)),
    128: ((128, 160), (128, 128)),
    192: ((128, 96), (128, 96)),
    256: ((128, 64), (128, 64)),
}
_FEW_KEYS = 1024  # up to here the last of the wide tiles would be a large part of the work
HOPPER_STAGES = 2


def hopper_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """SHARED_BYTES of 10: Q, STAGES tiles each of K and V, in panels of 64 columns; one of O; mbarriers."""
    stages = sizes.get("STAGES", HOPPER_STAGES)
    row = 128 * -(-head_dim // 64)
    barriers = 2 * (sizes["BLOCK_M"] // 64) + 4 * stages
    return row * (sizes["BLOCK_M"] + 2 * stages * sizes["BLOCK_N"]) + 128 * sizes["BLOCK_M"] + 8 * barriers


@functools.cache
def pick_hopper(head_dim: int, masked: bool = False, keys: int | None = None) -> dict[str, int]:
    """The -D options of 10, without HEAD_DIM.

    Args:
        masked: causal, or a window. keys: N_kv; many where it is None.

    Raises:
        ValueError: head_dim is above 256.
    """
    if not 1 <= head_dim <= max(_HOPPER):
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {max(_HOPPER)}")
    block_m, block_n = _HOPPER[min(most for most in _HOPPER if most >= head_dim)][masked]
    if keys is not None and keys <= _FEW_KEYS:
        block_n = min(block_n, 128)
        block_m = 128 if masked else block_m
    elif keys is not None and block_n == 160 and 1.04 * (-(-keys // 176) * 176) <= -(-keys // 160) * 160:
        block_n = 176  # takes 1.016 times as long for a key, and here leaves out a tile, as at 2112 keys
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


def pick_hopper_with_functions(head_dim: int, *, masked: bool, biased: bool) -> dict[str, int]:
    """The same with functions of scores, which need registers. masked: by a mask_mod. biased: by an array."""
    if head_dim <= 64 and not masked:
        return {"BLOCK_M": 192, "BLOCK_N": 96 if biased else 128}
    return {"BLOCK_M": 128, "BLOCK_N": 128} if head_dim <= 128 else pick_hopper(head_dim, masked=True)


# ---- 13, the backward on Hopper

# By head_dim: BLOCK_M, the same with the derivative of a score_mod, which needs registers.
_HOPPER_BACKWARD = {64: (128, 64), 128: (64, 32)}

# SHARED_BYTES of 13 for longer rows: K, V, two tiles of Q and dO in rows of 512 bytes; P and dS twice; lse and delta.
HOPPER_BACKWARD_WIDE_SHARED = 512 * (2 * 64 + 4 * 64) + 4 * 2 * 64 * 64 + 16 * 64 + 64


def hopper_backward_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """SHARED_BYTES of 13: K and V, two tiles each of Q, dO and dS, dQ in float32; two lse and delta; mbarriers."""
    rows, keys, panels = sizes["BLOCK_M"], sizes["BLOCK_N"], -(-head_dim // 64)
    return 128 * panels * (2 * keys + 4 * rows) + 4 * rows * keys + 256 * panels * rows + 16 * rows + 64


@functools.cache
def pick_hopper_backward(head_dim: int, derivative: bool = False) -> dict[str, int]:
    """The -D options of 13, without HEAD_DIM.

    Raises:
        ValueError: head_dim is above 128.
    """
    if not 1 <= head_dim <= max(_HOPPER_BACKWARD):
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {max(_HOPPER_BACKWARD)}")
    block_m = _HOPPER_BACKWARD[min(most for most in _HOPPER_BACKWARD if most >= head_dim)][derivative]
    return {"BLOCK_M": block_m, "BLOCK_N": 128}


# ---- 15, float32 on tensor cores

# By head_dim: the first that fits is taken. Those of 64 and 128 are the fastest of 12 on an H200, at 4096 rows.
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


def tf32_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """Of 15: tiles of Q, and two each of K and V, in rows of whole lines of 128 bytes."""
    return 128 * -(-head_dim // 32) * (sizes["BLOCK_M"] + 4 * sizes["BLOCK_N"])


@functools.cache
def pick_tf32(head_dim: int, shared_limit: int) -> dict[str, int]:
    """The -D options of 15, without HEAD_DIM. ValueError where no tile fits, or head_dim is above 256."""
    return _first(_TF32, tf32_shared_bytes, head_dim, shared_limit)


def packed_tf32(head_dim: int) -> dict[str, int]:
    """What packed sequences have instead: with the search of a slot, two row fragments a warp spill at head_dim 64."""
    return {"BLOCK_M": 64, "MIN_BLOCKS": 3} if head_dim <= 64 else {}


@functools.cache
def pick_few_tf32(head_dim: int, shared_limit: int) -> dict[str, int]:
    """As `pick_tf32`, for a launch whose blocks would leave half a GPU idle: half the rows a block."""
    sizes = pick_tf32(head_dim, shared_limit)
    block_m = max(sizes["BLOCK_M"] // 2, 32)
    return {**sizes, "BLOCK_M": block_m, "WARPS": min(sizes["WARPS"], block_m // 16)}


# By head_dim: keys a tile, and how many tiles of K and V, in two parts each, there is shared memory for. On an H200, at
# 4096 rows, fewer keys were slower; of more, the scores and two accumulators of O would spill.
_FP16X3: dict[int, dict[str, int]] = {
    64: {"BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 5},
    96: {"BLOCK_M": 128, "BLOCK_N": 80, "STAGES": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 5},
}


def fp16x3_shared_bytes(head_dim: int, sizes: Mapping[str, int]) -> int:
    """SHARED_BYTES of 15 by fp16: Q and STAGES tiles of K and V, each in two parts, in panels; mbarriers."""
    row = 2 * 128 * -(-head_dim // 64)
    barriers = 2 * (sizes["BLOCK_M"] // 64) + 2 * sizes["STAGES"]
    return row * (sizes["BLOCK_M"] + sizes["STAGES"] * sizes["BLOCK_N"]) + 8 * barriers


@functools.cache
def pick_fp16x3(head_dim: int) -> dict[str, int]:
    """The -D options of 15 by fp16, without HEAD_DIM. ValueError where head_dim is above 128."""
    if not 1 <= head_dim <= max(_FP16X3):
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {max(_FP16X3)}")
    return dict(_FP16X3[min(most for most in _FP16X3 if most >= head_dim)])


def _first(
    table: Mapping[int, Sequence[Mapping[str, int]]],
    shared_bytes: Callable[[int, Mapping[str, int]], int],
    head_dim: int,
    shared_limit: int,
) -> dict[str, int]:
    if not 1 <= head_dim <= max(table):
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {max(table)}")
    for sizes in table[min(most for most in table if most >= head_dim)]:
        if shared_bytes(head_dim, sizes) <= shared_limit:
            return dict(sizes)
    raise ValueError(f"shared_limit = {shared_limit:,} bytes; no tile for head_dim = {head_dim} fits")


def table() -> str:
    """All that `pick` can answer, as text."""
    lines = []
    for limit, who in LIMITS.items():
        lines.append(f"{limit // KB} KB: {who}")
        for head_dim in sorted({head_dim for head_dim, _ in _MEASURED}):
            tiles = pick(head_dim, limit)
            sizes = " ".join(f"{name}={size}" for name, size in tiles.defines.items())
            lines.append(f"  head_dim <= {head_dim:3}: {sizes:52} {tiles.why}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
