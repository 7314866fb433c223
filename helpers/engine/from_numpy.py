"""The rest of CuPy's names: NumPy's functions, on device arrays.

    cp.where(x > 0, x, 0)    # a NumPy function that the engine does not define itself

Arguments and results are device arrays, as in CuPy. The values are NumPy's, bit for bit.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from .array import array, ndarray


def of(value: Any) -> Any:
    """Wrap a NumPy function or module so that it works on device arrays; return types and constants unchanged."""
    if isinstance(value, type):
        return value
    return FromNumPy(value) if callable(value) or isinstance(value, types.ModuleType) else value


class FromNumPy:
    """A function, a module or an object of NumPy's, such as a random number generator."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.__doc__ = theirs.__doc__

    def __getattr__(self, name: str) -> Any:
        return of(getattr(self._theirs, name))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function. A NumPy array is a TypeError, as in CuPy, except in cupy.testing."""
        is_test = str(getattr(self._theirs, "__module__", "")).startswith("numpy.testing")
        for value in () if is_test else (*args, *named.values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, np.ndarray) and not isinstance(one, ndarray):
                    raise TypeError(
                        f"{self._theirs.__name__} got a NumPy array: expected device arrays; cp.asarray(...)"
                    )
        return _on_device(self._theirs(*args, **named))


def _on_device(result: Any) -> Any:
    if isinstance(result, ndarray):
        return result
    if isinstance(result, (np.ndarray, np.generic)):
        return array(result, order="C")  # like CuPy's functions, even if NumPy keeps another order
    if isinstance(result, (tuple, list)):
        return type(result)(map(_on_device, result)) if type(result) in (tuple, list) else result
    return FromNumPy(result) if type(result).__module__.startswith("numpy.random") else result
