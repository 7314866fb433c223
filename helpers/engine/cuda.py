"""`cp.cuda` of the CPU engine: events, the device and its properties, as far as the course uses them."""

from __future__ import annotations

import platform
import time
from typing import Any

from . import array, failures, limits
from . import compiler as _compiler
from . import runtime as _engine
from .array import MemoryPointer

MULTIPROCESSORS = 2  # see getDeviceProperties


def is_available() -> bool:
    """False: there is no GPU."""
    return False


def alloc(size: int) -> MemoryPointer:
    """Device memory of so many bytes, as `cupy.cuda.alloc`: poisoned, and given back with the last pointer to it."""
    return MemoryPointer(array.empty(size, "uint8"))


class compiler:
    """`cp.cuda.compiler`: the exception of a source that does not compile."""

    CompileException = _compiler.CompileError


class driver:
    """`cp.cuda.driver`: the exception of a launch, or of a name that a module does not have."""

    CUDADriverError = failures.LaunchError


class memory:
    """`cp.cuda.memory`."""

    MemoryPointer = MemoryPointer
    alloc = staticmethod(alloc)


class Event:
    """A point in time. Launches on the CPU have ended when they return, so recording is reading a clock."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the present time."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @property
    def done(self) -> bool:
        """True: nothing is ever under way."""
        return True


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two recorded events.

    Raises:
        ValueError: one of them was never recorded.
    """
    if start_event._time is None or end_event._time is None:
        raise ValueError("both events must be recorded before the time between them is known")
    return (end_event._time - start_event._time) * 1e3


class Stream:
    """The only stream, by whatever name: a launch has ended when it returns."""

    null: Stream
    ptr = 0

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def use(self) -> Stream:
        """It is the current one already."""
        return self

    def record(self, event: Event | None = None) -> Event:
        """A point in time."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Stream.null = Stream()


def get_current_stream() -> Stream:
    """The only stream."""
    return Stream.null


class Device:
    """The CPU as a device."""

    def __init__(self, device: int | None = None) -> None:
        if device not in (None, 0):
            raise ValueError(f"the CPU engine is one device, number 0; got {device}")
        self.id = 0

    def synchronize(self) -> None:
        """Nothing to wait for: launches have ended when they return."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        """The limits are those of a GPU of compute capability 9.0."""
        return "90"


class runtime:
    """`cp.cuda.runtime`: the calls that ask about the device."""

    @staticmethod
    def getDeviceCount() -> int:
        """One device."""
        return 1

    @staticmethod
    def deviceSynchronize() -> None:
        """Nothing to wait for."""

    @staticmethod
    def getDevice() -> int:
        """The number of the current device: there is one."""
        return 0

    @staticmethod
    def getDeviceProperties(device: int = 0) -> dict[str, Any]:
        """CUDA's names for what a launch may ask for; sizes in bytes.

        The same on every machine, whatever its cores: a launch sizes its tiles by them, and tiles decide the order in
        which sums are made, so the last bits of a result. The limits are those of compute capability 9.0. Two
        multiprocessors, because few blocks are what fills them: a test of usual size takes a stage's own tiles.
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
    """One line: how many threads run the blocks, and which compiler made the kernels."""
    return f"CPU engine, {_engine.n_workers()} threads, kernels compiled by {_compiler.compiler()[1]}"
