"""Copy the arrays of a launch on a GPU to the engine for its X-ray, and back."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .. import copies, tensor_map
from ..array import asnumpy, empty, ndarray
from ..cuda_source.signatures import dtype_of
from . import hooks


def cupy() -> ModuleType:
    """Return CuPy, which the arrays belong to."""
    import cupy

    return cupy


def _array_of(tensor: hooks.DescribedTensor) -> Any:
    """Return the array on the GPU that a tensor map describes. The caller of the launch keeps it alive."""
    cp, kind = cupy(), np.dtype(f"u{dtype_of(tensor.dtype).itemsize}")  # CuPy lacks some half types
    strides = (*reversed(tensor.strides), kind.itemsize)
    shape = tuple(reversed(tensor.sizes))
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
    memory = cp.cuda.UnownedMemory(tensor.address, size, None)
    return cp.ndarray(shape, kind, cp.cuda.MemoryPointer(memory, 0), strides)


class Mirrors:
    """The arguments of a launch on a GPU as arrays of the engine; arrays that share memory there do so here."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.args = list(args)
        self._pieces: list[tuple[Any, ndarray]] = []
        self._cupy = cp = cupy()
        maps = {number: tensor for number, a in enumerate(args) if (tensor := hooks.tensor_of(a)) is not None}
        for number, tensor in maps.items():
            self.args[number] = _array_of(tensor)
        args = self.args
        spans = [
            (*copies.extent(a.data.ptr, a.shape, a.strides, a.itemsize), number)
            for number, a in enumerate(args)
            if isinstance(a, cp.ndarray)
        ]
        groups: list[tuple[int, int, list[int]]] = []
        for begin, end, number in sorted(spans):
            first, last, members = groups[-1] if groups else (0, 0, [])
            kin = bool(members) and args[members[-1]].data.mem is args[number].data.mem
            if members and (begin < last or (kin and begin - last <= copies.PAD)):
                groups[-1] = first, max(last, end), [*members, number]
            else:
                groups.append((begin, end, [number]))
        for begin, end, members in groups:
            self._mirror(begin, end, members)
        for number, tensor in maps.items():
            here = self.args[number].ctypes.data
            tile = tensor.sizes, tensor.strides, tensor.box
            self.args[number] = tensor_map.encode_tiled(tensor.dtype, here, *tile, swizzle=tensor.swizzle)

    def _mirror(self, begin: int, end: int, members: Sequence[int]) -> None:
        """Copy a piece of a GPU's memory here, to the same offset from a multiple of 256 bytes."""
        cp = self._cupy
        lead, size, memory = begin % copies.ALIGNMENT, end - begin, self.args[members[0]].data.mem
        here = empty(lead + size, np.uint8)
        if size:
            remote = cp.ndarray((size,), cp.uint8, cp.cuda.MemoryPointer(memory, begin - memory.ptr))
            here[lead:] = cp.asnumpy(remote)
            self._pieces.append((remote, here[lead:]))
        for number in members:
            a = self.args[number]
            place = lead + a.data.ptr - begin
            self.args[number] = np.ndarray.__new__(ndarray, a.shape, a.dtype, here, place, a.strides)

    def copy_back(self) -> None:
        """Copy the kernel's results from the CPU back to the GPU."""
        for remote, here in self._pieces:
            remote[...] = self._cupy.asarray(asnumpy(here))
