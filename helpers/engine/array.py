"""Device arrays of the CPU engine: a subclass of NumPy's arrays, in poisoned memory between guard pages.

The subclass keeps programs portable. On a GPU a NumPy array must be copied to the device and back, so here too a kernel
takes only arrays made by `asarray` and the like, and `asnumpy` (or `.get()`) returns a copy.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .cuda_source.c_types import bfloat16 as bfloat16
from .runtime import library

_live: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()  # by address
_others: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()  # in other memory, by identity


_numbers = itertools.count()
memory_limit = 0  # the limit on the bytes of all device arrays, if one is set: see `cuda.MemoryPool`


def used_bytes() -> int:
    """Return the bytes of all live device arrays, except those in NumPy's memory."""
    return sum(block.size for block in list(_live.values()))


@functools.cache
def installed_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Memory:
    """Bytes between guards, freed with the last array in them. An empty array gets one byte."""

    def __init__(self, size: int, itemsize: int) -> None:
        self.is_null, size = not size, max(size, 1)  # CuPy allocates nothing for 0 bytes: a null pointer
        # Some systems promise more memory than they have, and kill the process that uses it.
        installed = installed_bytes()
        if memory_limit and used_bytes() + size > memory_limit:
            raise MemoryError
        self.number, self.size = 2 * next(_numbers) + (itemsize == 1), size  # selects the guards' pattern
        self.address = library().engine_allocate(size, self.number) if size <= installed else None
        if not self.address:
            raise MemoryError
        weakref.finalize(self, library().engine_release, self.address, size).atexit = False
        _live[self.address] = self
        self.is_fresh = True  # not written yet, by the host or by a launch
        self.__array_interface__ = {"version": 3, "data": (self.address, False), "shape": (size,), "typestr": "|u1"}


class MemoryPointer:
    """A device address that keeps its memory alive, like `cupy.cuda.MemoryPointer`.

    ptr: the address, as an int; 0 for empty memory. A kernel accepts the object or the int as a pointer.
    """

    def __init__(self, mem: np.ndarray, offset: int = 0) -> None:
        self.mem, self.ptr = mem, address_of(mem) + int(offset)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - address_of(self.mem) + int(offset))

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -int(offset)

    def copy_from(self, mem: Any, size: int) -> None:
        """Copy bytes from an address: of device memory, or of host memory as a ctypes pointer."""
        source = mem.ptr if isinstance(mem, MemoryPointer) else ctypes.cast(mem, ctypes.c_void_p).value
        ctypes.memmove(self.ptr, source, size)

    copy_from_device = copy_from_host = copy_from

    def memset(self, value: int, size: int) -> None:
        """Set `size` bytes to `value`."""
        ctypes.memset(self.ptr, value, size)


# By dtype, the bits of NaN with which a host can fill an array, to see which elements a kernel writes. No operation
# produces these bits, so they differ from a NaN that was computed, or written among numbers.
NO_VALUE = {np.dtype("f2"): 0x7EAD, np.dtype("f4"): 0x7FDEADED, np.dtype("f8"): 0x7FFDEADEDEADEDED}


class ndarray(np.ndarray):
    """A device array. Arithmetic, slicing and views are NumPy's; dtypes and memory orders of results are CuPy's."""

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> ndarray:
        """Make an array that aliases existing memory: that of `get_global`, or a MemoryPointer.

        Raises:
            ValueError: as for `empty`.
        """
        if memptr is None:
            return empty(shape, dtype, order)
        offset = 0
        if isinstance(memptr, MemoryPointer):
            memptr, offset = memptr.mem.reshape(-1).view(np.uint8), memptr.ptr - address_of(memptr.mem)
        return np.ndarray.__new__(cls, shape, dtype_on_device(dtype), memptr, offset, strides, order)

    def __array_finalize__(self, _: Any) -> None:
        # Results of operations are in NumPy's memory, and a module's variables in its library. Their addresses are
        # arguments of launches too: directly, within arrays, or within tensor maps.
        owner = self
        while isinstance(owner.base, np.ndarray):  # `owner_of`, without a call per view
            owner = owner.base
        if not isinstance(owner.base, _Memory):
            _others[id(owner)] = owner

    @property
    def data(self) -> MemoryPointer:
        """A pointer to its first element, like `cupy.ndarray.data`; `.data.ptr` is the address, 0 if it is empty."""
        return MemoryPointer(self)

    device: Any = None  # the only device, like `cupy.ndarray.device`: a property set by cuda.py, which defines devices

    def typed(self, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> ndarray:
        """View the memory from its beginning with another shape, dtype and strides in bytes."""
        return np.ndarray.__new__(ndarray, shape, dtype, self, 0, strides)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, np.ndarray):
            return found
        # CuPy returns an element as a 0-dimensional array; a kernel would get its address.
        return super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))

    def __setitem__(self, key: Any, value: Any) -> None:
        written(self)
        super().__setitem__(key, value)
        is_whole = key is Ellipsis or (isinstance(key, slice) and key == slice(None))
        if is_whole and isinstance(value, (float, np.floating)) and value != value:
            bits = NO_VALUE.get(self.dtype.newbyteorder("="))
            if bits is not None:
                self.view(f"u{self.itemsize}")[...] = bits

    def fill(self, value: Any) -> None:
        """Set all elements to `value`."""
        self[...] = value

    def astype(
        self, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> Any:
        """Convert as NumPy does.

        Raises:
            ValueError: a dtype that devices do not have, as for `empty`.
        """
        return super().astype(dtype_on_device(dtype), order, casting, subok, copy)

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> Any:
        """Copy to a new NumPy array, like `cupy.ndarray.get`, or to `out`.

        Raises:
            TypeError: out is not a NumPy array. ValueError: it has another shape or dtype.
        """
        if out is None:
            return np.array(self, subok=False, order=order)
        if not isinstance(out, np.ndarray) or isinstance(out, ndarray):
            raise TypeError(f"out must be a NumPy array; got {type(out).__module__}.{type(out).__name__}")
        if (out.shape, out.dtype) != (self.shape, self.dtype):
            raise ValueError(f"out has shape {out.shape} and dtype {out.dtype}; expected {self.shape} and {self.dtype}")
        out[...] = self
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copy from a NumPy array of the same shape and dtype, like `cupy.ndarray.set`.

        Raises:
            TypeError: it is not a NumPy array, or has another dtype. ValueError: it has another shape.
        """
        if not isinstance(arr, np.ndarray) or isinstance(arr, ndarray):
            raise TypeError(f"set takes a NumPy array; got {type(arr).__module__}.{type(arr).__name__}")
        if arr.dtype != self.dtype:
            raise TypeError(f"the array has dtype {arr.dtype}; expected {self.dtype}: arr.astype('{self.dtype}')")
        if arr.shape != self.shape:
            raise ValueError(f"the array has shape {arr.shape}; expected {self.shape}")
        self[...] = arr

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        if isinstance(array, ndarray):  # `out`, or the left side of +=
            written(array)
            return array
        # CuPy keeps results of reductions on the device, as 0-dimensional arrays. Its element-wise operations return C
        # order, even for operands in another order.
        return np.asarray(array, order="C" if context else "K").view(ndarray)

    def __getattr__(self, name: str) -> Any:
        if name == "__cuda_array_interface__":
            raise AttributeError(
                f"{name} describes GPU memory, and this array is in host memory: a consumer would crash. Pass "
                "cp.asnumpy(...), or the array itself through DLPack"
            )
        raise AttributeError(f"the CPU engine's ndarray has no {name!r}")


def _on_device(name: str) -> Callable[..., Any]:
    """Wrap a method of NumPy's so that it returns a number as a 0-dimensional array."""
    method = getattr(np.ndarray, name)

    @functools.wraps(method)
    def call(self: ndarray, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        return np.asarray(result).view(ndarray) if isinstance(result, np.generic) else result

    return call


for _name in ("argmax", "argmin", "dot", "mean", "searchsorted", "std", "take", "trace", "var"):
    setattr(ndarray, _name, _on_device(_name))


_NUMPY_2 = int(np.__version__.partition(".")[0]) >= 2  # before NumPy 2, copy=None meant False


def dtype_on_device(dtype: Any) -> np.dtype:
    """Return a dtype that device arrays may have.

    Raises:
        TypeError: it is not a dtype. ValueError: it is big-endian, or for objects, texts, dates or long doubles.
    """
    kind = np.dtype(dtype)
    if not kind.isnative:
        raise ValueError(
            f"Unsupported dtype {kind.str if kind.names is None else kind} with big-endian byte-order: a device's "
            f"numbers are little-endian; write {np.dtype(kind.newbyteorder('=')).name!r}. cp.asarray converts NumPy's"
        )
    if kind.hasobject or kind.char in "SUMmgG":
        raise ValueError(f"Unsupported dtype {kind}: kernels take numbers, and structs of numbers")
    return kind


def empty(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> ndarray:
    """Allocate an uninitialised array: every byte is 0xFF, so an unwritten float reads as NaN.

    Raises:
        ValueError: a negative size; a big-endian dtype, or one of objects, strings, dates or long doubles.
        MemoryError: there is not enough memory.
    """
    kind = dtype_on_device(dtype)
    shape = (int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape))
    if min(shape, default=0) < 0:
        raise ValueError(f"negative dimensions are not allowed: {shape}")
    size = math.prod(shape) * kind.itemsize
    try:
        memory = _Memory(size, kind.itemsize)
    except MemoryError:
        raise MemoryError(f"out of memory: no {size} bytes for an array of shape {shape} and dtype {kind}") from None
    return np.ndarray.__new__(ndarray, shape, kind, np.asarray(memory), 0, None, order)


def set_aside(a: ndarray) -> _Memory:
    """Exclude an array of `empty` from the used bytes, until `reused` gets what this returns."""
    return _live.pop(a.ctypes.data)


def reused(a: ndarray, memory: _Memory) -> ndarray:
    """Restore an array that was set aside: every byte is 0xFF."""
    _live[memory.address] = memory
    ctypes.memset(a.ctypes.data, 0xFF, a.nbytes)
    return a


def _order_of(a: np.ndarray, order: str | None) -> str:
    """Return C or F, or K if the axes of `a` keep an order that is neither, by CuPy's rules for `order`.

    Raises:
        ValueError: `order` is not C, F, A, K or None.
    """
    kind = "K" if order is None else str(order).upper()
    if kind not in ("C", "F", "A", "K"):
        raise ValueError(f"order not understood: {order!r}; expected 'C', 'F', 'A' or 'K'")
    if kind in ("C", "F"):
        return kind
    if a.flags.f_contiguous and not a.flags.c_contiguous:
        return "F"
    return "C" if kind == "A" or a.flags.c_contiguous else "K"


def _empty_as(a: np.ndarray, dtype: Any, order: str | None, shape: Any = None) -> ndarray:
    """Allocate unwritten memory in the order of `a`, or in the given order."""
    if shape is not None:
        shape = (int(shape),) if np.ndim(shape) == 0 else tuple(shape)
    kind = "C" if order in ("K", "k") and shape is not None and len(shape) != a.ndim else _order_of(a, order)
    shape = a.shape if shape is None else shape
    if kind != "K":
        return empty(shape, dtype, kind)
    axes = sorted(range(a.ndim), key=lambda axis: -abs(a.strides[axis]))  # outermost first
    return empty(tuple(shape[axis] for axis in axes), dtype).transpose(np.argsort(axes))


def _filled(out: ndarray, value: Any) -> ndarray:
    out[...] = value
    return out


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """Make a device array of zeros."""
    return _filled(empty(shape, dtype, order), 0)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """Make a device array of ones."""
    return _filled(empty(shape, dtype, order), 1)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    """Make a device array of one value."""
    dtype = np.asarray(fill_value).dtype if dtype is None else dtype
    return _filled(empty(shape, dtype, order), fill_value)


def empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    """Call `empty` with the dtype, the order and, unless `shape` is given, the shape of an array."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    return _empty_as(prototype, prototype.dtype if dtype is None else dtype, order, shape)


def zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    """Call `zeros` with the dtype, the order and, unless `shape` is given, the shape of an array."""
    return _filled(empty_like(a, dtype, order, subok, shape), 0)


def ones_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    """Call `ones` with the dtype, the order and, unless `shape` is given, the shape of an array."""
    return _filled(empty_like(a, dtype, order, subok, shape), 1)


def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    """Return a device array filled with `fill_value`, with the shape, dtype and order of `a` unless they are given."""
    return _filled(empty_like(a, dtype, order, subok, shape), fill_value)


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str | None = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """Make a device array with the contents of `obj`, in its order unless another is requested.

    NumPy arrays with the other byte order are converted, as in CuPy.

    Args:
        copy: None returns a device array unchanged if dtype and order match; False refuses to copy a device array.

    Raises:
        ValueError: a dtype that devices do not have, or a copy that is needed and refused.
    """
    if subok:
        raise NotImplementedError("subok=True: device arrays have no subclasses")
    if isinstance(obj, ndarray):
        kind = obj.dtype if dtype is None else dtype_on_device(dtype)
        there = kind == obj.dtype and _has_order(obj, order)
        if not copy and not there and copy is not None:
            raise ValueError("Unable to avoid copy while creating an array as requested.")
        if there and not copy:
            out = obj
        else:
            out = _empty_as(obj, kind, order)
            out[...] = obj
        return out.reshape((1,) * (ndmin - out.ndim) + out.shape) if ndmin > out.ndim else out
    host = np.array(obj, dtype=dtype, copy=None if _NUMPY_2 else False, ndmin=ndmin)
    kind = _order_of(host, order)
    out = empty(host.shape, host.dtype.newbyteorder("="), "C" if kind == "K" else kind)
    out[...] = host
    return out


def _has_order(a: np.ndarray, order: str | None) -> bool:
    """Return True if CuPy returns an array unchanged when that order is requested."""
    is_any = order is None or order in ("K", "k")
    kind = _order_of(a, order)
    return is_any or (a.flags.c_contiguous and kind == "C") or (a.flags.f_contiguous and kind == "F")


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    """Return `a` if it already is a device array of that dtype and order, else a copy. See `array`."""
    return array(a, dtype, copy, order)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """Return `a` on the device in C order, without gaps, and with at least one axis."""
    return array(a, dtype, None, "C", ndmin=1)


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    """Return `a` on the device in F order, without gaps, and with at least one axis."""
    return array(a, dtype, None, "F", ndmin=1)


def copy(a: Any, order: str = "K") -> ndarray:
    """Copy `a` on the device, in its order unless another is requested."""
    return array(a, None, True, order)


def arange(*args: Any, dtype: Any = None) -> ndarray:
    """Call NumPy's arange, and put the result on the device."""
    return array(np.arange(*args, dtype=dtype if dtype is None else dtype_on_device(dtype)))


def asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: np.ndarray | None = None, *, blocking: bool = True
) -> np.ndarray:
    """Copy a device array to a NumPy array; pass anything else to `numpy.asarray`."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out)
    host = np.asarray(a, order=order)
    if out is None:
        return host
    out[...] = host
    return out


def from_dlpack(array: Any, device: Any = None, copy: bool | None = None) -> ndarray:
    """Make a device array from an array with `__dlpack__`: a view if it is a device array, else a copy.

    Raises:
        TypeError: it has no `__dlpack__`. BufferError: it is in a GPU's memory.
    """
    if isinstance(array, ndarray) and not copy:
        return array[...]
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"from_dlpack takes an array with __dlpack__; got {type(array).__name__}")
    if int(array.__dlpack_device__()[0]) not in _OF_THE_HOST:
        raise BufferError(f"the {type(array).__name__} is in the memory of a GPU, and the CPU engine has none")
    return asarray(np.from_dlpack(array))


_OF_THE_HOST = (1, 3)  # DLPack's device types for the CPU and its pinned memory


def at(address: int) -> ndarray | None:
    """Return the bytes from an address to the end of the device array that contains it; None if no array does."""
    for block in list(_live.values()):
        if block.address <= address < block.address + block.size:
            inside = address - block.address
            return np.ndarray.__new__(ndarray, (block.size - inside,), "V1", np.asarray(block), inside)
    for owner in list(_others.values()):
        inside = address - owner.ctypes.data
        if 0 <= inside < owner.nbytes:
            dense = owner.transpose(sorted(range(owner.ndim), key=lambda axis: -owner.strides[axis]))
            return dense.reshape(-1).view("V1")[inside:].view(ndarray) if dense.flags.c_contiguous else None
    return None


def address_of(a: np.ndarray) -> int:
    """Return the address of an array's first element; 0 if nothing was allocated for it, as in CuPy."""
    owner = owner_of(a)
    is_null = owner.base.is_null if isinstance(owner.base, _Memory) else not owner.nbytes
    return 0 if is_null else a.ctypes.data


def owner_of(a: np.ndarray) -> np.ndarray:
    """Follow a chain of views to the array that owns the memory."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def written(a: np.ndarray) -> None:
    """Record that the array, or a part of it, is being written."""
    memory = owner_of(a).base
    if isinstance(memory, _Memory):
        memory.is_fresh = False


def is_fresh(a: np.ndarray) -> bool:
    """Return True if an array is as `empty` made it: no byte of its memory has been written."""
    owner = owner_of(a)
    return isinstance(owner.base, _Memory) and owner.base.is_fresh and bool((owner == 0xFF).all())


class GuardedArguments:
    """The arrays of a launch, while it runs.

    NumPy's results from device arrays are device arrays too, but in NumPy's memory, where a wild write would corrupt
    the process. During the launch, such an array is replaced by a copy with guards on both sides, which is copied back
    afterwards.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[np.ndarray, ndarray]] = {}  # by the identity of the owning array
        self._blocks: dict[int, _Memory] = {}  # by address

    def __enter__(self) -> GuardedArguments:
        return self

    def address(self, _: int, value: ndarray) -> int:
        """Return the kernel's address of the array's first element; 0 if it has none.

        From now on the array counts as written.
        """
        owner = owner_of(value)
        memory: Any = owner.base
        if isinstance(memory, _Memory):
            memory.is_fresh = False
            if memory.is_null:
                return 0
            self._blocks[memory.address] = memory
            return value.ctypes.data
        address = value.ctypes.data if owner.nbytes else 0
        if memory is None and address:
            if id(owner) not in self._places:
                place = empty(owner.nbytes, np.uint8)
                ctypes.memmove(place.ctypes.data, owner.ctypes.data, owner.nbytes)
                self._places[id(owner)] = (owner, place)
            place = self._places[id(owner)][1]
            address += place.ctypes.data - owner.ctypes.data
            memory = owner_of(place).base
            self._blocks[memory.address] = memory
        return address

    def overrun(self) -> int | None:
        """Return the address of an overwritten byte next to the arrays; None if there is none."""
        first = None
        for block in self._blocks.values():
            offset = library().engine_overrun(block.address, block.size, block.number)
            first = block.address + offset if offset else first
        return first

    def __exit__(self, *_: object) -> None:
        for owner, place in self._places.values():
            ctypes.memmove(owner.ctypes.data, place.ctypes.data, owner.nbytes)
