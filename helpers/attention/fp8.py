"""Quantise arrays to e4m3, the 8-bit floats with 4 bits of exponent and 3 of mantissa, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
_NAN = 0x7F


def quantise(x: Any, descale: Any = 1.0) -> np.ndarray:
    """Round x / descale to the nearest e4m3, ties to even, as cvt.rn.satfinite does.

    Args:
        x: float32, float16, bfloat16 or float64, of any shape.
        descale: positive, broadcast over x: what each number is multiplied by in `dequantise`.

    Returns:
        uint8 bytes, in the shape of x. What is larger than 448 becomes 448, infinity too; a NaN becomes 0x7F.

    Raises:
        TypeError: x holds no floats of these types.
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
        TypeError: x holds something else.
    """
    x = np.asarray(x)
    if x.dtype not in (np.dtype(np.uint8), E4M3):
        raise TypeError(f"x is of {x.dtype}: e4m3 comes as uint8 bytes or as {E4M3}")
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return (x.view(E4M3).astype(wide) * np.asarray(descale, wide)).astype(dtype)
