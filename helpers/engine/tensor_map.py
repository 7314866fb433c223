"""Tensor maps for the engine: what cuTensorMapEncodeTiled writes for a GPU, with its checks.

A tensor map describes an array of one to five dimensions and the box that one TMA instruction copies. Kernels take it
by value, as `const __grid_constant__ TensorMap map` with

    struct alignas(64) TensorMap { unsigned long long opaque[16]; };

NVIDIA does not document the 128 bytes, so maps made here have the engine's own layout: a GPU cannot read them, and the
engine cannot read a GPU's.

Source of the rules: CUDA Driver API, "Tensor Map Object Management"; PTX ISA 9.1, sections 5.5 (tensors) and 9.7.9.27.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cuda_source.c_types import bfloat16

MAGIC = 0x70614D726F736E54  # "TnsorMap"
BYTES = 128

# The type of an element, by name.
DTYPES: dict[str, np.dtype] = {
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "int32": np.dtype(np.int32),
    "uint64": np.dtype(np.uint64),
    "int64": np.dtype(np.int64),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
if bfloat16 is not None:
    DTYPES["bfloat16"] = bfloat16
_NAMES = tuple(DTYPES)
_SWIZZLES = (0, 32, 64, 128)  # bytes per swizzled row; 0: none
_PROMOTIONS = (0, 64, 128, 256)
MOST_BOX_BYTES = 228 * 1024  # over all dimensions: the driver's limit for an H200

# engine/tensor_copies.cpp has the same struct.
_LAYOUT = np.dtype(
    [
        ("magic", "<u8"),
        ("address", "<u8"),
        ("strides", "<u8", 4),  # bytes, for dimensions 1 to 4
        ("last", "<u4", 5),  # the size of each dimension minus one
        ("box", "<u2", 5),
        ("steps", "u1", 5),  # element strides
        ("rank", "u1"),
        ("itemsize", "u1"),
        ("swizzle", "u1"),  # 0 none, 1, 2, 3: 32, 64, 128 bytes
        ("dtype", "u1"),
        ("unused", "u1", 41),
    ]
)
assert _LAYOUT.itemsize == BYTES


@dataclass(frozen=True)
class Described:
    """The contents of a map. dims, strides, box: the first dimension is the innermost; strides in bytes."""

    dtype: np.dtype
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape in NumPy's order: the innermost dimension is the last."""
        return self.dims[::-1]

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis of `shape`."""
        return (*self.strides[::-1], self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        reach = sum((n - 1) * step for n, step in zip(self.dims[1:], self.strides, strict=True))
        return reach + self.dims[0] * self.dtype.itemsize


def encode_tiled(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    element_strides: Sequence[int] | None = None,
    swizzle: int = 128,
    l2_promotion: int = 128,
) -> np.ndarray:
    """Make a tensor map of the engine, for kernels that it runs.

    Args:
        dtype: the type of an element, by its name in NumPy or "bfloat16".
        address: that of the array's first element, a multiple of 16.
        dims: sizes in elements, the innermost dimension first: one to five of them.
        strides: for dimensions 1, 2, ...: bytes from one element to the next, a multiple of 16; the innermost has none.
        box: sizes of what one instruction copies, as many as dims, 1 to 256 each.
        element_strides: 1 for each dimension (None); the engine supports no others.
        swizzle: bytes of a row in shared memory whose 16-byte chunks are permuted: 0, 32, 64 or 128.
        l2_promotion: 0, 64, 128 or 256; it has no effect here.

    Returns:
        An array of shape (1,) and dtype "V128": the argument of a launch.

    Raises:
        TypeError, ValueError: what cuTensorMapEncodeTiled refuses (CUDA_ERROR_INVALID_VALUE), with the reason.
    """
    name = str(dtype)
    if name not in DTYPES:
        raise TypeError(f"dtype is {name!r}; a tensor map holds {', '.join(_NAMES)}")
    kind, rank = DTYPES[name], len(dims)
    dims, strides, box = ([int(n) for n in given] for given in (dims, strides, box))
    if not 1 <= rank <= 5:
        raise ValueError(f"dims = {tuple(dims)}: a tensor map has 1 to 5 dimensions, not {rank}")
    if len(strides) != rank - 1:
        raise ValueError(
            f"strides = {tuple(strides)}: {rank} dimensions have {rank - 1} strides, as the innermost one has none"
        )
    if len(box) != rank:
        raise ValueError(f"box = {tuple(box)}: it has {len(box)} sizes, and the array has {rank} dimensions")
    if address <= 0 or address % 16:
        raise ValueError(f"address 0x{address:x}: TMA takes multiples of 16 above 0")
    for axis, n in enumerate(dims):
        if not 1 <= n <= 1 << 32:
            raise ValueError(f"dims[{axis}] = {n:,}: a dimension has 1 to 2^32 elements")
    for axis, step in enumerate(strides):
        if step % 16 or not 0 <= step < 1 << 40:
            raise ValueError(
                f"strides[{axis}] = {step:,} bytes (of dimension {axis + 1}): a stride is a multiple of 16 bytes, from "
                "0 to below 2^40. A row whose length in bytes is no multiple of 16 needs padding, or plain loads"
            )
    for axis, n in enumerate(box):
        if not 1 <= n <= 256:
            raise ValueError(f"box[{axis}] = {n:,}: a box has 1 to 256 elements along each dimension")
    if (size := math.prod(box) * kind.itemsize) > MOST_BOX_BYTES:
        raise ValueError(
            f"box = {tuple(box)} of {name} takes {size:,} bytes: a box has at most {MOST_BOX_BYTES:,}, as many as a "
            "multiprocessor has of shared memory"
        )
    if swizzle not in _SWIZZLES:
        raise ValueError(f"swizzle = {swizzle!r}: a swizzled row has 32, 64 or 128 bytes; 0 means no swizzle")
    inner = box[0] * kind.itemsize
    if inner % 16:
        raise ValueError(f"box[0] = {box[0]} of {name} are {inner} bytes: the box's rows are multiples of 16 bytes")
    if swizzle and inner > swizzle:
        raise ValueError(
            f"box[0] = {box[0]} of {name} are {inner} bytes: with the {swizzle}-byte swizzle a row of the box has at "
            f"most {swizzle} bytes ({swizzle // kind.itemsize} elements); copy wider tiles in several boxes"
        )
    steps = [int(n) for n in (element_strides or [1] * rank)]
    if len(steps) != rank or any(not 1 <= n <= 8 for n in steps):
        raise ValueError(f"element_strides = {tuple(steps)}: one number from 1 to 8 for each dimension")
    if any(n != 1 for n in steps):
        raise ValueError(
            f"element_strides = {tuple(steps)}: the CPU engine copies boxes of neighbours, 1 in each dimension"
        )
    if l2_promotion not in _PROMOTIONS:
        raise ValueError(f"l2_promotion = {l2_promotion!r}: one of {', '.join(map(str, _PROMOTIONS))} bytes")
    encoded = np.zeros(1, _LAYOUT)
    encoded["magic"], encoded["address"] = MAGIC, address
    encoded["strides"][0, : rank - 1] = strides
    encoded["last"][0, :rank] = [n - 1 for n in dims]
    encoded["box"][0], encoded["steps"][0] = box + [1] * (5 - rank), 1
    encoded["rank"], encoded["itemsize"], encoded["dtype"] = rank, kind.itemsize, _NAMES.index(name)
    encoded["swizzle"] = _SWIZZLES.index(swizzle)
    return encoded.view("V128")


def described(value: object) -> Described | None:
    """Decode a map of the engine; None for any other value."""
    if not isinstance(value, np.ndarray) or value.nbytes != BYTES:
        return None
    raw = np.frombuffer(value.tobytes(), _LAYOUT)[0]
    if raw["magic"] != MAGIC:
        return None
    rank = int(raw["rank"])
    return Described(
        DTYPES[_NAMES[raw["dtype"]]],
        int(raw["address"]),
        tuple(int(n) + 1 for n in raw["last"][:rank]),
        tuple(int(n) for n in raw["strides"][: rank - 1]),
        tuple(int(n) for n in raw["box"][:rank]),
        _SWIZZLES[raw["swizzle"]],
    )


def moved(value: np.ndarray, address: int) -> np.ndarray:
    """Copy a map for an array at another address."""
    encoded = np.frombuffer(value.tobytes(), _LAYOUT).copy()
    encoded["address"] = address
    return encoded.view("V128")
