"""The structs of kernels/*_params.cuh as NumPy has them: what a launch is told besides its pointers.

CuPy passes a NumPy array of one element by value, whatever its dtype, and so does the CPU engine.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UNLIMITED = 2**29  # a window without a limit, as attention_params.cuh has it

STRIDES = np.dtype([(name, np.int64) for name in ("batch", "row", "head")], align=True)
ATTENTION_PARAMS = np.dtype(
    [
        *((name, STRIDES) for name in "qkvo"),
        *((name, np.int32) for name in ("N", "N_kv", "heads", "kv_heads", "window_left", "window_right")),
        ("softmax_scale", np.float32),
        ("sequences", np.int32),
    ],
    align=True,
)
FUSED_PARAMS = np.dtype(
    [
        *((f"bias_{axis}", np.int64) for axis in ("batch", "head", "row", "key")),
        *((name, np.int64) for name in ("alibi_batch", "cos_row", "sin_row", "q_positions_batch", "k_positions_batch")),
        ("positions", np.int32),
    ],
    align=True,
)
GRADIENTS = ("do", "dq", "dk", "dv")
BACKWARD_PARAMS = np.dtype(
    [
        ("forward", ATTENTION_PARAMS),
        *((name, STRIDES) for name in ("d_o", "d_q", "d_k", "d_v")),
    ],
    align=True,
)
# The same for struct.pack. The last number aligns the size.
_ATTENTION, _FUSED, _STEPS = map(struct.Struct, ("=12q6ifi", "=9qi4x", "=12q"))


def attention_params(
    strides: Mapping[str, tuple[int, int, int]],
    *,
    n: int,
    n_kv: int,
    heads: int,
    kv_heads: int,
    window: tuple[int, int],
    softmax_scale: float,
    sequences: int = 0,
) -> Any:
    """One AttentionParams, an array of shape (1,).

    Args:
        strides: of q, k, v and o: from one batch, row and head to the next, in elements. Packed sequences: batch is 0.
        n, n_kv: rows of q and of k; where sequences are packed, all tokens.
        window: (left, right): how many keys before and after the diagonal a row sees; -1 for no limit.
        sequences: how many are packed; 0 where none are.
    """
    left, right = [UNLIMITED if side < 0 else side for side in window]
    steps = (*strides["q"], *strides["k"], *strides["v"], *strides["o"])
    numbers = n, n_kv, heads, kv_heads, left, right, softmax_scale, sequences
    return _filled(ATTENTION_PARAMS, _ATTENTION, *steps, *numbers)


def fused_params(strides: Mapping[str, Sequence[int]], positions: int) -> Any:
    """One FusedParams, an array of shape (1,).

    Args:
        strides: by the names of helpers.attention.ladder.extras, in elements: of bias along its 4 axes, of alibi_slopes
            and of the positions from one batch to the next, of rotary_cos and rotary_sin from one row to the next. 0
            for what a call does not have, and along an axis on which there is one element for all.
        positions: rows of rotary_cos.
    """
    one = (strides.get(name, (0,))[0] for name in ("alibi_slopes", "rotary_cos", "rotary_sin"))
    of_positions = (strides.get(name, (0,))[0] for name in ("q_positions", "k_positions"))
    return _filled(FUSED_PARAMS, _FUSED, *strides.get("bias", (0, 0, 0, 0)), *one, *of_positions, positions)


def backward_params(forward: Any, strides: Mapping[str, tuple[int, int, int]]) -> Any:
    """One BackwardParams, an array of shape (1,).

    Args:
        forward: the AttentionParams of the call whose gradients these are.
        strides: of do, dq, dk and dv, as `attention_params` has those of q.
    """
    steps = [step for name in GRADIENTS for step in strides[name]]
    return np.frombuffer(bytearray(forward.tobytes() + _STEPS.pack(*steps)), BACKWARD_PARAMS)


def _filled(dtype: np.dtype, form: struct.Struct, *values: float) -> Any:
    """One struct, an array of shape (1,): in a tenth of the time that NumPy takes to assign its fields."""
    return np.frombuffer(bytearray(form.pack(*values)), dtype)
