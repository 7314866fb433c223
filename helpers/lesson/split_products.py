"""The NumPy experiments of notebooks 15 and 15b: float32 numbers in two short parts, and products of these parts.

schemes = {"3 TF32": tf32_parts, "3 fp16": fp16_parts, "3 bf16": bf16_parts}
error_of_scores(tf32_parts, q, k)       # the largest error of q k^T / 8 by three products of parts
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

Parts = tuple[np.ndarray, np.ndarray]  # hi and lo, in float64


def read_as_tf32(x: np.ndarray) -> np.ndarray:
    """Return x as a tensor core reads it: without the last 13 bits."""
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def tf32_parts(x: np.ndarray) -> Parts:
    """Split x into hi, the nearest number with 11 bits, and lo, the rest as a tensor core reads it."""
    x = np.asarray(x, np.float32)
    hi = read_as_tf32((x.view(np.uint32) + np.uint32(0x1000)).view(np.float32))
    return hi.astype(float), read_as_tf32(x - hi).astype(float)


def fp16_parts(x: np.ndarray) -> Parts:
    """Split a tile, its largest element scaled to 2^14 or above by a power of two, into hi and lo in x's scale."""
    x = np.asarray(x, np.float32)
    exponent = 14 - int(np.floor(np.log2(np.abs(x).max())))
    scaled = x * np.float32(2.0**exponent)
    hi = scaled.astype(np.float16)
    lo = (scaled - hi.astype(np.float32)).astype(np.float16)
    return hi.astype(float) * 2.0**-exponent, lo.astype(float) * 2.0**-exponent


def bf16_parts(x: np.ndarray) -> Parts:
    """Split x into hi and lo of 8 bits each."""
    x = np.asarray(x, np.float32)
    hi = x.astype(ml_dtypes.bfloat16)
    return hi.astype(float), (x - hi.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(float)


def error_of_scores(parts: Callable[[np.ndarray], Parts] | None, q: np.ndarray, k: np.ndarray) -> float:
    """Return the largest error of q k^T / 8 by three products of parts, or in float32 if parts is None."""
    q, k = q.astype(np.float32), k.astype(np.float32)
    exact = q.astype(float) @ k.T.astype(float)
    if parts is None:
        return float(np.abs(q @ k.T - exact).max() / 8)
    (q_hi, q_lo), (k_hi, k_lo) = parts(q), parts(k)
    return float(np.abs(q_lo @ k_hi.T + q_hi @ k_lo.T + q_hi @ k_hi.T - exact).max() / 8)
