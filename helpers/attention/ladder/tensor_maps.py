"""Tensor maps: what a TMA copy is told of an array. The driver makes them, and a kernel takes them by value.

    tensor_map(Spec.of(k), address(k), box_rows=128)  # for `const __grid_constant__ TensorMap k_map`

An array (batch, heads, rows, head_dim), with any strides, becomes four dimensions, the fastest first: {head_dim, rows,
heads, batch}. So a copy never reads or writes beyond the rows of its own head. The driver is called through ctypes:
neither CuPy nor NVRTC has the function. Without a GPU, the CPU engine's twin of it makes the map.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.ladder.call import Spec

PANEL_COLUMNS = 64  # of 2 bytes: the 128 bytes that the swizzle spans
TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))], align=True)  # the struct of kernels/hopper.cuh

_DTYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_SWIZZLE_128B, _L2_PROMOTION_128B = 3, 2


def dimensions(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides in bytes) of an array (batch, heads, rows, head_dim), the fastest first, as the driver has them.

    The strides of head_dim's elements are not among the strides. A dimension of size 1 gets a stride that is allowed.
    """
    sizes = tuple(reversed(spec.shape))
    strides = [0 if size == 1 else stride for size, stride in zip(sizes[1:], reversed(spec.strides[:-1]), strict=True)]
    row = -(-sizes[0] * np.dtype(spec.dtype).itemsize // 16) * 16
    return sizes, tuple(stride or row for stride in strides)


def tensor_map(spec: Spec, address: int, *, box_rows: int) -> np.ndarray:
    """The map of a half-type array at an address, for swizzled copies of 64 columns and `box_rows` rows.

    Args:
        spec: the array, (batch, heads, rows, head_dim). address: of its first element, a multiple of 16.

    Returns:
        shape (1,), dtype `TENSOR_MAP`.

    Raises:
        ValueError: the driver, or its twin, refuses: a stride that is not a multiple of 16 bytes, more than 256 rows.
    """
    sizes, strides = dimensions(spec)
    box = (PANEL_COLUMNS, box_rows, 1, 1)
    dtype = np.dtype(spec.dtype).name
    if not device.ON_GPU:
        encoded = device.cp.tensor_map.encode_tiled(dtype, address, sizes, strides, box, swizzle=128)
        return encoded.view(TENSOR_MAP)
    return _encoder(dtype, sizes, strides, box)(address)


@functools.lru_cache(maxsize=256)
def _encoder(
    dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Callable[[int], np.ndarray]:
    """The driver's function with everything but the address: about 2 us a call instead of 10."""
    encode = _driver().cuTensorMapEncodeTiled
    rank = len(sizes)
    fixed = (
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *map(ctypes.c_int, (0, _SWIZZLE_128B, _L2_PROMOTION_128B, 0)),  # not interleaved; zeros out of bounds
    )
    kind, rank_argument = ctypes.c_int(_DTYPES[dtype]), ctypes.c_uint32(rank)

    def at(address: int) -> np.ndarray:
        room = np.empty(192, np.uint8)
        start = -room.ctypes.data % 64
        encoded = room[start : start + 128]
        error = encode(ctypes.c_void_p(encoded.ctypes.data), kind, rank_argument, ctypes.c_void_p(address), *fixed)
        if error:
            raise ValueError(
                f"cuTensorMapEncodeTiled returned error {error} for {dtype} sizes {sizes}, strides {strides} bytes, "
                f"box {box}, address {address:#x}"
            )
        if len(_MADE) >= _MOST_MADE:
            _MADE.clear()
        _MADE[encoded.tobytes()] = Made(dtype, address, sizes, strides, box)
        return encoded.view(TENSOR_MAP)

    return at


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
def _driver() -> Any:
    """The CUDA driver's library. CuPy has made a context by now: it holds the arrays."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Kept:
    """The maps of one argument by address: a model calls with the same few addresses again and again."""

    MOST = 64

    def __init__(self, spec: Spec, box_rows: int) -> None:
        """
        Args:
            spec: of the array of every call. box_rows: as `tensor_map` has it.
        """
        self._spec, self._box_rows = spec, box_rows
        self._maps: dict[int, tuple[int, np.ndarray]] = {}  # address -> where its map is, and the map, kept alive

    def __len__(self) -> int:
        return len(self._maps)

    def pointer(self, address: int) -> int:
        """Where in the host's memory the map of the array at this address is."""
        entry = self._maps.get(address)
        if entry is None:
            if len(self._maps) >= self.MOST:
                self._maps = {}
            encoded = tensor_map(self._spec, address, box_rows=self._box_rows)
            entry = self._maps[address] = encoded.ctypes.data, encoded
        return entry[0]
