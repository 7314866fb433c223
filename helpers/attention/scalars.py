"""Numbers, flags and pairs of a call, checked: an error names the argument."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    """Convert to Python's int, also from NumPy's. Raises TypeError for others, ValueError if it is below `least`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number; got {type(value).__name__} {value!r:.40}")
    if least is not None and value < least:
        raise ValueError(f"{name} = {value}; {least} or more is needed")
    return int(value)


def finite_number(name: str, value: Any) -> float:
    """Convert to Python's float. Raises TypeError if it is not a number, ValueError if it is infinite or NaN."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number; got {type(value).__name__} {value!r:.40}")
    if not math.isfinite(value):
        raise ValueError(f"{name} = {value}; a finite number is needed")
    return float(value)


def check_flags(**flags: Any) -> None:
    """Raise TypeError unless each is True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False; got {type(flag).__name__} {flag!r:.40}")


def check_pair(name: str, pair: Any, form: str) -> None:
    """Raise TypeError unless it is a tuple or a list of two. form: what it is a pair of, for the message."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} of them" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise TypeError(f"{name} must be a pair {form}, or None; got {got}")
