"""`cupy.testing` for the CPU engine: inputs, loops over dtypes, and comparisons, also of NumPy with the engine."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from . import settings
from .array import asnumpy, ndarray

_FLOATS = (np.float16, np.float32, np.float64)
_SIGNED, _UNSIGNED = (np.int8, np.int16, np.int32, np.int64), (np.uint8, np.uint16, np.uint32, np.uint64)
_COMPLEX = (np.complex64, np.complex128)
_COMPARISONS = (
    *("assert_allclose", "assert_array_almost_equal", "assert_array_almost_equal_nulp", "assert_array_equal"),
    *("assert_array_less", "assert_array_max_ulp"),
)


def _on_host(value: Any) -> Any:
    return asnumpy(value) if isinstance(value, ndarray) else value


def _comparison(name: str) -> Callable[..., None]:
    theirs = getattr(np.testing, name)

    @functools.wraps(theirs)
    def compare(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        theirs(*map(_on_host, args), **options)

    return compare


def __getattr__(name: str) -> Any:
    if name in _COMPARISONS:
        return _comparison(name)
    raise AttributeError(
        f"the CPU engine's cp.testing has no {name!r}: it has {', '.join(_COMPARISONS)}, shaped_arange, shaped_random, "
        "the for_..._dtypes and the numpy_cupy_... decorators, and multi_gpu. pytest.mark.parametrize does the rest"
    )


def assert_array_list_equal(xs: Sequence[Any], ys: Sequence[Any], err_msg: str = "", verbose: bool = True) -> None:
    """Fail unless two lists have equal arrays."""
    assert len(xs) == len(ys), f"{len(xs)} arrays, and {len(ys)}"
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(_on_host(x), _on_host(y), err_msg, verbose)


def shaped_arange(shape: Sequence[int], xp: Any = None, dtype: Any = np.float32, order: str = "C") -> Any:
    """Return 1, 2, 3, ... in a shape; for bool, whether they are odd."""
    numbers = np.arange(1, int(np.prod(shape)) + 1)
    numbers = numbers % 2 if np.dtype(dtype) == bool else numbers
    return _module(xp).array(numbers.reshape(shape).astype(dtype), order=order)


def shaped_random(
    shape: Sequence[int], xp: Any = None, dtype: Any = np.float32, scale: float = 10, seed: int = 0
) -> Any:
    """Return random numbers from 0 to `scale`, by a seed; complex ones in both parts."""
    rng, kind = np.random.RandomState(seed), np.dtype(dtype)
    if kind.kind == "b":
        numbers = rng.randint(2, size=shape)
    elif kind.kind == "c":
        numbers = rng.random_sample(shape) * scale + 1j * rng.random_sample(shape) * scale
    else:
        numbers = rng.random_sample(shape) * scale
    return _module(xp).asarray(np.asarray(numbers).astype(kind))


def _module(xp: Any) -> Any:
    return sys.modules[settings.PACKAGE] if xp is None else xp


def for_dtypes(dtypes: Sequence[Any], name: str = "dtype") -> Callable[..., Any]:
    """Call a test once for each dtype, passed by that name."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            for dtype in dtypes:
                try:
                    test(*args, **named, **{name: np.dtype(dtype).type})
                except BaseException:
                    print(f"{name} is {np.dtype(dtype).name}")
                    raise

        return _without(test, run, name)

    return decorate


def _without(test: Callable[..., Any], run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give `run` the name and signature of a test, without one parameter that is passed to it."""
    functools.update_wrapper(run, test)
    signature = inspect.signature(test)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def for_float_dtypes(name: str = "dtype", no_float16: bool = False) -> Callable[..., Any]:
    """Call a test for each real floating-point type."""
    return for_dtypes(_FLOATS[no_float16:], name)


def for_signed_dtypes(name: str = "dtype") -> Callable[..., Any]:
    """Call a test for each signed type of integers."""
    return for_dtypes(_SIGNED, name)


def for_unsigned_dtypes(name: str = "dtype") -> Callable[..., Any]:
    """Call a test for each unsigned type of integers."""
    return for_dtypes(_UNSIGNED, name)


def for_int_dtypes(name: str = "dtype", no_bool: bool = False) -> Callable[..., Any]:
    """Call a test for each type of integers, and bool."""
    return for_dtypes((*_SIGNED, *_UNSIGNED, *(() if no_bool else (np.bool_,))), name)


def for_complex_dtypes(name: str = "dtype") -> Callable[..., Any]:
    """Call a test for each complex type."""
    return for_dtypes(_COMPLEX, name)


def for_all_dtypes(
    name: str = "dtype", no_float16: bool = False, no_bool: bool = False, no_complex: bool = False
) -> Callable[..., Any]:
    """Call a test once for each numeric dtype and bool, except those that the flags exclude."""
    kinds = (*_FLOATS[no_float16:], *_SIGNED, *_UNSIGNED)
    return for_dtypes((*kinds, *(() if no_bool else (np.bool_,)), *(() if no_complex else _COMPLEX)), name)


def _of_both(compare: Callable[[Any, Any], None], name: str, type_check: bool) -> Callable[..., Any]:
    """Call a test with NumPy and with the engine as the parameter `name`, and compare the results."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            ours = test(*args, **named, **{name: _module(None)})
            theirs = test(*args, **named, **{name: np})
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, (tuple, list)) else [(ours, theirs)]
            for one, other in pairs:
                compare(_on_host(one), other)
                assert not type_check or np.asarray(one).dtype == np.asarray(other).dtype, (one.dtype, other.dtype)

        return _without(test, run, name)

    return decorate


def numpy_cupy_allclose(
    rtol: float = 1e-7, atol: float = 0, err_msg: str = "", verbose: bool = True, name: str = "xp",
    type_check: bool = True, **more: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Fail unless a test returns nearly the same with NumPy and with the engine."""
    if unknown := set(more) - {"accept_error", "sp_name", "scipy_name", "contiguous_check"}:
        raise TypeError(f"numpy_cupy_allclose has no {', '.join(sorted(unknown))}")
    return _of_both(
        lambda x, y: np.testing.assert_allclose(x, y, rtol, atol, err_msg=err_msg, verbose=verbose), name, type_check
    )


def numpy_cupy_array_equal(
    err_msg: str = "", verbose: bool = True, name: str = "xp", type_check: bool = True, **more: Any
) -> Callable[..., Any]:
    """Fail unless a test returns the same with NumPy and with the engine."""
    if unknown := set(more) - {"accept_error", "sp_name", "scipy_name", "strides_check"}:
        raise TypeError(f"numpy_cupy_array_equal has no {', '.join(sorted(unknown))}")
    return _of_both(lambda x, y: np.testing.assert_array_equal(x, y, err_msg, verbose), name, type_check)


def numpy_cupy_equal(name: str = "xp", **_: Any) -> Callable[..., Any]:
    """Fail unless a test returns an equal object with NumPy and with the engine."""

    def compare(x: Any, y: Any) -> None:
        assert x == y, f"{x} with the engine, {y} with NumPy"

    return _of_both(compare, name, False)


def multi_gpu(gpu_num: int) -> Callable[..., Any]:
    """Skip a test that needs several GPUs: the engine is one device."""
    return pytest.mark.skipif(gpu_num > 1, reason=f"{gpu_num} GPUs required")
