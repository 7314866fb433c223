"""This device's shared memory and multiprocessors, which tile sizes are chosen by."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from helpers import device


class Limits(NamedTuple):
    """A GPU's limits. shared: bytes of shared memory that a block may opt in to. compute_capability: 90 for 9.0."""

    shared: int
    multiprocessors: int
    compute_capability: int


_OVERRIDE: list[Limits] = []


@contextlib.contextmanager
def pretend_gpu(limits: Limits) -> Iterator[None]:
    """Plan stages for another GPU in this context. Such plans cannot be launched."""
    _OVERRIDE.append(limits)
    try:
        yield
    finally:
        _OVERRIDE.pop()


_RESERVED: ContextVar[int] = ContextVar("_RESERVED", default=0)


@contextlib.contextmanager
def reserve_sms(multiprocessors: int) -> Iterator[None]:
    """Leave this many multiprocessors to other kernels in this context, if grids are persistent, like those of hopper.

    Such a grid has a block on each multiprocessor during the whole launch, and NCCL's copies need blocks of their own.
    Tiles do not change, nor do the results.
    """
    before = _RESERVED.set(multiprocessors)
    try:
        yield
    finally:
        _RESERVED.reset(before)


def reserved_sms() -> int:
    """Return how many multiprocessors persistent grids leave free in the current context."""
    return _RESERVED.get()


@functools.cache
def _properties_of(cp: Any, number: int) -> Mapping[str, Any]:
    """Return a device's properties. Querying a GPU takes a millisecond, so each is queried once."""
    return cp.cuda.runtime.getDeviceProperties(number)


def _properties() -> Mapping[str, Any]:
    return _properties_of(device.cp, device.cp.cuda.runtime.getDevice())


def most_shared() -> int:
    """Return the bytes of shared memory that a block may opt in to."""
    if _OVERRIDE:
        return _OVERRIDE[-1].shared
    return _properties()["sharedMemPerBlockOptin"]


def multiprocessors() -> int:
    """Return how many multiprocessors this device has."""
    if _OVERRIDE:
        return _OVERRIDE[-1].multiprocessors
    return _properties()["multiProcessorCount"]


def persistent_blocks() -> int:
    """Return how many blocks a persistent grid has: one per multiprocessor that is not reserved, at least one."""
    return max(multiprocessors() - reserved_sms(), 1) if reserved_sms() else multiprocessors()


def compute_capability() -> int:
    """Return this device's compute capability, 90 for 9.0."""
    if _OVERRIDE:
        return _OVERRIDE[-1].compute_capability
    return int(device.cp.cuda.Device().compute_capability)
