"""`cp.cuda` of the CPU engine: events, the device and its properties, and what programs set up before a launch.

Functions that only configure a GPU (memory pools, profiler marks) exist and do nothing, so that programs can call them;
functions whose result would differ without a GPU raise an error that says so.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import compiler as _compiler
from . import failures, limits
from . import runtime as _engine
from .array import MemoryPointer, empty, ndarray

_arrays: Any = sys.modules[MemoryPointer.__module__]  # by module name: in the package, `array` is CuPy's function
MULTIPROCESSORS = 2  # see getDeviceProperties
VERSION = 12090  # of CUDA, whose headers the engine models

# A package to `import cupy.cuda.memory`; there are no files.
__path__: list[str] = []


def __getattr__(name: str) -> Any:
    raise AttributeError(f"the CPU engine's cp.cuda has no {name!r}: {_GPU_ONLY}")


_GPU_ONLY = "it has what programs set up and launch with; the rest is a GPU's"


def _as_module(namespace: type) -> Any:
    """Make a module of a class's attributes: in CuPy these are modules, and programs import from them."""
    name = f"{__name__}.{namespace.__name__}"
    module = types.ModuleType(name, namespace.__doc__)
    module.__dict__.update({key: getattr(namespace, key) for key in vars(namespace) if not key.startswith("__")})

    def missing(key: str) -> Any:
        raise AttributeError(f"the CPU engine's cp.cuda.{namespace.__name__} has no {key!r}: {_GPU_ONLY}")

    module.__dict__["__getattr__"] = missing
    return module


def is_available() -> bool:
    """Return True if the engine replaces CuPy, so that programs that check before a launch run without a GPU."""
    return sys.modules.get("cupy") is sys.modules[__name__.rpartition(".")[0]]


def get_nvcc_path() -> str | None:
    """Return the path of nvcc, if it is installed. The engine does not use it."""
    return shutil.which("nvcc")


def get_device_id() -> int:
    """Return the number of the current device: there is one."""
    return 0


def alloc(size: int) -> MemoryPointer:
    """Allocate poisoned device memory, like `cupy.cuda.alloc`; it is freed with the last pointer to it."""
    return MemoryPointer(empty(size, "uint8"))


malloc_managed = alloc  # the host sees all memory here


class MemoryPool:
    """`cupy.cuda.MemoryPool`: memory comes from the system, and is freed with the last array in it."""

    def __init__(self, allocator: Any = None) -> None:
        pass

    def malloc(self, size: int) -> MemoryPointer:
        """Call `alloc`."""
        return alloc(size)

    def used_bytes(self) -> int:
        """Return the bytes of all live device arrays."""
        return _arrays.used_bytes()

    total_bytes = used_bytes

    def free_bytes(self) -> int:
        """Return 0: the pool keeps no unused memory."""
        return 0

    n_free_blocks = free_bytes

    def free_all_blocks(self, stream: Any = None) -> None:
        """Do nothing: the pool keeps no unused memory."""

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Limit the bytes of all device arrays, absolutely or as a share of the machine's memory; 0: no limit.

        Raises:
            ValueError: neither or both are given, or one is out of range.
        """
        if (size is None) == (fraction is None):
            raise ValueError("set_limit takes either size or fraction")
        if (size is not None and size < 0) or (fraction is not None and not 0 <= fraction <= 1):
            raise ValueError(f"size is at least 0, fraction from 0 to 1; got size={size}, fraction={fraction}")
        _arrays.memory_limit = int(size) if size is not None else int((fraction or 0) * _arrays.installed_bytes())

    def get_limit(self) -> int:
        """Return the limit in bytes; 0 if there is no limit."""
        return _arrays.memory_limit


class PinnedMemoryPool:
    """`cupy.cuda.PinnedMemoryPool`: here all host memory is the same."""

    def __init__(self, allocator: Any = None) -> None:
        pass

    def malloc(self, size: int) -> PinnedMemoryPointer:
        """Call `alloc_pinned_memory`."""
        return alloc_pinned_memory(size)

    def n_free_blocks(self) -> int:
        """Return 0: the pool keeps no unused memory."""
        return 0

    def free_all_blocks(self) -> None:
        """Do nothing: there is nothing to give back."""


class PinnedMemoryPointer(np.ndarray):
    """Bytes of the host's memory, for `np.frombuffer`."""

    @property
    def ptr(self) -> int:
        """The address."""
        return self.ctypes.data


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    """Allocate host memory, like `cupy.cuda.alloc_pinned_memory`. size: bytes."""
    return np.zeros(size, np.uint8).view(PinnedMemoryPointer)


_POOL, _PINNED_POOL = MemoryPool(), PinnedMemoryPool()


def get_default_memory_pool() -> MemoryPool:
    """Return the memory pool, like `cupy.get_default_memory_pool`."""
    return _POOL


def get_default_pinned_memory_pool() -> PinnedMemoryPool:
    """Return the pool of host memory, like `cupy.get_default_pinned_memory_pool`."""
    return _PINNED_POOL


def set_allocator(allocator: Any = None) -> None:
    """Do nothing: there is only one kind of memory."""


set_pinned_memory_allocator = set_allocator


def get_allocator() -> Any:
    """Return `alloc`, whatever was set."""
    return alloc


@contextlib.contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """Do nothing: there is only one kind of memory."""
    yield


@contextlib.contextmanager
def profile() -> Iterator[None]:
    """Record nothing: `cp.cuda.profiler` has no effect."""
    yield


@_as_module
class profiler:
    """`cp.cuda.profiler`, which records nothing."""

    @staticmethod
    def start() -> None:
        """Record nothing."""

    stop = start


@_as_module
class nvtx:
    """`cp.cuda.nvtx`, whose marks are discarded."""

    available = True

    @staticmethod
    def RangePush(message: str, id_color: int = -1) -> None:
        """Record nothing."""

    @staticmethod
    def RangePop() -> None:
        """Record nothing."""

    Mark = RangePush
    RangePushC = MarkC = RangePush


@_as_module
class compiler:
    """`cp.cuda.compiler`: the exception for a source that does not compile."""

    CompileException = _compiler.CompileError


@_as_module
class driver:
    """`cp.cuda.driver`: the exception for a launch, or for a name that a module does not have."""

    CUDADriverError = failures.LaunchError

    @staticmethod
    def get_build_version() -> int:
        """Return the version of CUDA."""
        return VERSION


@_as_module
class memory:
    """CuPy's module `cupy.cuda.memory`, as far as programs use it."""

    MemoryPointer, MemoryPool, OutOfMemoryError = MemoryPointer, MemoryPool, MemoryError
    alloc, malloc_managed = staticmethod(alloc), staticmethod(alloc)
    set_allocator, get_allocator = staticmethod(set_allocator), staticmethod(get_allocator)


@_as_module
class pinned_memory:
    """CuPy's module `cupy.cuda.pinned_memory`, as far as programs use it."""

    PinnedMemoryPool, PinnedMemoryPointer = PinnedMemoryPool, PinnedMemoryPointer
    alloc_pinned_memory = staticmethod(alloc_pinned_memory)


class Event:
    """A point in time. Launches on the CPU have ended when they return, so recording reads a clock."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    @property
    def done(self) -> bool:
        """True: nothing is ever pending."""
        return True


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two recorded events.

    Raises:
        ValueError: one of them was never recorded.
    """
    if start_event._time is None or end_event._time is None:
        raise ValueError("both events must be recorded before the time between them is known")
    return (end_event._time - start_event._time) * 1e3


class Stream:
    """The only stream, under each of CuPy's names: a launch has ended when it returns."""

    null: Stream
    ptr = 0

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        pass

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def use(self) -> Stream:
        """Return the stream: it is the only one, so it is always current."""
        return self

    def record(self, event: Event | None = None) -> Event:
        """Record a point in time."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        """Do nothing: there is nothing to wait for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Stream.null = Stream()


class ExternalStream(Stream):
    """The only stream, by another library's handle."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()


def get_current_stream() -> Stream:
    """Return the only stream."""
    return Stream.null


@_as_module
class stream:
    """`cp.cuda.stream`."""

    Event, Stream = Event, Stream
    get_elapsed_time = staticmethod(get_elapsed_time)
    get_current_stream = staticmethod(get_current_stream)


class Device:
    """The CPU as a device."""

    def __init__(self, device: Any = None) -> None:
        if device is not None and int(device) != 0:
            raise ValueError(f"the CPU engine is one device, number 0; got {device}")
        self.id = 0

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    def __hash__(self) -> int:
        return hash(Device)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> Device:
        """Return the device: it is the only one, so it is always current."""
        return self

    @property
    def attributes(self) -> dict[str, int]:
        """CUDA's attributes of the device by CuPy's names, those with a meaning for the engine."""
        properties = runtime.getDeviceProperties()
        return {
            "ComputeCapabilityMajor": properties["major"],
            "ComputeCapabilityMinor": properties["minor"],
            "CooperativeLaunch": 1,
            "MaxRegistersPerBlock": properties["regsPerBlock"],
            "MaxRegistersPerMultiprocessor": properties["regsPerMultiprocessor"],
            "MaxSharedMemoryPerBlock": properties["sharedMemPerBlock"],
            "MaxSharedMemoryPerBlockOptin": properties["sharedMemPerBlockOptin"],
            "MaxSharedMemoryPerMultiprocessor": properties["sharedMemPerMultiprocessor"],
            "MaxThreadsPerBlock": properties["maxThreadsPerBlock"],
            "MaxThreadsPerMultiProcessor": properties["maxThreadsPerMultiProcessor"],
            "MultiProcessorCount": properties["multiProcessorCount"],
            "WarpSize": properties["warpSize"],
            **{f"MaxBlockDim{axis}": size for axis, size in zip("XYZ", properties["maxThreadsDim"], strict=True)},
            **{f"MaxGridDim{axis}": size for axis, size in zip("XYZ", properties["maxGridSize"], strict=True)},
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        """`runtime.memGetInfo()`."""
        return runtime.memGetInfo()

    def synchronize(self) -> None:
        """Do nothing: launches have ended when they return."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        """The limits are those of a GPU of compute capability 9.0."""
        return "90"


ndarray.device = property(lambda _: Device())


@_as_module
class device:
    """`cp.cuda.device`."""

    Device, get_device_id = Device, staticmethod(get_device_id)

    @staticmethod
    def get_compute_capability() -> str:
        """Return the compute capability whose limits the engine applies: 9.0."""
        return Device().compute_capability


@_as_module
class runtime:
    """`cp.cuda.runtime`: the calls that ask about the device."""

    is_hip = False
    CUDARuntimeError = failures.LaunchError

    @staticmethod
    def runtimeGetVersion() -> int:
        """Return the version of CUDA."""
        return VERSION

    driverGetVersion = runtimeGetVersion

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        """Return the free and the total bytes of the machine's memory."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _arrays.installed_bytes()

    @staticmethod
    def setDevice(device: int) -> None:
        """Accept the only device."""
        Device(device)

    @staticmethod
    def streamSynchronize(stream: int) -> None:
        """Do nothing: there is nothing to wait for."""

    @staticmethod
    def profilerStart() -> None:
        """Record nothing."""

    profilerStop = profilerStart

    @staticmethod
    def getDeviceCount() -> int:
        """Return the number of devices, 1."""
        return 1

    @staticmethod
    def deviceSynchronize() -> None:
        """Do nothing: there is nothing to wait for."""

    @staticmethod
    def getDevice() -> int:
        """Return the number of the current device: there is one."""
        return 0

    @staticmethod
    def getDeviceProperties(device: int = 0) -> dict[str, Any]:
        """Return the limits of a launch under CUDA's names; sizes in bytes.

        They are the same on every machine: launches choose their tiles by them, and tiles determine the order of
        additions and so the last bits of a result. They are those of compute capability 9.0, except for two
        multiprocessors, which a few blocks fill: so a test of usual size runs with a stage's own tiles.
        """
        return {
            "name": f"CPU engine ({platform.machine()})".encode(),
            "major": 9,
            "minor": 0,
            "warpSize": 32,
            "multiProcessorCount": MULTIPROCESSORS,
            "maxThreadsPerBlock": limits.MAX_THREADS_PER_BLOCK,
            "maxThreadsDim": limits.MAX_BLOCK,
            "maxGridSize": limits.MAX_GRID,
            "sharedMemPerBlock": limits.SHARED_PER_BLOCK,
            "sharedMemPerBlockOptin": limits.SHARED_PER_BLOCK_OPTIN,
            "sharedMemPerMultiprocessor": limits.SHARED_PER_MULTIPROCESSOR,
            "maxThreadsPerMultiProcessor": limits.THREADS,
            "regsPerBlock": limits.REGISTERS,
            "regsPerMultiprocessor": limits.REGISTERS,
        }


def describe() -> str:
    """Describe in one line how many threads run the blocks, and which compiler made the kernels."""
    return f"CPU engine, {_engine.n_workers()} threads, kernels compiled by {_compiler.compiler()[1]}"
