"""The limits of a launch: those of compute capability 9.0, and how many blocks can be resident at once.

Blocks that wait for each other must all be resident: as many as on an H200, if the engine has stacks for their threads.
"""

from __future__ import annotations

import functools
from pathlib import Path

from . import runtime
from .failures import LaunchError

MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_PER_BLOCK = 48 * 1024
SHARED_PER_BLOCK_OPTIN = 227 * 1024

# Per multiprocessor; RESERVED is shared memory that each block takes in addition to its own.
REGISTERS, THREADS, BLOCKS = 64 * 1024, 2048, 32
SHARED_PER_MULTIPROCESSOR, RESERVED = 228 * 1024, 1024
MAX_CLUSTER = 8  # blocks
MULTIPROCESSORS = 132  # of an H200

Sizes = tuple[int, int, int]


@functools.cache
def most_threads() -> int:
    """Return the number of threads whose stacks fit: each needs a guard, and Linux limits mappings."""
    try:
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65536
    own = 4096 + 2 * 1024 * runtime.n_workers()  # for Python, and for blocks that wait for no other
    return max(1024, min(65536, (mappings - own) // 2))


def blocks_on_gpu(threads: int, shared: int) -> int:
    """Return how many blocks an H200 holds at once, by threads and bytes of shared memory; ignores registers."""
    threads = (threads + 31) // 32 * 32
    return MULTIPROCESSORS * min(THREADS // threads, BLOCKS, SHARED_PER_MULTIPROCESSOR // (shared + RESERVED))


@functools.lru_cache(maxsize=256)
def blocks_at_once(threads: int, shared: int) -> int:
    """Return how many blocks can be resident at once on the engine; grids that never synchronise may be larger."""
    return max(1, min(blocks_on_gpu(threads, shared), most_threads() // threads))


@functools.lru_cache(maxsize=256)
def registers(threads: int, least_blocks: int) -> int:
    """Return each thread's initial registers, by `__launch_bounds__`; 0 if it does not say."""
    if not least_blocks:
        return 0
    whole_warps = (threads + 31) // 32 * 32
    return min(REGISTERS // (least_blocks * whole_warps) // 8 * 8, 256)


def check_sizes(name: str, grid: Sizes, block: Sizes, most: int) -> None:
    """Refuse a grid or a block that is too large.

    most: threads allowed by the kernel's `__launch_bounds__`.

    Raises:
        LaunchError: a GPU refuses it.
    """
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS_PER_BLOCK:
        raise LaunchError(f"a block of {block} has {threads:,} threads; a GPU takes {MAX_THREADS_PER_BLOCK:,} at most")
    if threads > most:
        raise LaunchError(
            f"a block of {block} has {threads:,} threads; {name} is compiled for {most:,} at most, by its "
            "__launch_bounds__ (a GPU refuses the launch)"
        )
    for what, sizes, limits in (("block", block, MAX_BLOCK), ("grid", grid, MAX_GRID)):
        for axis, size, limit in zip("xyz", sizes, limits, strict=True):
            if not 1 <= size <= limit:
                raise LaunchError(f"{what}.{axis} = {size:,}: a GPU takes 1 to {limit:,}")


def cluster_of(name: str, sizes: Sizes) -> Sizes:
    """Return the sizes of a kernel's cluster in blocks, (1, 1, 1) without `__cluster_dims__` (zeros).

    Raises:
        LaunchError: CuPy cannot launch a cluster of that size on a GPU.
    """
    blocks = sizes[0] * sizes[1] * sizes[2]
    if not sizes[0]:
        return (1, 1, 1)
    if not 1 <= blocks <= MAX_CLUSTER:
        raise LaunchError(
            f"{name} has __cluster_dims__{sizes}, {blocks} blocks: a GPU takes clusters of 1 to {MAX_CLUSTER}. (An "
            "H200 takes 16 with cudaFuncAttributeNonPortableClusterSizeAllowed, which CuPy cannot set.)"
        )
    return sizes


def check_cluster(name: str, grid: Sizes, cluster: Sizes, *, cooperative: bool) -> None:
    """Refuse a grid that does not consist of whole clusters.

    Raises:
        LaunchError: a GPU refuses it; or it is a cooperative launch of clusters, which the engine does not support.
    """
    if cluster == (1, 1, 1):
        return
    for axis, size, own in zip("xyz", grid, cluster, strict=True):
        if size % own:
            raise LaunchError(
                f"grid.{axis} = {size:,} is not a multiple of {own}, the size of {name}'s clusters along {axis} "
                "(__cluster_dims__): a GPU refuses the launch"
            )
    if cooperative:
        raise LaunchError(
            f"the CPU engine does not support cooperative launches of clusters: {name} has __cluster_dims__{cluster}. "
            "Leave out enable_cooperative_groups; the blocks of a cluster meet in cluster.sync()"
        )


def check_dynamic_shared(name: str, size: int, allowed: int, static: int) -> None:
    """Refuse more dynamic shared memory than the kernel is allowed; all sizes in bytes.

    Raises:
        LaunchError: a GPU refuses it.
    """
    if not 0 <= size <= allowed:
        raise LaunchError(
            f"shared_mem = {size:,} bytes, but a launch of {name} may ask for {allowed:,} (48 KB less {static:,} "
            f"static, if not raised). Set kernel.max_dynamic_shared_size_bytes = {size} before the launch, up to "
            f"{SHARED_PER_BLOCK_OPTIN - static:,} (a GPU says: invalid argument)"
        )


def check_cooperative(grid: Sizes, block: Sizes, shared: int) -> None:
    """Refuse a cooperative launch whose blocks a GPU cannot hold at once.

    shared: bytes for each block.

    Raises:
        LaunchError: there are too many.
    """
    blocks, threads = grid[0] * grid[1] * grid[2], block[0] * block[1] * block[2]
    if blocks > blocks_at_once(threads, shared):
        raise LaunchError(
            f"a cooperative launch has all its blocks on the GPU at once: {blocks:,} blocks of {threads:,} threads "
            f"with {shared:,} bytes of shared memory are too many. An H200 holds {blocks_on_gpu(threads, shared):,} of "
            f"them at most, and the CPU engine has stacks for {most_threads():,} threads at once. Launch fewer "
            "blocks, each with the work of several"
        )
