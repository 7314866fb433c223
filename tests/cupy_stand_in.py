"""A module for `import cupy` where there is no GPU: the CPU engine, which calls the bits of bfloat16 by their type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from helpers import engine
from helpers.engine import *  # noqa: F403

cuda = engine.cuda
float16, float32, int32, uint16 = engine.float16, engine.float32, engine.int32, engine.uint16


class RawModule(engine.RawModule):
    """The engine's, whose functions take uint16 where a kernel reads bfloat16: as on a GPU, only the bits count."""

    def get_function(self, name: str) -> Any:
        return _Kernel(super().get_function(name))


class _Kernel:
    def __init__(self, function: Any) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        self._function(grid, block, tuple(map(_bits, args)), shared_mem=shared_mem)


def _bits(arg: Any) -> Any:
    is_bits = isinstance(arg, engine.ndarray) and arg.dtype == np.uint16
    return arg.view(ml_dtypes.bfloat16) if is_bits else arg
