"""`cupyx` of the CPU engine: timing, marks, and memory for copies to a GPU."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import cuda
from .array import array, ndarray

__path__: list[str] = []  # a package to `import cupyx.profiler`; there are no files


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"the CPU engine's cupyx has no {name!r}: it has profiler, rsqrt, scatter_add and the like, pinned memory. "
        "Use NumPy or SciPy on cp.asnumpy(...) for the rest, or run on a GPU."
    )


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """Allocate a NumPy array: here all host memory is the same."""
    return np.empty(shape, dtype, order)  # type: ignore[call-overload]


def zeros_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """Allocate a NumPy array of zeros: here all host memory is the same."""
    return np.zeros(shape, dtype, order)  # type: ignore[call-overload]


def empty_like_pinned(a: Any, dtype: Any = None) -> np.ndarray:
    """Call `empty_pinned` with the shape and dtype of an array."""
    return np.empty(a.shape, a.dtype if dtype is None else dtype)


def zeros_like_pinned(a: Any, dtype: Any = None) -> np.ndarray:
    """Call `zeros_pinned` with the shape and dtype of an array."""
    return np.zeros(a.shape, a.dtype if dtype is None else dtype)


def rsqrt(x: Any) -> ndarray:
    """Compute 1 / sqrt(x), element by element."""
    return array(1 / np.sqrt(x))


def scatter_add(a: ndarray, slices: Any, value: Any) -> None:
    """Add to elements of an array, once for each occurrence of an index."""
    np.add.at(a, slices, value)


def scatter_max(a: ndarray, slices: Any, value: Any) -> None:
    """Replace elements of an array by larger ones."""
    np.maximum.at(a, slices, value)


def scatter_min(a: ndarray, slices: Any, value: Any) -> None:
    """Replace elements of an array by smaller ones."""
    np.minimum.at(a, slices, value)


def get_runtime_info(*, full: bool = False) -> str:
    """Describe what runs the kernels."""
    return cuda.describe()


class _Times:
    """The result of `benchmark`, in seconds. gpu_times has a row for the one device."""

    def __init__(self, name: str, cpu: list[float], gpu: list[float]) -> None:
        self.name, self.cpu_times, self.gpu_times = name, np.array(cpu), np.array([gpu])

    def to_str(self, show_gpu: bool = False) -> str:
        """Format a line as CuPy prints it."""
        rows = [("CPU", self.cpu_times), *([("GPU-0", self.gpu_times[0])] if show_gpu else [])]
        texts = []
        for what, seconds in rows:
            us = seconds * 1e6
            spread = f"   +/- {us.std():6.03f} (min: {us.min():9.03f} / max: {us.max():9.03f}) us" * (us.size > 1)
            texts.append(f"    {what}: {us.mean():9.03f} us{spread}")
        return f"{self.name:<20s}:{' '.join(texts)}"

    def __str__(self) -> str:
        return self.to_str(show_gpu=True)

    __repr__ = __str__


@cuda._as_module
class profiler:
    """`cupyx.profiler`."""

    @staticmethod
    def benchmark(
        func: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        n_repeat: int = 10000,
        *,
        name: str | None = None,
        n_warmup: int = 10,
        max_duration: float = math.inf,
        devices: Any = None,
    ) -> _Times:
        """Time a function by the clock and by events, which are the same clock here.

        Args:
            max_duration: seconds after which no further call is begun.
        """
        named = dict(kwargs or {})
        for _ in range(n_warmup):
            func(*args, **named)
        cpu, gpu, begun = [], [], time.perf_counter()
        for _ in range(n_repeat):
            first, last = cuda.Event(), cuda.Event()
            first.record()
            start = time.perf_counter()
            func(*args, **named)
            cpu.append(time.perf_counter() - start)
            last.record()
            gpu.append(cuda.get_elapsed_time(first, last) * 1e-3)
            if time.perf_counter() - begun > max_duration:
                break
        return _Times(name or func.__name__, cpu, gpu)

    class time_range(contextlib.ContextDecorator):
        """A mark that is discarded, as a context manager and as a decorator."""

        def __init__(
            self, message: str | None = None, color_id: Any = None, argb_color: Any = None, sync: bool = False
        ) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    profile = staticmethod(cuda.profile)
