"""Device arrays of the CPU engine: NumPy arrays of a class of their own, in poisoned memory between guard pages.

The class keeps the course honest. On a GPU a NumPy array must be copied to the device and back, so here too a kernel
takes only what `asarray` and its friends made, and `asnumpy` (or `.get()`) brings a copy back.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import weakref
from typing import Any

import numpy as np

from .cuda_source.c_types import bfloat16 as bfloat16
from .runtime import library

_live: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()  # by address
_asked: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()  # in NumPy's memory, by address


_numbers = itertools.count()


class _Memory:
    """Bytes between guards, given back when the last array in them is gone."""

    def __init__(self, size: int, itemsize: int) -> None:
        # Some systems promise more memory than there is, and end the process that believes them.
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.number, self.size = 2 * next(_numbers) + (itemsize == 1), size  # of what lies beside it
        self.address = library().engine_allocate(size, self.number) if size <= installed else None
        if not self.address:
            raise MemoryError
        weakref.finalize(self, library().engine_release, self.address, size).atexit = False
        _live[self.address] = self
        self.is_fresh = True  # no line of the host's and no launch has written it
        self.__array_interface__ = {"version": 3, "data": (self.address, False), "shape": (size,), "typestr": "|u1"}


class MemoryPointer:
    """An address in device memory, which it keeps alive, as `cupy.cuda.MemoryPointer`.

    ptr: the address, as an int. A kernel takes either for a pointer.
    """

    def __init__(self, mem: np.ndarray, offset: int = 0) -> None:
        self.mem, self.ptr = mem, mem.ctypes.data + int(offset)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ctypes.data + int(offset))

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -int(offset)

    def copy_from(self, mem: Any, size: int) -> None:
        """Copy bytes from an address: of device memory, or of a host's as a ctypes pointer."""
        source = mem.ptr if isinstance(mem, MemoryPointer) else ctypes.cast(mem, ctypes.c_void_p).value
        ctypes.memmove(self.ptr, source, size)

    copy_from_device = copy_from_host = copy_from

    def memset(self, value: int, size: int) -> None:
        """Set bytes."""
        ctypes.memset(self.ptr, value, size)


# By dtype, the bits of NaN in an array that a host has filled with it, to see which elements a kernel writes. No
# operation gives these, so the look can tell them from a NaN that somebody computed, or wrote among numbers.
NO_VALUE = {np.dtype("f2"): 0x7EAD, np.dtype("f4"): 0x7FDEADED, np.dtype("f8"): 0x7FFDEADEDEADEDED}


class ndarray(np.ndarray):
    """A device array. Arithmetic, slicing and views are NumPy's."""

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> ndarray:
        """An array on memory that is there already, which it aliases: `get_global`'s, or a MemoryPointer."""
        if memptr is None:
            return empty(shape, dtype, order)
        offset = 0
        if isinstance(memptr, MemoryPointer):
            memptr, offset = memptr.mem.reshape(-1).view(np.uint8), memptr.ptr - memptr.mem.ctypes.data
        return np.ndarray.__new__(cls, shape, dtype, memptr, offset, strides, order)

    @property
    def data(self) -> MemoryPointer:
        """Where it begins, as `cupy.ndarray.data`; `.data.ptr` is the address."""
        owner = owner_of(self)
        if owner.base is None:
            _asked[owner.ctypes.data] = owner
        return MemoryPointer(self)

    def typed(self, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> ndarray:
        """The same memory from its beginning on with another shape, dtype and strides in bytes; it is contiguous."""
        return np.ndarray.__new__(ndarray, shape, dtype, self, 0, strides)

    def __setitem__(self, key: Any, value: Any) -> None:
        written(self)
        super().__setitem__(key, value)
        is_whole = key is Ellipsis or (isinstance(key, slice) and key == slice(None))
        if is_whole and isinstance(value, (float, np.floating)) and value != value:
            bits = NO_VALUE.get(self.dtype.newbyteorder("="))
            if bits is not None:
                self.view(f"u{self.itemsize}")[...] = bits

    def fill(self, value: Any) -> None:
        """All elements become `value`."""
        self[...] = value

    def get(self) -> np.ndarray:
        """A copy as a plain NumPy array, as `cupy.ndarray.get` gives it."""
        return np.array(self, subok=False)

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        # CuPy keeps results of reductions on the device, as arrays without axes.
        return np.asarray(array).view(ndarray)


def empty(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> ndarray:
    """Memory that has not been written: every byte is 0xFF, which reads as NaN in a float."""
    kind = np.dtype(dtype)
    shape = (int(shape),) if np.isscalar(shape) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"negative dimensions are not allowed: {shape}")
    size = math.prod(shape) * kind.itemsize
    try:
        memory = _Memory(max(size, 1), kind.itemsize)
    except MemoryError:
        raise MemoryError(f"out of memory: no {size} bytes for an array of shape {shape} and dtype {kind}") from None
    return np.ndarray.__new__(ndarray, shape, kind, np.asarray(memory), 0, None, order)


def _order_of(a: Any, order: str | None) -> str:
    """C, or F where that is asked for, or where it is not, for an array that is in this order alone."""
    if order in ("C", "F"):
        return order
    flags = a.flags if isinstance(a, np.ndarray) else None
    return "F" if flags is not None and flags.f_contiguous and not flags.c_contiguous else "C"


def _filled(shape: Any, value: Any, dtype: Any, order: str) -> ndarray:
    out = empty(shape, dtype, order)
    out[...] = value
    return out


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """A device array of zeros."""
    return _filled(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """A device array of ones."""
    return _filled(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    """A device array of one value."""
    return _filled(shape, fill_value, dtype or np.asarray(fill_value).dtype, order)


def empty_like(a: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """`empty` with the shape, dtype and order of `a`."""
    return empty(np.shape(a), dtype or a.dtype, _order_of(a, order))


def zeros_like(a: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """`zeros` with the shape, dtype and order of `a`."""
    return zeros(np.shape(a), dtype or a.dtype, _order_of(a, order))


def ones_like(a: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """`ones` with the shape, dtype and order of `a`."""
    return ones(np.shape(a), dtype or a.dtype, _order_of(a, order))


def full_like(a: Any, fill_value: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """`full` with the shape, dtype and order of `a`."""
    return full(np.shape(a), fill_value, dtype or a.dtype, _order_of(a, order))


def array(a: Any, dtype: Any = None, copy: bool = True, order: str | None = "K", ndmin: int = 0) -> ndarray:
    """A new device array with the contents of `a`, in its order unless another is asked for."""
    host = np.array(a, dtype=dtype, copy=None if _NUMPY_2 else False, ndmin=ndmin)
    out = empty(host.shape, host.dtype, _order_of(host, order))
    out[...] = host
    return out


_NUMPY_2 = int(np.__version__.partition(".")[0]) >= 2  # before, copy=None was False


def asarray(a: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    """`a` on the device: itself if it is a device array of that dtype and order already, else a copy."""
    same = isinstance(a, ndarray) and (dtype is None or a.dtype == np.dtype(dtype))
    return a if same and order in (None, "K", "A", _order_of(a, None)) else array(a, dtype, order=order)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """`a` on the device with its elements in C order, one after the other."""
    out = asarray(a, dtype)
    return out if out.flags.c_contiguous else array(out, order="C")


def arange(*args: Any, dtype: Any = None) -> ndarray:
    """NumPy's arange, on the device."""
    return array(np.arange(*args, dtype=dtype))


def asnumpy(a: Any) -> np.ndarray:
    """A NumPy copy of a device array; anything else goes through `numpy.asarray`."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def at(address: int) -> ndarray | None:
    """The bytes from an address to the end of the device array that holds it, without a dtype; None if none does."""
    for block in list(_live.values()):
        if block.address <= address < block.address + block.size:
            inside = address - block.address
            return np.ndarray.__new__(ndarray, (block.size - inside,), "V1", np.asarray(block), inside)
    for owner in list(_asked.values()):
        inside = address - owner.ctypes.data
        if 0 <= inside < owner.nbytes and owner.flags.contiguous:
            return owner.reshape(-1).view("V1")[inside:].view(ndarray)
    return None


def owner_of(a: np.ndarray) -> np.ndarray:
    """The array at the end of a chain of views: the one whose memory it is."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def written(a: np.ndarray) -> None:
    """Note that the array, or a part of it, is being written."""
    memory = owner_of(a).base
    if isinstance(memory, _Memory):
        memory.is_fresh = False


def is_fresh(a: np.ndarray) -> bool:
    """Whether the array is as `empty` made it: no byte of its memory has been written."""
    owner = owner_of(a)
    return isinstance(owner.base, _Memory) and owner.base.is_fresh and bool((owner == 0xFF).all())


class Lent:
    """The arrays of a launch, while it lasts.

    What NumPy computes from device arrays is a device array as well, but is in NumPy's memory, where a wild write
    would break the process. Such an array is lent a place between guards, and copied back at the end.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[np.ndarray, ndarray]] = {}  # by the identity of the array that owns the memory
        self._blocks: dict[int, _Memory] = {}  # by address

    def __enter__(self) -> Lent:
        return self

    def address(self, value: ndarray) -> int:
        """Where the kernel finds the array's first element."""
        owner, address = owner_of(value), value.ctypes.data
        written(value)
        if owner.base is None:
            if id(owner) not in self._places:
                place = empty(owner.nbytes, np.uint8)
                ctypes.memmove(place.ctypes.data, owner.ctypes.data, owner.nbytes)
                self._places[id(owner)] = (owner, place)
            place = self._places[id(owner)][1]
            address += place.ctypes.data - owner.ctypes.data
            owner = owner_of(place)
        if isinstance(owner.base, _Memory):
            self._blocks[owner.base.address] = owner.base
        return address

    def overrun(self) -> int | None:
        """The address of a byte beside the arrays that somebody wrote to."""
        first = None
        for block in self._blocks.values():
            offset = library().engine_overrun(block.address, block.size, block.number)
            first = block.address + offset if offset else first
        return first

    def __exit__(self, *_: object) -> None:
        for owner, place in self._places.values():
            ctypes.memmove(owner.ctypes.data, place.ctypes.data, owner.nbytes)
