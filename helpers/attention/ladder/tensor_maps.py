"""Tensor maps: descriptions of arrays for TMA copies. The driver makes them, and a kernel takes them by value.

    tensor_map(Spec.of(k), address(k), box_rows=128)  # for `const __grid_constant__ TensorMap k_map`

An array (batch, heads, rows, head_dim), with any strides, becomes four dimensions, the fastest first: {head_dim, rows,
heads, batch}. So a copy never reads or writes beyond the rows of its own head. The driver is called through ctypes:
neither CuPy nor NVRTC has the function. Without a GPU, the CPU engine's version of it makes the map.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.ladder.layout import Spec
from helpers.engine.cuda_source.signatures import dtype_of

PANEL_BYTES = 128  # bytes per row of a panel: the width of the swizzle
TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))], align=True)  # the struct of kernels/hopper.cuh

_DTYPES = {dtype_of("uint8"): 0, dtype_of("float16"): 6, dtype_of("bfloat16"): 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_SWIZZLES, _L2_PROMOTION_128B = {64: 2, 128: 3}, 2


def dimensions(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the driver's (sizes, strides in bytes) of an array (batch, heads, rows, head_dim), the fastest first.

    head_dim has no stride. A dimension of size 1 gets a valid stride, because libraries may leave any number there. A
    broadcast one keeps its 0, which the driver accepts.
    """
    sizes = tuple(reversed(spec.shape))
    row = -(-sizes[0] * spec.dtype.itemsize // 16) * 16
    pairs = zip(sizes[1:], reversed(spec.strides[:-1]), strict=True)
    return sizes, tuple(row if size == 1 else stride for size, stride in pairs)


def box_columns(spec: Spec) -> int:
    """Return the number of columns in a box: 128 bytes, or 64 if a row of one-byte elements has no more."""
    size = spec.dtype.itemsize
    return (64 if size == 1 and spec.shape[-1] <= 64 else PANEL_BYTES) // size


def tensor_map(spec: Spec, address: int, *, box_rows: int) -> np.ndarray:
    """Make the map of an array at an address, for swizzled copies of `box_rows` rows and `box_columns(spec)` columns.

    Args:
        spec: the array, (batch, heads, rows, head_dim). address: of its first element, a multiple of 16.

    Returns:
        shape (1,), dtype `TENSOR_MAP`.

    Raises:
        ValueError: the driver, or the engine, refuses it: a stride that is not a multiple of 16 bytes, more than 256
            rows.
    """
    at, room = _encode(spec, address, box_rows)
    if not device.ON_GPU:
        return room.view(TENSOR_MAP)
    encoded = np.frombuffer(room, np.uint8, 128, at - ctypes.addressof(room))
    if len(_MADE) >= _MOST_MADE:
        _MADE.clear()
    box = box_columns(spec), box_rows, 1, 1
    _MADE[encoded.tobytes()] = Made(spec.dtype.name, address, *dimensions(spec), box, box[0] * spec.dtype.itemsize)
    return encoded.view(TENSOR_MAP)


def _encode(spec: Spec, address: int, box_rows: int) -> tuple[int, Any]:
    """Return the map's address in host memory, and the object that keeps it alive."""
    if not device.ON_GPU:
        box = (box_columns(spec), box_rows, 1, 1)
        how = spec.dtype.name, address, *dimensions(spec), box
        encoded = device.cp.tensor_map.encode_tiled(*how, swizzle=box[0] * spec.dtype.itemsize)
        return encoded.ctypes.data, encoded
    room = ctypes.create_string_buffer(192)
    at = ctypes.addressof(room)
    at += -at % 64
    # Not interleaved; zeros out of bounds.
    how = 0, _SWIZZLES[box_columns(spec) * spec.dtype.itemsize], _L2_PROMOTION_128B, 0
    error = _driver_function()(at, _DTYPES[spec.dtype], 4, address, *_numbers(spec, box_rows), *how)
    if error:
        sizes, strides = dimensions(spec)
        raise ValueError(
            f"cuTensorMapEncodeTiled returned error {error} for {spec.dtype} sizes {sizes}, strides {strides} bytes, "
            f"box of {box_rows} rows, address {address:#x}"
        )
    return at, room


@functools.lru_cache(maxsize=256)
def _numbers(spec: Spec, box_rows: int) -> tuple[bytes, ...]:
    """Pack the driver's arrays: sizes, strides, the box and its element strides. K and V share them."""
    sizes, strides = dimensions(spec)
    box = struct.pack("=4I", box_columns(spec), box_rows, 1, 1)
    return struct.pack("=4Q", *sizes), struct.pack("=3Q", *strides), box, struct.pack("=4I", 1, 1, 1, 1)


class Made(NamedTuple):
    """The description behind a driver's map, fastest dimension first; strides and swizzle in bytes."""

    dtype: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


_MADE: dict[bytes, Made] = {}
_MOST_MADE = 1024


def made_of(argument: Any) -> Made | None:
    """Return the description of a map that `tensor_map` made on a GPU, None for anything else: its bytes are opaque."""
    is_map = isinstance(argument, np.ndarray) and argument.nbytes == 128 and argument.size == 1
    return _MADE.get(argument.tobytes()) if is_map else None


@functools.cache
def _driver_function() -> Any:
    """Return cuTensorMapEncodeTiled of the CUDA driver. CuPy, which owns the arrays, has made a context by now."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    number, pointer = ctypes.c_int, ctypes.c_void_p
    arrays = (ctypes.c_char_p,) * 4
    driver.cuTensorMapEncodeTiled.argtypes = pointer, number, ctypes.c_uint32, pointer, *arrays, *(number,) * 4
    return driver.cuTensorMapEncodeTiled


class MapCache:
    """The maps of one argument by address, because a model calls with the same few addresses repeatedly."""

    MOST = 64

    def __init__(self, spec: Spec, box_rows: int) -> None:
        """
        Args:
            spec: of the array of every call. box_rows: as in `tensor_map`.
        """
        self._spec, self._box_rows = spec, box_rows
        self._maps: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def at(self, address: int) -> tuple[int, Any]:
        """Return the host address of the tensor map for the array at `address`, and the object that owns its memory.

        Another thread may drop the map from this cache at any time, so hold the object until the launch has returned.
        """
        entry = self._maps.get(address)
        if entry is None:
            if len(self._maps) >= self.MOST:
                self._maps = {}
            entry = self._maps[address] = _encode(self._spec, address, self._box_rows)
        return entry
