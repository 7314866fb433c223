"""The gradients of terms added to the scores: a bias, ALiBi's slopes, sinks, a table of distances.

They are not stages of the ladder, because their result is not a gradient of q, k and v. Half types are computed on
tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention.ladder import launches, limits, tiles
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.launch import Launch
from helpers.attention.ladder.params import bias_params
from helpers.attention.ladder.stage import C_NAMES, Stage, Tuning
from helpers.attention.ladder.stages import PLAIN
from helpers.attention.ladder.stages.tensor_cores import WARPS_OF_MMA
from helpers.attention.ladder.tiles import MAX_HEAD_DIM, Sizes

FORMS = {"dbias": 0, "dalibi_slopes": 1, "dtable": 2}  # FORM of the kernel
BLOCK, THREADS = 64, 128
# Blocks of a launch, if a tile of the bias is split: 2.6 for each that an H200 can hold at a time. The number
# determines the order of additions, so it does not depend on the device.
MOST_BLOCKS = 1024
MOST_GRID = 2**31 - 1


def gradient_name(call: Call) -> str:
    """Return the name of the array that a call writes: an input's name after a d."""
    return next(name for name in (*FORMS, "dsinks") if name in call.arrays)


_NAMES = "BLOCK", "WARPS", "WARPS_KEYS", "MIN_BLOCKS"
# On tensor cores, by what is summed and by head_dim: the first that fits is used. Those of 64 and 128 are the fastest
# of four on an H200. A bias with an axis of rows and one of keys is read for each score: three small blocks per
# multiprocessor hide more of that latency than a large one.
_MMA: Mapping[str, Mapping[int, tuple[tuple[int, ...], ...]]] = {
    "scores": {128: ((64, 4, 2, 3),), 256: ((64, 4, 2, 1), (32, 2, 2, 1))},
    "rows or keys": {64: ((64, 2, 1, 1),), 128: ((128, 8, 2, 1), (64, 4, 2, 1)), 256: ((64, 4, 2, 1), (32, 2, 2, 1))},
    "diagonals": {128: ((128, 8, 2, 1), (64, 4, 2, 1)), 256: ((64, 4, 2, 1), (32, 2, 2, 1))},
}


def _form(call: Call) -> dict[str, int]:
    return {"HEAD_DIM": call.head_dim, "FORM": FORMS.get(gradient_name(call), 0)}


def _sizes(call: Call) -> dict[str, int]:
    return {**_form(call), "BLOCK": BLOCK, "THREADS": THREADS}


@functools.cache
def pick_mma(added: str, head_dim: int, shared_limit: int) -> dict[str, int]:
    """Choose the -D options of bias_gradient_mma. added: a key of `_MMA`."""
    entry = tiles.entry(_MMA[added], head_dim)
    choices = [dict(zip(_NAMES, each, strict=True)) for each in entry]
    return tiles.first_that_fits(choices, mma_shared_bytes, head_dim, shared_limit)


def mma_shared_bytes(sizes: Sizes) -> int:
    """Count SHARED_BYTES of bias_gradient_mma: Q, K, dO, V, lse and delta; after the loop, a tile of sums."""
    block = sizes["BLOCK"]
    return max(8 * block * (tiles.round_up(sizes["HEAD_DIM"], 16) + 1), 4 * block * (block + 1))


def _mma_sizes(call: Call) -> dict[str, int]:
    name = gradient_name(call)
    of_scores = name == "dbias" and 1 not in call.arrays[name].shape[2:]
    added = "diagonals" if name == "dtable" else "scores" if of_scores else "rows or keys"
    return {**_form(call), **pick_mma(added, call.head_dim, limits.most_shared())}


def _lengths(call: Call, block: int) -> tuple[int, ...]:
    """Return batches, heads, rows and keys of the gradient, 1 for summed axes; then tiles, see `BiasParams`."""
    name = gradient_name(call)
    shape = call.arrays[name].shape
    row_tiles, key_tiles = -(-call.rows // block), -(-call.keys // block)
    if name == "dtable":
        return 1, shape[0], 1, shape[1], row_tiles, key_tiles, row_tiles + key_tiles + 1
    batches, heads, rows, keys = shape if name == "dbias" else (*shape, 1, 1)
    tiles = (1 if rows == 1 else row_tiles) * (1 if keys == 1 else key_tiles)
    return batches, heads, rows, keys, row_tiles, key_tiles, tiles


def splits(call: Call, block: int) -> int:
    """Return how many blocks share a tile of the bias: as many as fit MOST_BLOCKS, but no more than it has steps."""
    batches, heads, rows, keys, row_tiles, key_tiles, own = _lengths(call, block)
    along_keys = key_tiles if keys == 1 and gradient_name(call) != "dtable" else 1
    steps = (row_tiles if rows == 1 else 1) * along_keys
    steps *= (call.heads if heads == 1 else 1) * (call.sequences if batches == 1 else 1)
    return max(min(MOST_BLOCKS // (own * heads * batches), steps), 1)


def _scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return delta, a number per row and head; and partial sums, if a bias is split, or a table."""
    scratch = {"delta": Spec.dense(call.arrays["q"].shape[:3], np.float32)}
    if gradient_name(call) == "dsinks":
        return scratch
    block = sizes["BLOCK"]
    batches, heads, rows, keys, *_, own = _lengths(call, block)
    count, is_table = splits(call, block), gradient_name(call) == "dtable"
    if count > 1 or is_table:
        of_split = heads * own * 2 * block if is_table else batches * heads * rows * keys
        scratch["partial"] = Spec.dense((count, of_split), np.float32)
    return scratch


def _launch(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch for delta, then for the gradient; a third time to add partial sums, if there are any."""
    name, (batch, heads, n, _) = gradient_name(call), call.arrays["q"].shape
    of_type, threads = C_NAMES[call.arrays["q"].dtype.name], stage.threads(sizes)
    block, warps, each_row = (threads,), threads // 32, batch * heads * n
    is_sink = name == "dsinks"
    lengths = (1,) * 7 if is_sink else _lengths(call, sizes["BLOCK"])
    count = 1 if is_sink else splits(call, sizes["BLOCK"])
    do = launches.strides_of(call, ("do",))["do"]
    params = bias_params(launches.params_of(call), do, *lengths, count)
    delta = Launch(
        *(f"bias_gradient_delta<{of_type}>", (-(-each_row // warps),), block, 0),
        ("o", "do", "delta", params, np.int64(each_row)),
    )
    if is_sink:
        args = "lse", "delta", "sinks", name, np.int32(heads), np.int32(n), np.int32(batch)
        own = [Launch("sink_gradient", (heads,), block, 0, args)]
    else:
        batches, bias_heads, rows, keys, *_, own_tiles = lengths
        partial = "partial" in stage.scratch(call, sizes)
        result = C_NAMES[call.arrays[name].dtype.name]
        inputs = "q", "k", "v", "do", "lse", "delta", "partial" if partial else name
        functions = call.mod.arguments() if call.mod else ()
        args = *inputs, *launches.given(call, *CU_SEQLENS), params, np.int32(call.sequences), *functions
        instance = f"{stage.name}<{of_type}, {'float' if partial else result}>"
        own = [stage.launch((own_tiles * count * bias_heads * batches,), sizes, args, instance)]
        if partial:
            numbers = -(-batches * bias_heads * rows * keys // warps)
            own.append(Launch(f"bias_gradient_sum<{result}>", (numbers,), block, 0, ("partial", name, params)))
    for launch in (delta, *own):
        if launch.grid[0] > MOST_GRID:
            raise ValueError(f"the gradient {name} takes {launch.grid[0]:,} blocks; one grid takes {MOST_GRID:,}")
    return [delta, *own]


_OTHERS = "bias_gradient_delta", "bias_gradient_sum"
_BIAS: Mapping[str, Any] = {
    "number": 11,
    "launches": _launch,
    "scratch": _scratch,
    "direction": "bias",
    "features": PLAIN | {"deterministic", "mod"},
    "max_head_dim": MAX_HEAD_DIM,
}

BIAS_GRADIENT = Stage(
    name="bias_gradient",
    file="11_bias_gradient.cu",
    idea="gradients of what is added to the scores, the same bits in every run",
    tuning=Tuning(lambda head_dim, shared_limit: {}, variant=_sizes),
    kernels=("bias_gradient", *_OTHERS, "sink_gradient"),
    threads=lambda sizes: sizes["THREADS"],
    **_BIAS,
)

BIAS_GRADIENT_MMA = Stage(
    name="bias_gradient_mma",
    file="11_bias_gradient_mma.cu",
    idea="the same on tensor cores, in half types",
    tuning=Tuning(lambda head_dim, shared_limit: {}, variant=_mma_sizes),
    kernels=("bias_gradient_mma", *_OTHERS),
    shared_bytes=mma_shared_bytes,
    **_BIAS,
    **WARPS_OF_MMA,
)


def stage_of(dtype: str, wrt: str) -> Stage:
    """Choose the stage for a dtype of q on this device. The gradient of sinks has no matrix product."""
    on_cuda_cores = wrt == "sinks" or BIAS_GRADIENT_MMA.why_not(head_dim=8, dtype=dtype)
    return BIAS_GRADIENT if on_cuda_cores else BIAS_GRADIENT_MMA
