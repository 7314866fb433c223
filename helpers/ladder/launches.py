"""How the stages are launched: grid, block and arguments, for a call whose arrays are known but for their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from helpers.ladder.call import Call, Spec
from helpers.ladder.contract import Launch, Part
from helpers.ladder.params import attention_params

if TYPE_CHECKING:
    from helpers.ladder.contract import Stage

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
    _check_grid(batch * heads, "heads of all batches")
    scalars = np.int32(n), np.int32(call.arrays["k"].shape[2]), np.float32(call.softmax_scale)
    return [stage.launch((-(-n // sizes["BLOCK_M"]), batch * heads), sizes, ("q", "k", "v", "o", *scalars))]


def strided(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """From 05 on: grid (query tile, head, sequence), and AttentionParams by value."""
    q, k = call.arrays["q"], call.arrays["k"]
    _check_grid(call.heads, "heads")
    _check_grid(call.sequences, "sequences")
    strides = {}
    for name in "qkvo":
        batch, head, row, _ = (step // np.dtype(q.dtype).itemsize for step in call.arrays[name].strides)
        strides[name] = (0 if call.packed else batch), row, head
    params = attention_params(
        strides,
        n=q.shape[2],
        n_kv=k.shape[2],
        heads=call.heads,
        kv_heads=k.shape[1],
        window=call.window,
        softmax_scale=call.softmax_scale,
    )
    optional = (name if name in call.arrays else None for name in ("lse", "cu_seqlens_q", "cu_seqlens_k"))
    grid = -(-call.rows // sizes["BLOCK_M"]), call.heads, call.sequences
    return [stage.launch(grid, sizes, ("q", "k", "v", "o", *optional, params))]


def _check_grid(size: int, what: str) -> None:
    if size > MAX_GRID_YZ:
        raise ValueError(f"{size:,} {what}; one launch takes {MAX_GRID_YZ:,} at most")
