"""Where the tests of CUDA's features run: on the CPU engine, on a machine with a GPU too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from helpers import cpu

BACKENDS = [pytest.param(cpu, id="cpu")]

on_each_device = pytest.mark.parametrize("cp", BACKENDS)


@functools.lru_cache
def compiled(cp: Any, code: str, names: tuple[str, ...] = (), options: tuple[str, ...] = ("-std=c++17",)) -> Any:
    """A module, compiled once for all the tests that share its source."""
    return cp.RawModule(code=code, options=options, name_expressions=names or None)


def in_place_of_bind(launch: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """For monkeypatch: a `Kernel.bind` whose launch calls `launch(kernel, grid, block, args, shared_mem=...)`."""
    return lambda *args, **options: lambda: launch(*args, **options)
