"""Time tiles of flash_mma for GPUs with less shared memory, on one that has more.

A launch requests more dynamic shared memory than its kernel uses, so that a multiprocessor holds as many blocks as one
of the other GPU. The other GPU's clock, caches and tensor cores remain unknown: only the order of tiles by speed, with
that many blocks, carries over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from helpers.attention.ladder import LADDER, Stage
from helpers.attention.ladder.tiles import GPUS, KB, RESERVED, Gpu
from helpers.bench import records
from helpers.bench.cases import Case
from helpers.bench.harness import Study, compare_tiles

recorded = records.reader("nvidia-h200-presets.json")
OTHERS = tuple(gpu for gpu in GPUS if gpu.arch in ("sm_80", "sm_89"))  # with less space than this H200, and cp.async
SHAPES = tuple((4, 16 if d <= 64 else 8, 4096, d) for d in (64, 80, 96, 128, 192, 256))
HEAD_DIMS = tuple(shape[3] for shape in SHAPES)
NAMES = ("BLOCK_M", "BLOCK_N", "WARPS", "MIN_BLOCKS")
CANDIDATES = (
    *((128, keys, 4, 2) for keys in (16, 32, 48, 64, 96, 128)),
    *((128, keys, 8, 1) for keys in (32, 64)),
    *((64, keys, 4, 2) for keys in (32, 64, 128)),
    *((64, keys, 2, 4) for keys in (32, 48)),
    *((64, 64, 2, 3), (64, 128, 2, 2), (64, 32, 4, 1)),
    *((192, keys, 6, 1) for keys in (32, 48)),
    *((256, keys, 8, 1) for keys in (32, 64)),
)


def room(gpu: Gpu, stage: Stage, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return how many blocks fit a multiprocessor of the other GPU, and the bytes with which an H200 holds as many."""
    needed = stage.shared_bytes(sizes)
    if needed > gpu.limit:
        return 0, 0
    blocks = min(gpu.shared // (needed + RESERVED), gpu.threads // stage.threads(sizes))
    return blocks, max(needed, min(228 * KB // blocks - RESERVED, 227 * KB) // 128 * 128)


def rows() -> Iterator[dict[str, Any]]:
    """Time each tile that fits, for each GPU and head dimension: TFLOP/s without a mask and causal."""
    stage = LADDER["flash_mma"]
    for shape, gpu in itertools.product(SHAPES, OTHERS):
        case, head_dim = Case(shape, "bfloat16"), shape[3]
        blocks, ways = {}, {}
        for tile in CANDIDATES:
            sizes = dict(zip(NAMES, tile, strict=True))
            blocks[tile], shared = room(gpu, stage, {"HEAD_DIM": head_dim, **sizes})
            if blocks[tile]:
                ways[tile] = stage.changed(shared_bytes=lambda _, shared=shared: shared), sizes
        for tile, row in compare_tiles(case, ways).items():
            what = {"gpu": gpu.name, "arch": gpu.arch, "HEAD_DIM": head_dim, **ways[tile][1]}
            yield {**what, "blocks": blocks[tile], **row}


def best(record: Mapping[str, Any], arch: str, head_dim: int) -> list[dict[str, Any]]:
    """Sort the rows of one architecture and head dimension by the mean of both speeds, fastest first."""
    matches = [row for row in record["rows"] if (row["arch"], row["HEAD_DIM"]) == (arch, head_dim)]
    return sorted(matches, key=lambda row: -(row["full"] + row["causal"]))


STUDY = Study("presets", {"rows": rows})
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None, most: int = 4) -> str:
    """Format the fastest tiles of each architecture and head dimension as text."""
    lines = [f"TFLOP/s (causal) on {record['device']}, with as many blocks as there is room for on"]
    for gpu in OTHERS:
        lines.append(f"{gpu.name}, {gpu.arch}")
        for head_dim in HEAD_DIMS:
            for row in best(record, gpu.arch, head_dim)[:most]:
                sizes = " ".join(f"{name}={row[name]}" for name in NAMES)
                lines.append(f"  d = {head_dim:3}  {sizes:44} {row['blocks']} blocks {row['full']:6} ({row['causal']})")
    return "\n".join(lines)
