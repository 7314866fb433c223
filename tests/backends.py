"""Where the tests of CUDA's features run: on the CPU engine always, and on a GPU too where there is one.

On a GPU the same tests judge the tests: what they expect of the engine is what the GPU does.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers import cpu, device

BACKENDS = [pytest.param(cpu, id="cpu")]
if device.ON_GPU:
    BACKENDS.append(pytest.param(device.cp, id="gpu"))

on_each_device = pytest.mark.parametrize("cp", BACKENDS)


@functools.lru_cache
def compiled(cp: Any, code: str, names: tuple[str, ...] = (), options: tuple[str, ...] = ("-std=c++17",)) -> Any:
    """A module, compiled once for all the tests that share its source."""
    return cp.RawModule(code=code, options=options, name_expressions=names or None)
