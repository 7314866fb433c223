"""A CPU engine for CUDA C++ kernels, with the part of CuPy's interface that programs around kernels use.

    from rawkernel import RawModule, asarray, empty_like  # installed; in the course: from helpers.engine

It compiles a kernel's unchanged source with a host compiler and runs each CUDA thread as a fiber, with blocks spread
over the cores. It contains nothing about attention. It is a part of the course but imports nothing from it, and can be
installed alone: then environment variables begin with `RAWKERNEL_` instead of `COURSE_`.

It models these parts of a GPU's hardware: warp-wide operations; tensor cores (`<mma.h>`; mma.sync, ldmatrix and
stmatrix as inline PTX), whose products are those of compute capability 9.0 bit for bit; asynchronous copies (cp.async,
`<cuda_pipeline.h>`, TMA with the maps of `tensor_map`), which complete at their wait, as late as possible; products of
warpgroups (wgmma); clusters of blocks; and the other instructions of inline PTX that `ptx.known()` lists. Unknown ones
stop the thread that reaches them; the error has their line and the most similar instruction. README.md in this folder
lists what works, what differs from a GPU and what is refused.

Blocks may wait for each other, in grid.sync() of a cooperative launch or by looking at memory again and again: as many
as an H200 holds at once, if the engine has stacks for their threads (limits.py). A block that is still running after
20 s, or after the seconds in `COURSE_CPU_TIMEOUT`, is taken to be in an endless loop. `COURSE_CPU_OPTIMISATION=1`
compiles a quarter faster, for kernels that run once.
"""

from __future__ import annotations

import functools as _functools
import importlib as _importlib
import sys as _sys
from typing import Any

import numpy as _np

from . import checked as _checked
from . import cuda
from . import from_numpy as _from_numpy
from . import in_place_of_cupy as _in_place_of_cupy
from .array import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asfortranarray,
    asnumpy,
    bfloat16,
    copy,
    empty,
    empty_like,
    from_dlpack,
    full,
    full_like,
    ndarray,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from .compiler import CompileError, NoCompilerError
from .cuda import get_default_memory_pool, get_default_pinned_memory_pool, is_available
from .elementwise import ElementwiseKernel, ReductionKernel
from .failures import LaunchError
from .module import RawKernel, RawModule

__version__ = "14.2.0"  # CuPy's version whose interface this is

float16, float32, float64 = _np.float16, _np.float32, _np.float64
int8, int16, int32, int64 = _np.int8, _np.int16, _np.int32, _np.int64
uint8, uint16, uint32, uint64 = _np.uint8, _np.uint16, _np.uint32, _np.uint64
complex64, complex128 = _np.complex64, _np.complex128
bool_ = _np.bool_
dtype = _np.dtype
inf, nan, pi = float("inf"), float("nan"), _np.pi

__all__ = [
    "CompileError",
    "ElementwiseKernel",
    "LaunchError",
    "NoCompilerError",
    "RawKernel",
    "RawModule",
    "ReductionKernel",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asfortranarray",
    "asnumpy",
    "bfloat16",
    "clear_memo",
    "copy",
    "cuda",
    "empty",
    "empty_like",
    "from_dlpack",
    "full",
    "full_like",
    "fuse",
    "get_array_module",
    "get_default_memory_pool",
    "get_default_pinned_memory_pool",
    "is_available",
    "memoize",
    "ndarray",
    "ones",
    "ones_like",
    "show_config",
    "zeros",
    "zeros_like",
]


def get_array_module(*args: Any) -> Any:
    """Return the engine if one of the arguments is a device array; otherwise NumPy."""
    return _sys.modules[__name__] if any(isinstance(a, ndarray) for a in args) else _np


def fuse(*args: Any, **options: Any) -> Any:
    """Return the function unchanged, for `@fuse` or `@fuse()`: its operations run one after the other."""
    return args[0] if args and callable(args[0]) else lambda function: function


_in_place_of_cupy.answer()
RawKernel.explain_overrun = _checked.first_write_past_an_end


def memoize(for_each_device: bool = False) -> Any:
    """Keep a function's results by its arguments, which have to be hashable."""
    return _functools.cache


def clear_memo() -> None:
    """Do nothing: results kept by `memoize` stay valid."""


def show_config(**_: Any) -> None:
    """Print what runs the kernels, and which interface it has."""
    print(f"CPU engine with the interface of CuPy {__version__}: {cuda.describe()}")


def __getattr__(name: str) -> Any:
    if name == "testing":  # imported on request: it needs pytest
        return _importlib.import_module(f"{__name__}.testing")
    if not name.startswith("_") and hasattr(_np, name):
        return _from_numpy.of(getattr(_np, name))
    raise AttributeError(
        f"the CPU engine has no {name!r}: it has the part of CuPy that kernels need ({', '.join(__all__)}, the dtypes) "
        "and NumPy's functions. Use NumPy on cp.asnumpy(...) for the rest, or run on a GPU."
    )
