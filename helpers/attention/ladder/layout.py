"""Where an array's elements are: axes, addresses, alignment, and the memory between its first and its last element."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import device


def four_axes(a: Any) -> Any:
    """(batch, heads, rows, head_dim), with 1 for the axes that are not there."""
    return a.reshape((1,) * (4 - a.ndim) + a.shape) if a.ndim < 4 else a


def address(a: Any) -> int:
    """Of the first element, in bytes."""
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def is_aligned(a: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    bits = address(a)
    for size, stride in zip(a.shape[:-1], a.strides[:-1], strict=True):
        if size > 1:
            bits |= stride
    return bits % 16 == 0


def span(a: Any) -> Any:
    """The memory from a's first element to its last, without gaps, for a kernel that is told the strides."""
    order = sorted(range(a.ndim), key=lambda axis: -a.strides[axis])
    dense = a.transpose(order)
    if dense.flags.c_contiguous or a.size == 0:
        return dense
    size = 1 + sum((n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)) // a.itemsize
    if isinstance(a, np.ndarray):
        return np.lib.stride_tricks.as_strided(a, (size,), (a.itemsize,), subok=True)
    return device.cp.ndarray((size,), a.dtype, memptr=a.data)
