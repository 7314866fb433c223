"""How many blocks of a launch may have begun at once: those that wait for each other have to."""

from __future__ import annotations

import functools
from pathlib import Path

from . import runtime

# An H200: multiprocessors, and what each of them holds.
MULTIPROCESSORS = 132
THREADS, BLOCKS, SHARED, RESERVED = 2048, 32, 228 * 1024, 1024  # RESERVED: bytes of shared memory for each block


@functools.cache
def most_threads() -> int:
    """Threads whose stacks the engine can keep, each with a guard: on Linux a process has so many mappings only."""
    try:
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65536
    own = 4096 + 2 * 1024 * runtime.n_workers()  # of Python, and of blocks that wait for nobody
    return max(1024, min(65536, (mappings - own) // 2))


def blocks_on_gpu(threads: int, shared: int) -> int:
    """Blocks of so many threads and bytes of shared memory that an H200 holds at once, whatever their registers."""
    threads = (threads + 31) // 32 * 32
    return MULTIPROCESSORS * min(THREADS // threads, BLOCKS, SHARED // (shared + RESERVED))


def blocks_at_once(threads: int, shared: int) -> int:
    """Of them, those that the engine can keep. Any number of blocks that wait for nobody may be in a launch."""
    return max(1, min(blocks_on_gpu(threads, shared), most_threads() // threads))
