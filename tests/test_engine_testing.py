"""`cupy.testing` of the engine, and CuPy's names besides kernels: each works, or is refused with its name."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from helpers import engine as cp
from helpers.engine import cupyx


@pytest.fixture
def in_cupys_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupyx", "cupy_backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", cp)
    yield
    for name in [name for name in sys.modules if name.startswith(("cupy.", "cupyx"))]:
        del sys.modules[name]


def test_comparisons_take_arrays_of_either_side() -> None:
    x, host = cp.arange(3), np.arange(3)
    cp.testing.assert_array_equal(x, host)
    cp.testing.assert_allclose(x * (1 + 1e-9), host)
    cp.testing.assert_array_less(x, x + 1)
    cp.testing.assert_array_list_equal([x, x], [host, host])
    with pytest.raises(AssertionError, match="Mismatched elements: 3 / 3"):
        cp.testing.assert_array_equal(x, host + 1)
    with pytest.raises(AssertionError, match="1 arrays, and 2"):
        cp.testing.assert_array_list_equal([x], [x, x])


def test_inputs() -> None:
    assert cp.testing.shaped_arange((2, 2), dtype=np.int8).tolist() == [[1, 2], [3, 4]]
    assert cp.testing.shaped_arange((3,), np, bool).tolist() == [True, False, True]
    for kind in (np.float16, np.int32, bool, np.complex64):
        ours, theirs = cp.testing.shaped_random((4, 3), cp, kind), cp.testing.shaped_random((4, 3), np, kind)
        assert type(ours) is cp.ndarray and type(theirs) is np.ndarray and ours.dtype == kind
        cp.testing.assert_array_equal(ours, theirs)


def test_a_test_for_each_dtype() -> None:
    seen: list[Any] = []

    @cp.testing.for_all_dtypes(no_bool=True, no_complex=True)
    @cp.testing.for_float_dtypes(name="other", no_float16=True)
    def test(here: int, dtype: Any, other: Any) -> None:
        seen.append((here, dtype, other))

    assert list(inspect.signature(test).parameters) == ["here"]  # pytest looks for fixtures with these names
    test(here=5)
    assert len(seen) == 11 * 2 and seen[0] == (5, np.float16, np.float32)
    with pytest.raises(ZeroDivisionError):
        cp.testing.for_int_dtypes()(lambda dtype: 1 // 0)()


def test_numpy_and_the_engine_compared() -> None:
    @cp.testing.for_dtypes([np.float32, np.float64])
    @cp.testing.numpy_cupy_allclose(rtol=1e-6)
    def sums(xp: Any, dtype: Any) -> Any:
        return xp.sum(cp.testing.shaped_arange((3, 4), xp, dtype), axis=0)

    sums()

    @cp.testing.numpy_cupy_array_equal()
    def differs(xp: Any) -> Any:
        return xp.ones(3) * (2 if xp is np else 1)

    with pytest.raises(AssertionError, match="Arrays are not equal"):
        differs()
    cp.testing.numpy_cupy_equal()(lambda xp: xp.ones(3).shape)()
    with pytest.raises(TypeError, match="numpy_cupy_allclose has no tolerance"):
        cp.testing.numpy_cupy_allclose(tolerance=1)


def test_small_things() -> None:
    calls = []

    @cp.memoize(for_each_device=True)
    def once(x: int) -> int:
        calls.append(x)
        return 2 * x

    assert once(3) == once(3) == 6 and calls == [3]
    cp.clear_memo()
    a = cp.zeros(3)
    cupyx.scatter_add(a, cp.asarray([0, 0, 2]), 1.0)
    cupyx.scatter_max(a, 1, 5.0)
    cupyx.scatter_min(a, 0, -1.0)
    assert a.tolist() == [-1, 5, 1]
    with cp.cuda.ExternalStream(0) as stream:
        stream.synchronize()
    assert "CPU engine" in cupyx.get_runtime_info()


def test_it_is_available_where_it_is_in_cupys_place(in_cupys_place: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cp.is_available() and cp.cuda.is_available()
    monkeypatch.delitem(sys.modules, "cupy")
    assert not cp.is_available()


REFUSED: dict[str, Callable[[], Any]] = {
    "cp.testing has no 'parameterize'": lambda: cp.testing.parameterize,
    "cp.cuda has no 'MemoryAsyncPool'": lambda: cp.cuda.MemoryAsyncPool,
    "cp.cuda has no 'nccl'": lambda: cp.cuda.nccl,
    "cp.cuda has no 'Graph'": lambda: cp.cuda.Graph,
    "cp.cuda.runtime has no 'memcpy'": lambda: cp.cuda.runtime.memcpy,
    "cupyx has no 'jit'": lambda: cupyx.jit,
    "CPU engine has no 'scatter_add'": lambda: cp.scatter_add,
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_missing_is_refused_by_its_name(says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        REFUSED[says]()


@pytest.mark.parametrize("name", ["cupyx.scipy.ndimage", "cupyx.jit", "cupy._core", "cupy.cuda.nccl"])
def test_a_module_that_is_missing(name: str, in_cupys_place: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="replaces CuPy here, has only what kernels need"):
        importlib.import_module(name)


def test_modules_by_cupys_names(in_cupys_place: None) -> None:
    assert importlib.import_module("cupy.testing") is cp.testing
    assert importlib.import_module("cupyx.profiler") is cupyx.profiler
