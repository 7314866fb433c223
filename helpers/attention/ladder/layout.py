"""The layout of an array in memory (`Spec`: axes, strides, alignment), and its copies: dense, padded, negated."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import device

TITLES = {"uint8": "e4m3 (in uint8)"}  # the elements' type, if the dtype's name does not show it


def titles(*dtypes: str) -> str:
    """Name dtypes of elements for a message: "float16 or bfloat16", and for bytes what they stand for."""
    return " or ".join(TITLES.get(name, name) for name in dtypes)


class lock_free_cached_property:
    """functools.cached_property without the lock that it takes before Python 3.12."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, owner: Any, kind: type) -> Any:
        value = owner.__dict__[self.name] = self.function(owner)
        return value


class _Fields(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    offset: int = 0
    device: int = 0


class Spec(_Fields):
    """An array without its memory: strides in bytes. offset: its address modulo 16. device: its GPU's number."""

    @classmethod
    def of(cls, a: Any) -> Spec:
        """Describe an array."""
        return cls(tuple(a.shape), tuple(a.strides), a.dtype, address(a) % 16)

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: Any) -> Spec:
        """Describe a new C-contiguous array."""
        dtype = np.dtype(dtype)
        strides, step = [], dtype.itemsize
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(tuple(shape), tuple(reversed(strides)), dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @lock_free_cached_property
    def contiguous(self) -> bool:
        """Tell whether it is C-contiguous."""
        step = self.dtype.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return self.size == 0
            step *= size
        return True

    @lock_free_cached_property
    def in_rows(self) -> bool:
        """Tell whether the elements of each row are contiguous, and rows a whole number of elements apart, forwards.

        A kernel gets strides in elements, and those of a column of records may not be a whole number of elements.
        """
        strides, size = self.strides, self.dtype.itemsize
        neighbours = strides[-1] == size or self.shape[-1] == 1
        return 0 in self.shape or (neighbours and min(strides) >= 0 and not any([step % size for step in strides]))

    @lock_free_cached_property
    def aligned(self) -> bool:
        """Tell whether every row starts at a multiple of 16 bytes."""
        if 0 in self.shape:
            return True
        bits = self.offset
        for size, stride in zip(self.shape[:-1], self.strides[:-1], strict=True):
            if size > 1:
                bits |= stride
        return not bits & 15

    @lock_free_cached_property
    def element_strides(self) -> tuple[int, int, int]:
        """Strides of batch, row and head of an array (batch, heads, rows, head_dim), in elements.

        An axis of length 1 gets stride 0, because a kernel also forms addresses past its end, which must be aligned,
        too.
        """
        size = self.dtype.itemsize
        batch, head, row = (
            stride // size if count > 1 else 0 for count, stride in zip(self.shape[:3], self.strides[:3], strict=True)
        )
        return batch, row, head

    def with_axes(self, count: int) -> Spec:
        """Return the same array with axes of size 1 before its own."""
        more = count - len(self.shape)
        if more <= 0:
            return self
        return Spec((1,) * more + self.shape, (0,) * more + self.strides, *self[2:])

    @lock_free_cached_property
    def heads_first(self) -> Spec:
        """(batch, rows, heads, head_dim), or (tokens, heads, head_dim), as (batch or 1, heads, rows, head_dim)."""
        (batch, rows, heads, columns), (by_batch, by_row, by_head, by_column), *others = self.with_axes(4)
        return Spec((batch, heads, rows, columns), (by_batch, by_head, by_row, by_column), *others)


spec_of = functools.lru_cache(maxsize=1024)(Spec)  # k and v are often alike, and q is the same in the next call
dense = functools.lru_cache(maxsize=1024)(Spec.dense)


def four_axes(a: Any) -> Any:
    """View an array as (batch, heads, rows, head_dim), with length 1 for missing axes."""
    return a.reshape((1,) * (4 - a.ndim) + a.shape) if a.ndim < 4 else a


def address(a: Any) -> int:
    """Return the address of the first element."""
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


class Addresses:
    """An array's addresses, for NumPy to compare: it reads no memory for that, so device arrays are allowed."""

    def __init__(self, a: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address(a), True),
            "typestr": f"|V{a.dtype.itemsize}",
            "shape": tuple(a.shape),
            "strides": tuple(a.strides),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Addresses) and self.__array_interface__ == other.__array_interface__

    __hash__ = None  # type: ignore[assignment]


def check_writable(name: str, a: Any, use: str) -> None:
    """Raise ValueError for an array, or its spec, that a launch cannot write. use: what is written, for the message."""
    if isinstance(a, np.ndarray) and not a.flags.writeable:
        raise ValueError(f"{name} is read-only, and {use}: give {name}.copy()")
    if any([step == 0 and n > 1 for n, step in zip(a.shape, a.strides, strict=True)]):
        raise ValueError(
            f"{name} has shape {a.shape} and strides {a.strides}: some of its rows are one in memory, and {use}: "
            f"give {name}.copy()"
        )


def share_memory(a: Addresses, b: Addresses) -> bool:
    """Return True if an element of one is in the other."""
    return np.shares_memory(np.asarray(a), np.asarray(b))


def bits(a: Any) -> Any:
    """View an array as unsigned integers of the same size: some libraries cannot copy or compare every dtype."""
    return a.view(f"uint{8 * a.dtype.itemsize}")


def negative(a: Any) -> Any:
    """Return a C-contiguous copy with the other sign, in any dtype of the device."""
    copy = dense_copy(a)
    of_copy = bits(copy)
    of_copy ^= of_copy.dtype.type(1 << 8 * a.itemsize - 1)
    return copy


def padded(a: Any, columns: int) -> Any:
    """Return a C-contiguous copy padded with columns of zeros, in any dtype of the device."""
    copy = device.cp.zeros((*a.shape[:-1], columns), f"uint{8 * a.itemsize}")
    copy[..., : a.shape[-1]] = bits(device.cp.ascontiguousarray(a))
    return copy.view(a.dtype)


def dense_copy(a: Any) -> Any:
    """Return a C-contiguous copy in its own memory."""
    dense = device.cp.ascontiguousarray(a)
    return device.cp.array(a) if dense is a else dense


def flat_view(a: Any) -> Any:
    """View the array's memory, first to last element, as one dense array; the kernel uses strides."""
    order = sorted(range(a.ndim), key=lambda axis: -a.strides[axis])
    dense = a.transpose(order)
    if dense.flags.c_contiguous or a.size == 0:
        return dense
    size = 1 + sum((n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)) // a.itemsize
    if isinstance(a, np.ndarray):
        return np.lib.stride_tricks.as_strided(a, (size,), (a.itemsize,), subok=True)
    return device.cp.ndarray((size,), a.dtype, memptr=a.data)
