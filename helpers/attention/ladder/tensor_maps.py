"""Tensor maps: what a TMA copy is told of an array. The driver makes them, and a kernel takes them by value.

    tensor_map(Spec.of(k), address(k), box_rows=128)  # for `const __grid_constant__ TensorMap k_map`

An array (batch, heads, rows, head_dim), with any strides, becomes four dimensions, the fastest first: {head_dim, rows,
heads, batch}. So a copy never reads or writes beyond the rows of its own head. The driver is called through ctypes:
neither CuPy nor NVRTC has the function. Without a GPU, the CPU engine's twin of it makes the map.
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

PANEL_COLUMNS = 64  # of 2 bytes: the 128 bytes that the swizzle spans
TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))], align=True)  # the struct of kernels/hopper.cuh

_DTYPES = {dtype_of("float16"): 6, dtype_of("bfloat16"): 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_SWIZZLE_128B, _L2_PROMOTION_128B = 3, 2


def dimensions(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides in bytes) of an array (batch, heads, rows, head_dim), the fastest first, as the driver has them.

    The strides of head_dim's elements are not among the strides. A dimension of size 1 gets a stride that is allowed:
    libraries leave any number there. One that is broadcast keeps its 0, which the driver takes.
    """
    sizes = tuple(reversed(spec.shape))
    row = -(-sizes[0] * spec.dtype.itemsize // 16) * 16
    pairs = zip(sizes[1:], reversed(spec.strides[:-1]), strict=True)
    return sizes, tuple(row if size == 1 else stride for size, stride in pairs)


def tensor_map(spec: Spec, address: int, *, box_rows: int) -> np.ndarray:
    """The map of a half-type array at an address, for swizzled copies of 64 columns and `box_rows` rows.

    Args:
        spec: the array, (batch, heads, rows, head_dim). address: of its first element, a multiple of 16.

    Returns:
        shape (1,), dtype `TENSOR_MAP`.

    Raises:
        ValueError: the driver, or its twin, refuses: a stride that is not a multiple of 16 bytes, more than 256 rows.
    """
    at, room = _encode(spec, address, box_rows)
    if not device.ON_GPU:
        return room.view(TENSOR_MAP)
    encoded = np.frombuffer(room, np.uint8, 128, at - ctypes.addressof(room))
    if len(_MADE) >= _MOST_MADE:
        _MADE.clear()
    _MADE[encoded.tobytes()] = Made(spec.dtype.name, address, *dimensions(spec), (PANEL_COLUMNS, box_rows, 1, 1))
    return encoded.view(TENSOR_MAP)


def _encode(spec: Spec, address: int, box_rows: int) -> tuple[int, Any]:
    """(where the map is in the host's memory, what keeps it there)."""
    if not device.ON_GPU:
        box = (PANEL_COLUMNS, box_rows, 1, 1)
        how = spec.dtype.name, address, *dimensions(spec), box
        encoded = device.cp.tensor_map.encode_tiled(*how, swizzle=128)
        return encoded.ctypes.data, encoded
    room = ctypes.create_string_buffer(192)
    at = ctypes.addressof(room)
    at += -at % 64
    # Not interleaved; zeros out of bounds.
    how = 0, _SWIZZLE_128B, _L2_PROMOTION_128B, 0
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
    """The driver's arrays: sizes, strides, the box, and from one element of it to the next. K and V share them."""
    sizes, strides = dimensions(spec)
    box = struct.pack("=4I", PANEL_COLUMNS, box_rows, 1, 1)
    return struct.pack("=4Q", *sizes), struct.pack("=3Q", *strides), box, struct.pack("=4I", 1, 1, 1, 1)


class Made(NamedTuple):
    """What a map of the driver was made of, the fastest dimension first; strides in bytes."""

    dtype: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


_MADE: dict[bytes, Made] = {}
_MOST_MADE = 1024


def made_of(argument: Any) -> Made | None:
    """What a map that `tensor_map` made on a GPU says: its bytes are documented nowhere. None for anything else."""
    is_map = isinstance(argument, np.ndarray) and argument.nbytes == 128 and argument.size == 1
    return _MADE.get(argument.tobytes()) if is_map else None


@functools.cache
def _driver_function() -> Any:
    """cuTensorMapEncodeTiled of the CUDA driver. CuPy has made a context by now: it holds the arrays."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    number, pointer = ctypes.c_int, ctypes.c_void_p
    arrays = (ctypes.c_char_p,) * 4
    driver.cuTensorMapEncodeTiled.argtypes = pointer, number, ctypes.c_uint32, pointer, *arrays, *(number,) * 4
    return driver.cuTensorMapEncodeTiled


class Kept:
    """The maps of one argument by address: a model calls with the same few addresses again and again."""

    MOST = 64

    def __init__(self, spec: Spec, box_rows: int) -> None:
        """
        Args:
            spec: of the array of every call. box_rows: as `tensor_map` has it.
        """
        self._spec, self._box_rows = spec, box_rows
        self._maps: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def at(self, address: int) -> tuple[int, Any]:
        """Where in the host's memory the map of the array at this address is, and what keeps it there.

        Another thread may let go of it at any time: hold the second until the launch has returned.
        """
        entry = self._maps.get(address)
        if entry is None:
            if len(self._maps) >= self.MOST:
                self._maps = {}
            entry = self._maps[address] = _encode(self._spec, address, self._box_rows)
        return entry
