"""Kinds of arrays that a launch reads in place: CuPy's (or the CPU engine's), and PyTorch's on a GPU.

A kind returns the properties of an array that a launch depends on, allocates like its library, and names the stream to
launch on. PyTorch is never imported here: a caller with tensors has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder.layout import Spec, dense_copy, negative, padded, spec_of
from helpers.engine.cuda_source.signatures import dtype_of

E4M3 = "float8_e4m3fn"  # its bytes stand for it from here on
TORCH_DTYPES = ("float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")


class DeviceArrays:
    """CuPy's arrays, or the CPU engine's."""

    def reads_in_place(self, a: Any) -> bool:
        """Return True if a launch can read it in place."""
        return a.dtype.name != E4M3

    def cache_keys(self, arrays: Sequence[Any]) -> list[tuple[Hashable, ...]]:
        """Return all that a launch depends on but addresses: each array's shape, strides, dtype, alignment, device."""
        if device.ON_GPU:
            return [(a.shape, a.strides, a.dtype, (at := a.data).ptr % 16, at.device_id) for a in arrays]
        return [(a.shape, a.strides, a.dtype, a.ctypes.data % 16, 0) for a in arrays]

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        """Return the addresses of first elements, on the GPU."""
        return [a.data.ptr for a in arrays]

    def empty(self, shape: Sequence[int], dtype: Any, like: Any) -> Any:
        """Make a new array on the device of `like`, which is the current one. dtype: NumPy's."""
        return device.cp.empty(shape, dtype=dtype)

    def empties(self, forms: Sequence[tuple[Any, ...]], like: Any) -> list[Any]:
        """Make a new array for each (shape, dtype), as `empty` does."""
        return [device.cp.empty(shape, dtype=dtype) for shape, dtype in forms]

    def spec(self, key: tuple[Any, ...]) -> Spec:
        """Make the `Spec` of an array with this key of `cache_keys`."""
        return spec_of(*key)

    copy, negative, padded = staticmethod(dense_copy), staticmethod(negative), staticmethod(padded)

    def as_int32(self, a: Any) -> Any:
        """Return a C-contiguous copy in int32."""
        return device.cp.ascontiguousarray(a.astype(np.int32))

    def fill(self, a: Any, value: float) -> None:
        """Set every element to `value`."""
        a[...] = value

    def stream(self, a: Any) -> int:
        """Return the handle of CuPy's current stream."""
        return device.cp.cuda.get_current_stream().ptr

    def is_captured(self, stream: int) -> bool:
        """Return True if a CUDA graph is being captured on a stream."""
        return bool(device.cp.cuda.runtime.streamIsCapturing(stream))

    def keep_alive(self, arrays: Sequence[Any]) -> None:
        """Keep arrays for a graph that may use them at any time: CuPy's pool must not reuse their memory."""
        if not _HAS_MEMORY:
            _KEPT_FOR_GRAPHS.append(arrays)

    @contextlib.contextmanager
    def graph_memory(self, a: Any) -> Iterator[list[Any]]:
        """Return a context in which CuPy's new arrays live as long as a graph captured on a's stream may be launched.

        So do arrays that are put into the list. Without a capture it has no effect.
        """
        kept: list[Any] = []
        with contextlib.ExitStack() as stack:
            if captured := device.ON_GPU and self.is_captured(self.stream(a)):
                allocate = device.cp.cuda.get_allocator()

                def keep(size: int) -> Any:
                    kept.append(allocate(size))
                    return kept[-1]

                stack.enter_context(device.cp.cuda.using_allocator(keep))
            yield kept
        if captured:
            self.keep_alive(kept)

    def device_id(self, a: Any) -> int:
        """Return the number of a's device."""
        return a.data.device_id if device.ON_GPU else 0

    def on_stream_of(self, a: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which CuPy launches on the current stream of a's library."""
        return _NO_CONTEXT

    def device_array(self, a: Any) -> Any:
        """Return a device array of the same memory."""
        return a

    def to_numpy(self, a: Any) -> Any:
        """Return a NumPy copy; it waits for the device."""
        return device.cp.asnumpy(a)


class TorchTensors:
    """PyTorch's tensors on a GPU: its memory, its current stream, its allocator."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._dtypes = {getattr(torch, name): dtype_of(name) for name in TORCH_DTYPES}
        self._torchs = {dtype: name for name, dtype in self._dtypes.items()}
        if hasattr(torch, "float8_e4m3fn"):  # kernels read its bytes
            self._dtypes[torch.float8_e4m3fn] = np.dtype(np.uint8)

    def reads_in_place(self, a: Any) -> bool:
        """Return True if a launch can read it in place."""
        return a.is_cuda and not (a.requires_grad or a.is_neg()) and a.dtype in self._dtypes

    def cache_keys(self, arrays: Sequence[Any]) -> list[tuple[Hashable, ...]]:
        """See DeviceArrays.cache_keys; strides are in elements. The last item is True if it cannot be read in place.

        That is so if it requires a gradient, or if PyTorch negates it when it is read (the imaginary part of a
        conjugate).
        """
        return [
            (a.shape, a.stride(), a.dtype, a.data_ptr() % 16, a.get_device(), a.requires_grad or a.is_neg())
            for a in arrays
        ]

    def pointers(self, arrays: Sequence[Any]) -> list[int]:
        """Return the addresses of first elements."""
        return [a.data_ptr() for a in arrays]

    def empty(self, shape: Sequence[int], dtype: Any, like: Any) -> Any:
        """Make a new tensor on the device of `like`. dtype: NumPy's."""
        return like.new_empty(shape, dtype=self._torchs[dtype])

    def empties(self, forms: Sequence[tuple[Any, ...]], like: Any) -> list[Any]:
        """Make a new tensor for each (shape, dtype), as `empty` does."""
        return [like.new_empty(shape, dtype=self._torchs[dtype]) for shape, dtype in forms]

    def spec(self, key: tuple[Any, ...]) -> Spec:
        """Make the `Spec` of an array with this key of `cache_keys`."""
        shape, steps, dtype, *where, _ = key
        dtype = self._dtypes[dtype]
        size = dtype.itemsize
        return spec_of(tuple(shape), tuple([step * size for step in steps]), dtype, *where)

    def copy(self, a: Any) -> Any:
        """Return a C-contiguous copy."""
        return a.clone(memory_format=self._torch.contiguous_format)

    def as_int32(self, a: Any) -> Any:
        """Return a C-contiguous copy in int32."""
        return a.to(self._torch.int32, memory_format=self._torch.contiguous_format)

    def negative(self, a: Any) -> Any:
        """Return a C-contiguous copy with the other sign."""
        if a.dtype.itemsize == 1:  # e4m3: PyTorch has no neg for it, and negating its bytes gives another number
            return (a.contiguous().view(self._torch.uint8) ^ 128).view(a.dtype)
        return self._torch.neg(a, out=a.new_empty(a.shape))

    def padded(self, a: Any, columns: int) -> Any:
        """See `layout.padded`. PyTorch's own pad would return the strides of channels_last, if a has them."""
        wide = a.new_zeros((*a.shape[:-1], columns))
        wide[..., : a.shape[-1]].copy_(a)
        return wide

    def fill(self, a: Any, value: float) -> None:
        """Set every element to `value`."""
        a.fill_(value)

    def stream(self, a: Any) -> int:
        """Return the handle of PyTorch's current stream on a's device."""
        return self._torch._C._cuda_getCurrentRawStream(a.get_device())  # in a tenth of current_stream's time

    def is_captured(self, stream: int) -> bool:
        """Return True if a CUDA graph is being captured on PyTorch's current stream, which is this one."""
        return self._torch.cuda.is_current_stream_capturing()

    def keep_alive(self, arrays: Sequence[Any]) -> None:
        """Do nothing: PyTorch's allocator keeps the memory of a capture for its graph."""

    @contextlib.contextmanager
    def graph_memory(self, a: Any) -> Iterator[list[Any]]:
        """See DeviceArrays.graph_memory. CuPy then uses PyTorch's memory: a capture may not allocate from CUDA."""
        with contextlib.ExitStack() as stack:
            if self.is_captured(self.stream(a)):
                cuda, of_torch = device.cp.cuda, self._torch.cuda
                allocator = cuda.PythonFunctionAllocator(
                    lambda size, _: of_torch.caching_allocator_alloc(size),
                    lambda place, _: of_torch.caching_allocator_delete(place),
                )
                stack.enter_context(cuda.using_allocator(allocator.malloc))
            yield []

    def device_id(self, a: Any) -> int:
        """Return the number of a's device."""
        return a.get_device()

    def on_stream_of(self, a: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which CuPy launches on PyTorch's current stream."""
        return device.cp.cuda.ExternalStream(self.stream(a), a.get_device())

    def to_numpy(self, a: Any) -> Any:
        """Return a NumPy copy, after waiting for the device. bfloat16, which NumPy lacks, is not supported."""
        return a.cpu().numpy()

    def device_array(self, a: Any) -> Any:
        """Return a CuPy array of the tensor's memory."""
        cp = device.cp
        dtype = self._dtypes[a.dtype]
        strides = [step * dtype.itemsize for step in a.stride()]
        size = dtype.itemsize + sum((n - 1) * step for n, step in zip(a.shape, strides, strict=True))
        size = max(size, 0) if a.numel() else 0
        memory = cp.cuda.UnownedMemory(a.data_ptr(), size, a, a.get_device())
        pointer = cp.cuda.MemoryPointer(memory, 0)
        return cp.ndarray(tuple(a.shape), dtype, memptr=pointer, strides=tuple(strides))


class TensorsWithoutGradients(TorchTensors):
    """PyTorch's tensors on a GPU whose gradients the caller handles, as in an autograd.Function."""

    def reads_in_place(self, a: Any) -> bool:
        """Return True if a launch can read it in place."""
        return a.is_cuda and not a.is_neg() and a.dtype in self._dtypes

    def cache_keys(self, arrays: Sequence[Any]) -> list[tuple[Hashable, ...]]:
        """See TorchTensors.cache_keys."""
        return [(a.shape, a.stride(), a.dtype, a.data_ptr() % 16, a.get_device(), a.is_neg()) for a in arrays]


class HeadsFirst(TensorsWithoutGradients):
    """PyTorch's tensors for which q, k, v, o and gradients are (batch, heads, rows, head_dim), without making views.

    The rest of a plan treats them as (batch, rows, heads, head_dim); new ones have that layout in memory.
    """

    def spec(self, key: tuple[Any, ...]) -> Spec:
        """See TorchTensors.spec."""
        shape, steps, *others = key
        return super().spec((_exchanged(shape), _exchanged(steps), *others))

    def empties(self, forms: Sequence[tuple[Any, ...]], like: Any) -> list[Any]:
        """See TorchTensors.empties. shape: (batch, rows, heads, head_dim), or another number of axes."""
        return [
            like.new_empty_strided(*_in_memory(shape), dtype=self._torchs[dtype])
            if len(shape) == 4
            else like.new_empty(shape, dtype=self._torchs[dtype])
            for shape, dtype in forms
        ]

    def copy(self, a: Any) -> Any:
        """See TorchTensors.copy."""
        return turned(super().copy(turned(a)))

    def negative(self, a: Any) -> Any:
        """See TorchTensors.negative."""
        return turned(super().negative(turned(a)))

    def padded(self, a: Any, columns: int) -> Any:
        """See `layout.padded`."""
        return turned(super().padded(turned(a), columns))

    def device_array(self, a: Any) -> Any:
        """See TorchTensors.device_array."""
        return super().device_array(turned(a))


def _exchanged(axes: Sequence[int]) -> Sequence[int]:
    """Exchange the second and the third of four."""
    return (axes[0], axes[2], axes[1], axes[3]) if len(axes) == 4 else axes


def turned(a: Any) -> Any:
    """View (batch, heads, rows, head_dim) as (batch, rows, heads, head_dim), or the reverse; leave lse unchanged."""
    return a.transpose(1, 2) if a.ndim == 4 else a


@functools.lru_cache(maxsize=1024)
def _in_memory(shape: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape (batch, heads, rows, head_dim), and its strides in elements, of a dense array of `shape`."""
    _, rows, heads, columns = shape
    return _exchanged(shape), (rows * heads * columns, columns, heads * columns, 1)


_NO_CONTEXT: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_DEVICE = DeviceArrays()
_KEPT_FOR_GRAPHS: list[Sequence[Any]] = []  # never freed: CUDA does not report a graph's end
_HAS_MEMORY: list[bool] = []


def follows_calls(arrays: Sequence[Any]) -> bool:
    """Return True, and keep the arrays, if the graph being captured may read what earlier calls have written."""
    if _HAS_MEMORY and not any(kept is arrays for kept in _KEPT_FOR_GRAPHS):
        _KEPT_FOR_GRAPHS.append(arrays)
    return bool(_HAS_MEMORY)


@contextlib.contextmanager
def graph_has_its_memory() -> Iterator[None]:
    """Keep no arrays for the graph being captured in this context: its pool gives their memory to nobody else.

    The graph is launched after the GPU has finished all calls before this context.
    """
    _HAS_MEMORY.append(True)
    try:
        yield
    finally:
        _HAS_MEMORY.pop()


def on_device(number: int) -> contextlib.AbstractContextManager[Any] | None:
    """Return a context in which the device with that number is current; None if it already is."""
    if not device.ON_GPU:
        return None
    cuda = device.cp.cuda
    here = cuda.runtime.getDevice()
    if not cuda.driver.ctxGetCurrent():  # a thread that has done nothing on a GPU yet, such as one of autograd's
        cuda.runtime.setDevice(here)
    return None if number == here else cuda.Device(number)


def kind_of(*arrays: Any) -> DeviceArrays | TorchTensors | None:
    """Return the kind of all these arrays; None if they differ, must be copied, or come through DLPack."""
    types = set(map(type, arrays))
    return _kind_of_type(*types) if len(types) == 1 else None


@functools.cache
def without_gradients(heads_first: bool = False) -> TensorsWithoutGradients:
    """Return the kind of PyTorch's tensors that may require gradients, in one of two layouts."""
    return (HeadsFirst if heads_first else TensorsWithoutGradients)(sys.modules["torch"])


@functools.cache
def _kind_of_type(array: type) -> DeviceArrays | TorchTensors | None:
    if array is device.cp.ndarray:
        return _DEVICE
    torch = sys.modules.get("torch")
    return TorchTensors(torch) if device.ON_GPU and torch is not None and array is torch.Tensor else None


# ---- arrays of other kinds

_CPU, _CUDA, _CUDA_HOST, _MANAGED = 1, 2, 3, 13  # device types of DLPack


def as_bytes(name: str, a: Any) -> Any:
    """View an array or tensor of e4m3 as its bytes; return others unchanged.

    Raises:
        TypeError: another float of 8 bits.
    """
    library, _, dtype = str(getattr(a, "dtype", "")).rpartition(".")
    if not dtype.startswith("float8"):
        return a
    if dtype != E4M3:
        raise TypeError(f"{name} is {dtype}; of floats of 8 bits the kernels take {E4M3}")
    return a.view(sys.modules["torch"].uint8 if library else np.uint8)


def as_device_array(name: str, a: Any) -> Any:
    """Return a device array that shares a's memory, if that is on a GPU; otherwise a copy on the device."""
    if isinstance(a, (np.ndarray, device.cp.ndarray)):
        return device.cp.asarray(as_bytes(name, a))
    if getattr(a, "requires_grad", False) is True:
        raise TypeError(
            f"{name} requires grad, and this function keeps nothing for gradients: use "
            f"helpers.torch_attention.flash_attention, or give {name}.detach()"
        )
    a = as_bytes(name, a)  # DLPack does not support e4m3
    if not hasattr(a, "__dlpack__"):
        raise TypeError(f"{name} must be an array of NumPy or the device, or have __dlpack__; got {type(a).__name__}")
    if hasattr(a, "resolve_neg"):  # a PyTorch tensor may be negated lazily, which DLPack does not show
        a = a.resolve_neg()
    where = int(a.__dlpack_device__()[0])
    if where not in (_CPU, _CUDA, _CUDA_HOST, _MANAGED):
        raise TypeError(f"{name} is on a device of DLPack's type {where}; the CPU (1) or a CUDA GPU (2) is needed")
    if where != _CPU and not device.ON_GPU:
        raise TypeError(f"{name} is on a GPU, and the kernels run on the CPU engine here: move it to the CPU")
    try:
        return device.cp.asarray(np.from_dlpack(a)) if where == _CPU else device.cp.from_dlpack(a)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}, a {type(a).__name__}, does not come through DLPack: {error}") from error


def as_kind_of(like: Any, a: Any) -> Any:
    """Convert a device array to the kind of array that `like` is, on `like`'s device."""
    if isinstance(like, device.cp.ndarray):
        return a
    if isinstance(like, np.ndarray) or int(like.__dlpack_device__()[0]) == _CPU:
        a = device.cp.asnumpy(a)
    if isinstance(like, np.ndarray):
        return a
    library = sys.modules[type(like).__module__.partition(".")[0]]
    if isinstance(a, np.ndarray) and a.dtype.name == "bfloat16" and hasattr(library, "bfloat16"):  # e4m3 in PyTorch
        return library.from_dlpack(a.view(np.int16)).view(library.bfloat16)
    from_dlpack = getattr(library, "from_dlpack", None) or getattr(
        getattr(library, "dlpack", None), "from_dlpack", None
    )
    return from_dlpack(a) if from_dlpack else a
