"""Copy the arrays of a checked launch to storage of their own.

To a kernel, overlapping arrays are one memory, and it may rely on the distance between views of one array. So arguments
that overlap, or are near each other in one owner, are copied as one piece with wide pads around it, in which an access
past an end is recorded without harm. The kernel's results are copied back.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .array import address_of, empty, ndarray, owner_of, reused, set_aside, written

PAD = 1 << 20  # bytes before and after each piece
ALIGNMENT = 256  # that of every allocation, as in CuPy
# Storage is reused: mapping 2 MB takes 1.2 ms of CPU time, filling it 0.03 ms.
_PAGE, _LARGEST, _MOST = 4096, 4 * PAD, 12
_free: dict[int, tuple[ndarray, Any]] = {}  # by address, latest last, with the values for `array.reused`


def extent(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the one after its last.

    strides: in bytes; they may be negative.
    """
    if 0 in shape:
        return address, address
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return address + sum(r for r in reach if r < 0), address + sum(r for r in reach if r > 0) + itemsize


def extent_of(value: np.ndarray) -> tuple[int, int]:
    """Return the `extent` of a NumPy array."""
    return extent(value.ctypes.data, value.shape, value.strides, value.itemsize)


@dataclass(frozen=True)
class Given:
    """A device array of a launch. number: the kernel's parameter. writable: the parameter is a pointer to non-const.

    by_map: the parameter is its tensor map, which does not tell whether the kernel reads or writes it.
    """

    number: int
    name: str
    value: ndarray
    writable: bool
    by_map: bool


@dataclass(frozen=True)
class Argument(Given):
    """A device array of a launch, and its place in the copy.

    address: its first element's, in the copy. begin, end: its first byte, and the one after its last, in a region of
    memory that it may share with others.
    """

    address: int
    begin: int
    end: int


@dataclass
class Memory:
    """Arguments that overlap: one region of memory. dtype: of the smallest elements among them."""

    address: int
    size: int
    arguments: list[Argument]

    @property
    def name(self) -> str:
        """The name of the argument, or of all of them."""
        return ", ".join(argument.name for argument in self.arguments)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the argument with the smallest elements."""
        return min((a.value.dtype for a in self.arguments), key=lambda dtype: dtype.itemsize)

    @property
    def writable(self) -> bool:
        """True if one of the kernel's pointers to it is a pointer to non-const."""
        return any(argument.writable for argument in self.arguments)

    def view(self, per_element: np.ndarray, argument: Argument) -> np.ndarray | None:
        """View per-element data of the region in the argument's shape; None if elements differ in size."""
        item, strides = self.dtype.itemsize, argument.value.strides
        first = argument.address - self.address
        if argument.value.itemsize != item or any(step % item for step in (first, *strides)):
            return None
        steps = [step // item * per_element.itemsize for step in strides]
        start = per_element[first // item :]
        return np.lib.stride_tricks.as_strided(start, argument.value.shape, steps)


@dataclass
class _Piece:
    """Memory that is copied as one piece: the original and the copy."""

    begin: int
    end: int
    owner: np.ndarray
    given: list[Given]
    storage: ndarray | None = None
    start: int = 0  # in the copy


class Copies:
    """The copies of a launch's arrays.

    memories: in the parameters' order. addresses: those that the kernel gets, by the parameter's number.
    """

    def __init__(self, arrays: Sequence[Given], pad: int = PAD) -> None:
        """Copy arrays so that those that overlap, or are near each other in one owner, keep their relative places.

        Args:
            arrays: device arrays of at least one byte. pad: bytes before and after each piece.
        """
        self._pieces = _pieces(arrays)
        self.memories: list[Memory] = []
        for piece in self._pieces:
            size = piece.end - piece.begin
            piece.storage = self._storage(size + 2 * pad + 2 * ALIGNMENT)
            start = -(-(piece.storage.ctypes.data + pad) // ALIGNMENT) * ALIGNMENT
            piece.start = start + (piece.begin - extent_of(piece.owner)[0]) % ALIGNMENT
            ctypes.memmove(piece.start, piece.begin, size)
            self.memories += _memories(piece)
        self.memories.sort(key=lambda memory: min(a.number for a in memory.arguments))
        self.addresses = {a.number: a.address for memory in self.memories for a in memory.arguments}

    def _storage(self, size: int) -> ndarray:
        """Return this many bytes, rounded up to whole pages and all 0xFF: new ones, or those of earlier copies.

        No more than that, because the engine's guards begin right after the pads.
        """
        if not 2 * PAD < size < _LARGEST:
            return empty(size, np.uint8)
        size = -(-size // _PAGE) * _PAGE
        found = next((address for address, (kept, _) in list(_free.items()) if kept.nbytes == size), 0)
        kept = _free.pop(found, None)  # also None if another thread was faster
        storage = reused(*kept) if kept else empty(size, np.uint8)
        weakref.finalize(self, _keep, storage).atexit = False
        return storage

    def address(self, number: int, value: ndarray) -> int:
        """Return the address that the kernel gets for an array; 0 for one without elements."""
        return self.addresses.get(number, value.ctypes.data) if address_of(value) else 0

    def copy_back(self) -> None:
        """Copy what the kernel wrote back to the arrays."""
        for piece in self._pieces:
            ctypes.memmove(piece.begin, piece.start, piece.end - piece.begin)
            written(piece.owner)


def _keep(storage: ndarray) -> None:
    _free[storage.ctypes.data] = storage, set_aside(storage)
    for address in list(_free)[:-_MOST]:
        _free.pop(address, None)


def _pieces(arrays: Sequence[Given]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for given in sorted(arrays, key=lambda given: extent_of(given.value)[0]):
        begin, end = extent_of(given.value)
        owner, last = owner_of(given.value), pieces[-1] if pieces else None
        if last and (begin < last.end or (owner is last.owner and begin - last.end <= PAD)):
            last.end = max(last.end, end)
            last.given.append(given)
        else:
            pieces.append(_Piece(begin, end, owner, [given]))
    return pieces


def _memories(piece: _Piece) -> list[Memory]:
    """Return the regions of a piece: overlapping arguments are one region."""
    memories: list[Memory] = []
    moved = piece.start - piece.begin
    for given in piece.given:  # by address
        begin, end = (address + moved for address in extent_of(given.value))
        if not memories or begin >= memories[-1].address + memories[-1].size:
            memories.append(Memory(begin, 0, []))
        memory = memories[-1]
        memory.size = max(memory.size, end - memory.address)
        inside = begin - memory.address, end - memory.address
        first = given.value.ctypes.data + moved
        memory.arguments.append(
            Argument(given.number, given.name, given.value, given.writable, given.by_map, first, *inside)
        )
    for memory in memories:
        memory.arguments.sort(key=lambda argument: argument.number)
    return memories
