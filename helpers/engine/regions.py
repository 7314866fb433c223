"""The memory that a checked run knows: the launch's arrays, its `__shared__` arrays, the module's variables."""

from __future__ import annotations

import numpy as np

from . import variables
from .array import NO_VALUE, is_fresh
from .copies import Argument, Copies, Memory
from .launch import CompiledKernel
from .observed import ARRAY, DYNAMIC_SHARED, INITIAL, STATIC_SHARED, UNWRITTEN, VARIABLE, Part, Region
from .structures import CheckedRegion


def regions_of(kernel: CompiledKernel, copies: Copies, shared_mem: int) -> tuple[list[Region], list[CheckedRegion]]:
    """Return the regions of a launch, also as rows for the engine. kernel: from the checked build."""
    regions = [_array_region(memory) for memory in copies.memories]
    rows = [_row(memory, region) for memory, region in zip(copies.memories, regions, strict=True)]
    pieces = [(s.name, STATIC_SHARED, s.offset, s.size, True) for s in kernel.shared_arrays if not s.is_guard]
    pieces.append(("dynamic shared memory", DYNAMIC_SHARED, 0, shared_mem, True))  # even if it has 0 bytes
    for variable in variables.of_module(kernel.library.symbols, kernel.code):
        address = kernel.library.base + variable.offset
        pieces.append((variable.name, VARIABLE, address, variable.size, not variable.is_constant))
    for name, kind, address, size, writable in pieces:
        rows.append(CheckedRegion(address, size, kind, 4, int(writable), None, None))
        regions.append(Region(name, kind, size, None, writable, np.empty(0), np.empty(0)))
    return regions, rows


def _array_region(memory: Memory) -> Region:
    elements = memory.size // memory.dtype.itemsize
    fetches = np.zeros(elements, np.uint32)
    state = np.full(elements, INITIAL, np.uint8)
    parts = []
    for argument in memory.arguments:
        states = memory.view(state, argument)
        if states is not None:
            states[_unwritten(argument)] = UNWRITTEN
        fetched = memory.view(fetches, argument)
        item = argument.value.dtype.itemsize
        parts.append(Part(argument.name, argument.begin, argument.end, item, argument.writable, fetched, states))
    return Region(memory.name, ARRAY, memory.size, memory.dtype, memory.writable, fetches, state, tuple(parts))


def _unwritten(argument: Argument) -> np.ndarray:
    """Return for each element whether it had no value before the launch.

    `empty` fills memory with poison, bytes of 0xFF, which are NaN in a float. In integers they are -1, so an integer
    array counts as unwritten only if all of it is as `empty` made it. In arrays that the kernel may write, two more
    values count: the NaN that the host fills an array with, and a signalling NaN, which no operation produces but the
    host may store to see which elements are written. Any other NaN was written or computed.
    """
    value, item = argument.value, argument.value.dtype.itemsize
    if item not in (1, 2, 4, 8) or not (_is_float(value.dtype) or is_fresh(value)):
        return np.zeros(value.shape, bool)
    bits = np.asarray(value).view(f"u{item}")
    poison = bits == 2 ** (8 * item) - 1
    filled = NO_VALUE.get(value.dtype) if argument.writable and not argument.by_map else None
    if filled is None:
        return poison
    is_quiet = 1 << (np.finfo(value.dtype).nmant - 1)
    return poison | (bits == filled) | (np.isnan(value) & (bits & is_quiet == 0))


def _is_float(dtype: np.dtype) -> bool:
    """Return True if bytes of 0xFF are NaN. ml_dtypes' types have the kind of a struct."""
    return dtype.kind in "fcb" or (dtype.kind == "V" and dtype.type is not np.void)


def _row(memory: Memory, region: Region) -> CheckedRegion:
    watched = region.writable or (region.state == UNWRITTEN).any()
    state = region.state.ctypes.data if watched else None
    item, fetches = memory.dtype.itemsize, region.fetches.ctypes.data
    return CheckedRegion(memory.address, memory.size, ARRAY, item, int(region.writable), fetches, state)
