"""Convert arrays to e4m3 and back, and make them easier to quantise: Hadamard rotation, subtracting the keys' mean."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
DESCALE_ROWS = 128  # rows or keys per descale, if a head has several
_NAN = 0x7F


def quantise(x: Any, descale: Any = 1.0) -> np.ndarray:
    """Round x / descale to the nearest e4m3, ties to even, like cvt.rn.satfinite.

    Args:
        x: float32, float16, bfloat16 or float64, of any shape.
        descale: positive, broadcast over x: the factor in `dequantise`.

    Returns:
        uint8 bytes, in the shape of x. Numbers above 448 become 448, infinity too; a NaN becomes 0x7F.

    Raises:
        TypeError: x does not contain floats of these types.
    """
    x = np.asarray(x)
    if x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"x is of {x.dtype}: e4m3 is made of float32, float16, bfloat16 or float64")
    wide = np.float64 if x.dtype == np.float64 else np.float32
    scaled = x.astype(wide) / np.asarray(descale, wide)
    found = np.clip(scaled, -LARGEST, LARGEST).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(_NAN), found)


def dequantise(x: Any, descale: Any = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Return the numbers of e4m3 times descale, in dtype; with a descale of 1 they are exact.

    Args:
        x: uint8 bytes or ml_dtypes' float8_e4m3fn, of any shape.
        descale: broadcast over x.
        dtype: float32, float16, bfloat16 or float64.

    Raises:
        TypeError: x contains something else.
    """
    x = np.asarray(x)
    if x.dtype not in (np.dtype(np.uint8), E4M3):
        raise TypeError(f"x is of {x.dtype}: e4m3 comes as uint8 bytes or as {E4M3}")
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return (x.view(E4M3).astype(wide) * np.asarray(descale, wide)).astype(dtype)


def descale_of(x: Any, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Return the descale that makes the largest magnitude of x 448, for `quantise`; 1 where all of x is 0.

    Args:
        axis: the axes that share a descale, such as the rows and columns of a head; None for all of x.

    Returns:
        float32, with x's axes; those in `axis` have length 1.
    """
    largest = np.abs(np.asarray(x)).max(axis=axis, keepdims=True).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))


def minus_mean(k: Any, axis: int = -2) -> np.ndarray:
    """Subtract the keys' mean. All scores of a row of Q change by the same number, so its softmax does not change.

    Args:
        k: keys along `axis`, by default (..., keys, head_dim).
    """
    k = np.asarray(k)
    return k - k.mean(axis=axis, keepdims=True, dtype=np.float64).astype(k.dtype)


def hadamard(d: int, seed: int | None = None) -> np.ndarray:
    """Return an orthogonal matrix M, (d, d), with elements +-1 / sqrt(d), so that q k^T = (q M) (k M)^T.

    Args:
        d: a power of 2. seed: for random signs of its rows, as in FlashAttention-3; None for no random signs.

    Raises:
        ValueError: d is not a power of 2.
    """
    if d < 1 or d & (d - 1):
        raise ValueError(f"d is {d}: a Hadamard matrix is made here for powers of 2")
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.ones(d) if seed is None else np.random.default_rng(seed).choice([-1.0, 1.0], d)
    return (signs[:, None] * matrix / np.sqrt(d)).astype(np.float32)


def rounded_weights(p: np.ndarray, lag: float = 0.0) -> np.ndarray:
    """Round weights to e4m3 like stage fp8, in float64: 1, a row's largest weight, is 2^(8 + lag) there."""
    scale = 2.0 ** (8 + lag)
    return dequantise(quantise(scale * p), dtype=np.float64) / scale
