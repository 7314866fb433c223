"""What this device has of shared memory and multiprocessors: tile sizes are chosen by it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from helpers import device


@functools.cache
def _properties(cp: Any, number: int) -> Mapping[str, Any]:
    """What a device says of itself. Asking a GPU takes a millisecond, so each is asked once."""
    return cp.cuda.runtime.getDeviceProperties(number)


def most_shared() -> int:
    """Bytes of shared memory that a block may opt in to."""
    return _properties(device.cp, device.cp.cuda.Device().id)["sharedMemPerBlockOptin"]


def multiprocessors() -> int:
    """How many multiprocessors this device has."""
    return _properties(device.cp, device.cp.cuda.Device().id)["multiProcessorCount"]


def compute_capability() -> int:
    """90 for 9.0."""
    return int(device.cp.cuda.Device().compute_capability)
