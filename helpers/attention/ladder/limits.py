"""What this device has of shared memory and multiprocessors: tile sizes are chosen by it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from helpers import device


class Limits(NamedTuple):
    """Of a GPU. shared: bytes of shared memory that a block may opt in to. compute_capability: 90 for 9.0."""

    shared: int
    multiprocessors: int
    compute_capability: int


_INSTEAD: list[Limits] = []


@contextlib.contextmanager
def of_another(limits: Limits) -> Iterator[None]:
    """A context in which stages are planned for another GPU. Nothing can be launched by what is planned there."""
    _INSTEAD.append(limits)
    try:
        yield
    finally:
        _INSTEAD.pop()


_LEFT: ContextVar[int] = ContextVar("_LEFT", default=0)


@contextlib.contextmanager
def leave(multiprocessors: int) -> Iterator[None]:
    """A context in which persistent grids, those of 10, leave so many multiprocessors to other kernels.

    Such a grid has a block for each multiprocessor, for as long as the launch takes, and NCCL copies by blocks of its
    own. Tiles stay as they are, and so do the results.
    """
    before = _LEFT.set(multiprocessors)
    try:
        yield
    finally:
        _LEFT.reset(before)


def left() -> int:
    """How many multiprocessors persistent grids leave, in the context where this is called."""
    return _LEFT.get()


@functools.cache
def _properties_of(cp: Any, number: int) -> Mapping[str, Any]:
    """What a device says of itself. Asking a GPU takes a millisecond, so each is asked once."""
    return cp.cuda.runtime.getDeviceProperties(number)


def _properties() -> Mapping[str, Any]:
    """Of the current device."""
    return _properties_of(device.cp, device.cp.cuda.runtime.getDevice())


def most_shared() -> int:
    """Bytes of shared memory that a block may opt in to."""
    if _INSTEAD:
        return _INSTEAD[-1].shared
    return _properties()["sharedMemPerBlockOptin"]


def multiprocessors() -> int:
    """How many multiprocessors this device has."""
    if _INSTEAD:
        return _INSTEAD[-1].multiprocessors
    return _properties()["multiProcessorCount"]


def for_persistent() -> int:
    """How many multiprocessors a persistent grid takes: one at least."""
    return max(multiprocessors() - left(), 1) if left() else multiprocessors()


def compute_capability() -> int:
    """90 for 9.0."""
    if _INSTEAD:
        return _INSTEAD[-1].compute_capability
    return int(device.cp.cuda.Device().compute_capability)
