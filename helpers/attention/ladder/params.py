"""The structs of kernels/*_params.cuh as NumPy dtypes: arguments of a launch besides its pointers.

CuPy passes a NumPy array of one element by value, whatever its dtype, and so does the CPU engine.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UNLIMITED = 2**29  # a window without a limit, as in attention_params.cuh

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
ROTARY_PARAMS = np.dtype(
    [
        *((name, STRIDES) for name in ("q", "k", "q_out", "k_out")),
        *((name, np.int32) for name in ("N", "N_kv", "heads", "kv_heads")),
        *((name, np.int32) for name in ("q_positions_batch", "k_positions_batch", "positions", "sequences")),
    ],
    align=True,
)
ROTATION_PARAMS = np.dtype([(name, np.int32) for name in ("q_positions_batch", "k_positions_batch", "positions")])
GRADIENTS = ("do", "dq", "dk", "dv")
BACKWARD_PARAMS = np.dtype(
    [
        ("forward", ATTENTION_PARAMS),
        *((name, STRIDES) for name in ("d_o", "d_q", "d_k", "d_v")),
    ],
    align=True,
)
BIAS_PARAMS = np.dtype(
    [
        ("forward", ATTENTION_PARAMS),
        ("d_o", STRIDES),
        *(
            (name, np.int32)
            for name in ("batches", "heads", "rows", "keys", "row_tiles", "key_tiles", "tiles", "splits")
        ),
    ],
    align=True,
)
# The same for struct.pack. The last number aligns the size.
_ATTENTION, _STEPS, _ROTARY, _BIAS = map(struct.Struct, ("=12q6ifi", "=12q", "=12q8i", "=3q8i"))


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
    """Fill one AttentionParams, an array of shape (1,).

    Args:
        strides: those of q, k, v and o: from one batch, row and head to the next, in elements. Packed sequences: batch
            is 0.
        n, n_kv: rows of q and of k; if sequences are packed, all tokens.
        window: (left, right): how many keys before and after the diagonal a row sees; -1 for no limit.
        sequences: the number of packed ones; 0 if none are packed.
    """
    left, right = [UNLIMITED if side < 0 else side for side in window]
    steps = (*strides["q"], *strides["k"], *strides["v"], *strides["o"])
    numbers = n, n_kv, heads, kv_heads, left, right, softmax_scale, sequences
    return _filled(ATTENTION_PARAMS, _ATTENTION, *steps, *numbers)


def rotary_params(strides: Sequence[tuple[int, int, int]], *numbers: int) -> Any:
    """Fill one RotaryParams, an array of shape (1,).

    Args:
        strides: of q, k and their outputs, in the form of `attention_params`. numbers: N, N_kv, heads, kv_heads; the
            strides from one batch to the next of the positions of q and of k; positions, sequences.
    """
    return _filled(ROTARY_PARAMS, _ROTARY, *(step for steps in strides for step in steps), *numbers)


def backward_params(forward: Any, strides: Mapping[str, tuple[int, int, int]]) -> Any:
    """Fill one BackwardParams, an array of shape (1,).

    Args:
        forward: the AttentionParams of the call whose gradients these are.
        strides: of do, dq, dk and dv, in the form of `attention_params`.
    """
    steps = [step for name in GRADIENTS for step in strides[name]]
    return np.frombuffer(bytearray(forward.tobytes() + _STEPS.pack(*steps)), BACKWARD_PARAMS)


def bias_params(forward: Any, do: tuple[int, int, int], *numbers: int) -> Any:
    """Fill one BiasParams, an array of shape (1,).

    Args:
        forward: the AttentionParams of the call whose gradients these are.
        do: the strides of do, in the form of `attention_params`. numbers: batches, heads, rows and keys of the bias;
            tiles of rows and of keys of the scores; tiles of the bias, and the number of blocks that share one.
    """
    return np.frombuffer(bytearray(forward.tobytes() + _BIAS.pack(*do, *numbers)), BIAS_PARAMS)


def _filled(dtype: np.dtype, form: struct.Struct, *values: float) -> Any:
    """Fill one struct, an array of shape (1,), in a tenth of the time that NumPy takes to assign its fields."""
    return np.frombuffer(bytearray(form.pack(*values)), dtype)
