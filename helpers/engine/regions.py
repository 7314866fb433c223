"""What memory a checked run knows: the launch's arrays, its `__shared__` arrays, the variables of the module."""

from __future__ import annotations

import numpy as np

from . import variables
from .array import NO_VALUE, is_fresh
from .copies import Argument, Copies, Memory
from .launch import CompiledKernel
from .observed import (
    ARRAY,
    DYNAMIC_SHARED,
    INITIAL,
    STATIC_SHARED,
    UNWRITTEN,
    VARIABLE,
    Part,
    Region,
)
from .structures import CheckedRegion


def regions_of(kernel: CompiledKernel, copies: Copies, shared_mem: int) -> tuple[list[Region], list[CheckedRegion]]:
    """The regions of a launch, and the same as the engine is told them. kernel: of the checked build."""
    regions = [_array_region(memory) for memory in copies.memories]
    rows = [_told(memory, region) for memory, region in zip(copies.memories, regions, strict=True)]
    pieces = [(s.name, STATIC_SHARED, s.offset, s.size, True) for s in kernel.shared_arrays if not s.is_guard]
    pieces.append(("dynamic shared memory", DYNAMIC_SHARED, 0, shared_mem, True))  # also where it has 0 bytes
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
    """Of each element, whether nobody has given it a value before the launch.

    What `empty` makes is poison: bytes of 0xFF. No number of a float has its bits. Among integers it is -1, so
    there the whole array has to be as it was made. Of what the kernel may write, so is what a host has filled with NaN,
    and a NaN that signals, which no operation gives: somebody has put it there to see what is written. Any other NaN is
    a number: somebody has written it, or an earlier launch has computed it.
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
    """Whether elements of 0xFF are no number. ml_dtypes' own types have the kind of a struct."""
    return dtype.kind in "fcb" or (dtype.kind == "V" and dtype.type is not np.void)


def _told(memory: Memory, region: Region) -> CheckedRegion:
    watched = region.writable or (region.state == UNWRITTEN).any()
    state = region.state.ctypes.data if watched else None
    item, fetches = memory.dtype.itemsize, region.fetches.ctypes.data
    return CheckedRegion(memory.address, memory.size, ARRAY, item, int(region.writable), fetches, state)
