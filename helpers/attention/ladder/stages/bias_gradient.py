"""The gradients of what is added to the scores: a bias, ALiBi's slopes, sinks, a table of distances.

No stage of the ladder: its result is not a gradient of q, k and v, and there is one way to compute it.
"""

from __future__ import annotations

import numpy as np

from helpers.attention.ladder import launches
from helpers.attention.ladder.call import CU_SEQLENS, Call, Spec
from helpers.attention.ladder.launch import Launch
from helpers.attention.ladder.params import bias_params
from helpers.attention.ladder.stage import C_NAMES, Stage, Tuning
from helpers.attention.ladder.stages import PLAIN
from helpers.attention.ladder.tiles import MAX_HEAD_DIM, Sizes

FORMS = {"dbias": 0, "dalibi_slopes": 1, "dtable": 2}  # FORM of the kernel
BLOCK, THREADS = 64, 128
# Blocks of a launch, if a tile of the bias is split: 2.6 for each that an H200 has room for at a time. The number
# decides in which order is added, so it depends on no device.
MOST_BLOCKS = 1024
MOST_GRID = 2**31 - 1


def gradient_name(call: Call) -> str:
    """Return the name of the array that a call writes: that of an input, after a d."""
    return next(name for name in (*FORMS, "dsinks") if name in call.arrays)


def _sizes(call: Call) -> dict[str, int]:
    return {"HEAD_DIM": call.head_dim, "FORM": FORMS.get(gradient_name(call), 0), "BLOCK": BLOCK, "THREADS": THREADS}


def _lengths(call: Call) -> tuple[int, ...]:
    """Return batches, heads, rows and keys of the gradient, 1 where it is a sum; then tiles, see `BiasParams`."""
    name, block = gradient_name(call), BLOCK
    shape = call.arrays[name].shape
    row_tiles, key_tiles = -(-call.rows // block), -(-call.keys // block)
    if name == "dtable":
        return 1, shape[0], 1, shape[1], row_tiles, key_tiles, row_tiles + key_tiles + 1
    batches, heads, rows, keys = shape if name == "dbias" else (*shape, 1, 1)
    tiles = (1 if rows == 1 else row_tiles) * (1 if keys == 1 else key_tiles)
    return batches, heads, rows, keys, row_tiles, key_tiles, tiles


def splits(call: Call) -> int:
    """Return how many blocks share a tile of the bias: as many as fit MOST_BLOCKS, but not more than it has steps."""
    batches, heads, rows, keys, row_tiles, key_tiles, tiles = _lengths(call)
    along_keys = key_tiles if keys == 1 and gradient_name(call) != "dtable" else 1
    steps = (row_tiles if rows == 1 else 1) * along_keys
    steps *= (call.heads if heads == 1 else 1) * (call.sequences if batches == 1 else 1)
    return max(min(MOST_BLOCKS // (tiles * heads * batches), steps), 1)


def _scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return delta, a number for each row of each head; and partial sums, where a bias is split, or a table."""
    scratch = {"delta": Spec.dense(call.arrays["q"].shape[:3], np.float32)}
    if gradient_name(call) == "dsinks":
        return scratch
    batches, heads, rows, keys, *_, tiles = _lengths(call)
    count, is_table = splits(call), gradient_name(call) == "dtable"
    if count > 1 or is_table:
        of_split = heads * tiles * 2 * BLOCK if is_table else batches * heads * rows * keys
        scratch["partial"] = Spec.dense((count, of_split), np.float32)
    return scratch


def _launch(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch for delta, then for the gradient; a third time to add partial sums, where there are any."""
    name, (batch, heads, n, _) = gradient_name(call), call.arrays["q"].shape
    block, of_type = (sizes["THREADS"],), C_NAMES[call.arrays["q"].dtype.name]
    warps, each_row = sizes["THREADS"] // 32, batch * heads * n
    is_sink = name == "dsinks"
    lengths = (1,) * 7 if is_sink else _lengths(call)
    count = 1 if is_sink else splits(call)
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
        batches, bias_heads, rows, keys, *_, tiles = lengths
        partial = "partial" in stage.scratch(call, sizes)
        result = C_NAMES[call.arrays[name].dtype.name]
        inputs = "q", "k", "v", "do", "lse", "delta", "partial" if partial else name
        functions = call.mod.arguments() if call.mod else ()
        args = *inputs, *launches.given(call, *CU_SEQLENS), params, np.int32(call.sequences), *functions
        instance = f"bias_gradient<{of_type}, {'float' if partial else result}>"
        own = [Launch(instance, (tiles * count * bias_heads * batches,), block, 0, args)]
        if partial:
            numbers = -(-batches * bias_heads * rows * keys // warps)
            own.append(Launch(f"bias_gradient_sum<{result}>", (numbers,), block, 0, ("partial", name, params)))
    for launch in (delta, *own):
        if launch.grid[0] > MOST_GRID:
            raise ValueError(f"the gradient {name} takes {launch.grid[0]:,} blocks; one grid takes {MOST_GRID:,}")
    return [delta, *own]


BIAS_GRADIENT = Stage(
    number=11,
    name="bias_gradient",
    file="11_bias_gradient.cu",
    idea="gradients of what is added to the scores, the same bits in every run",
    tuning=Tuning(lambda head_dim, shared_limit: {}, variant=_sizes),
    launches=_launch,
    scratch=_scratch,
    direction="bias",
    kernels=("bias_gradient_delta", "bias_gradient", "bias_gradient_sum", "sink_gradient"),
    features=PLAIN | {"deterministic", "mod"},
    max_head_dim=MAX_HEAD_DIM,
    threads=lambda sizes: sizes["THREADS"],
)
