"""Tile sizes: the capacities of GPUs, register tiles, and how a stage's table of sizes is read.

Sizes are compiled into a kernel. Each stage's sizes, and the reasons for them, are in stages/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

KB = 1024
# Bytes of shared memory that a block may have at most, and where (CUDA C++ Programming Guide, compute capabilities).
LIMITS: dict[int, str] = {
    48 * KB: "any GPU, without opting in to more",
    64 * KB: "T4, RTX 20 (sm_75)",
    99 * KB: "RTX 30, 40, 50 (sm_86, sm_89, sm_120)",
    163 * KB: "A100 (sm_80)",
    227 * KB: "H100, H200, B200 (sm_90, sm_100)",
}
# Bytes shared by all blocks of a multiprocessor, by the limit of one. A block takes 1 KB more than it requests.
PER_MULTIPROCESSOR = {48 * KB: 64 * KB, 64 * KB: 64 * KB, 99 * KB: 100 * KB, 163 * KB: 164 * KB, 227 * KB: 228 * KB}
RESERVED = KB
MAX_HEAD_DIM = 256
Sizes = Mapping[str, int]  # -D options of a kernel, by name


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
        """The kernel's -D options, without HEAD_DIM."""
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
        """Count sizeof(Shared) of the kernel: Q, P, K and V, with their padding, in bytes."""
        row = -(-head_dim // 4)  # in float4
        k_row, v_row = row | 1, -(-row // self.threads_x) * self.threads_x
        p = 4 * self.block_n * (self.block_m + 8)
        return 16 * (self.block_m * row + self.block_n * (k_row + v_row)) + p

    def blocks(self, head_dim: int, limit: int) -> int:
        """Return how many blocks' shared memory fits a multiprocessor with that limit."""
        return blocks_in_shared_memory(self.shared_bytes(head_dim), limit)


@dataclass(frozen=True)
class Gpu:
    """The resources of a multiprocessor. limit: bytes of shared memory of one block; shared: of all its blocks."""

    name: str
    arch: str
    limit: int
    shared: int
    threads: int
    registers: int = 65536

    def resident(self, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
        """Return how many blocks run on a multiprocessor at a time, and which resource limits them.

        Args:
            threads: per block; registers: per thread; shared_bytes: per block.
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
    """Return the GPU of this machine, or None on the CPU engine."""
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


def known_limit(shared_limit: int) -> int:
    """Return the largest of `LIMITS` that is not above `shared_limit`, or the smallest if all are above it."""
    return max((limit for limit in LIMITS if limit <= shared_limit), default=min(LIMITS))


def blocks_in_shared_memory(shared_bytes: int, shared_limit: int) -> int:
    """Return how many such blocks fit a multiprocessor's shared memory, if a block may have `shared_limit` bytes."""
    return PER_MULTIPROCESSOR[known_limit(shared_limit)] // (shared_bytes + RESERVED)


def round_up(number: int, multiple: int) -> int:
    """Round the number up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


# ---- a stage's table of sizes, by the largest head dimension that an entry is for

T = TypeVar("T")


def entry(table: Mapping[int, T], head_dim: int) -> T:
    """Return the entry for a head dimension.

    Raises:
        ValueError: it is below 1, or above the table's largest.
    """
    if not 1 <= head_dim <= max(table):
        raise ValueError(f"head_dim = {head_dim}; these tiles are for 1 to {max(table)}")
    return table[min(most for most in table if most >= head_dim)]


def other_entry(table: Mapping[int, T | None], head_dim: int) -> T | None:
    """Return the entry of a table that has only some head dimensions, in order; None for the others."""
    return next((other for most, other in table.items() if head_dim <= most), None)


def first_that_fits(
    choices: Sequence[Sizes], shared_bytes: Callable[[Sizes], int], head_dim: int, shared_limit: int
) -> dict[str, int]:
    """Return the first sizes with which a block takes at most `shared_limit` bytes.

    Raises:
        ValueError: nothing fits.
    """
    for sizes in choices:
        if shared_bytes({**sizes, "HEAD_DIM": head_dim}) <= shared_limit:
            return dict(sizes)
    raise ValueError(f"shared_limit = {shared_limit:,} bytes; no tile for head_dim = {head_dim} fits")
