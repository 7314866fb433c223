"""Tile sizes of the register-tiled kernels (04 and 05): which for a head dimension and a GPU's shared memory, and why.

    python3 -m helpers.tiles            # the table
    from helpers.tiles import pick
    print(pick(64, 99 * 1024).why)

The sizes are compiled into the kernel, so this is where they are chosen.
"""

from __future__ import annotations

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
        """How many blocks a multiprocessor with that limit has room for, as far as shared memory goes."""
        return PER_MULTIPROCESSOR[limit] // (self.shared_bytes(head_dim) + RESERVED)


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
    limit = max(known for known in LIMITS if known <= shared_limit)
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
