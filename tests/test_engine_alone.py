"""The engine and the X-ray without the course: their imports, and CuPy's names besides kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import engine as cp
from helpers.engine.compiler import HERE

ADD = """
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  c[i] = a[i] + b[i];
}"""
# A launch and its X-ray with nothing installed but NumPy and pyelftools.
ALONE = f'''
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ("helpers", "numpy", "elftools", "ziglang") and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Only())
import numpy as np
from helpers import engine as cp
from helpers.engine.xray import xray

add = cp.RawKernel("""{ADD}""", "add")
a, b, c = cp.ones(64, np.float32), cp.ones(64, np.float32), cp.zeros(64, np.float32)
add((2,), (32,), (a, b, c, np.int32(64)))
assert (c == 2).all()
report = xray(add, (3,), (32,), (a, b, c, np.int32(64)))
print(report.findings[0])
print(sorted({{name.split(".")[1] for name in sys.modules if name.startswith("helpers.")}}))
'''


def run_in(folder: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_of_the_folder_runs_alone(tmp_path: Path) -> None:
    shutil.copytree(HERE, tmp_path / "helpers" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    finding, modules = run_in(tmp_path, ALONE).splitlines()
    assert re.search(r"read of a\[64\], which has 64 elements, .* at kernel.cu:4", finding), finding
    assert modules == "['engine']"


def test_in_place_of_cupy(tmp_path: Path) -> None:
    """An unchanged program that imports CuPy works."""
    program = f'''
import cupy
import cupy as cp
from cupy import RawKernel
x = cp.linspace(0, 1, 64, dtype=cp.float32)
RawKernel("""{ADD}""", "add")((1,), (64,), (x, x, y := cp.empty_like(x), cp.int32(64)))
assert cupy.allclose(y, 2 * x) and cupy.get_array_module(y) is cupy
'''
    given = f"import sys\nsys.path.insert(0, {str(HERE.parent.parent)!r})\nfrom helpers import engine\n"
    run_in(tmp_path, f'{given}sys.modules["cupy"] = engine\n{program}')


# ---- the rest of CuPy's names, from NumPy


@pytest.fixture
def x() -> Any:
    return cp.asarray(np.random.default_rng(0).random((3, 4), dtype=np.float32))


RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda m, x: m.where(x > 0.5, x, 0),
    "exp": lambda m, x: m.exp(x),
    "sum": lambda m, x: m.sum(x, axis=0),
    "concatenate": lambda m, x: m.concatenate([x, x]),
    "a module": lambda m, x: m.linalg.norm(x, axis=1),
    "a method of a function": lambda m, x: m.add.reduce(x),
    "several": lambda m, x: m.unique(x > 0.5, return_counts=True)[1],
}


@pytest.mark.parametrize("name", RESULTS)
def test_numpys_functions_give_device_arrays(name: str, x: Any) -> None:
    result = RESULTS[name](cp, x)
    assert type(result) is cp.ndarray
    np.testing.assert_array_equal(cp.asnumpy(result), RESULTS[name](np, cp.asnumpy(x)))


def test_random_numbers_are_device_arrays() -> None:
    cp.random.seed(1)
    drawn = cp.random.rand(3)
    np.random.seed(1)
    assert type(drawn) is cp.ndarray and (cp.asnumpy(drawn) == np.random.rand(3)).all()
    assert type(cp.random.default_rng(0).random(3)) is cp.ndarray


def test_numpy_arrays_are_refused_by_them() -> None:
    with pytest.raises(TypeError, match=r"exp got a NumPy array: .*cp.asarray"):
        cp.exp(np.ones(3))


def test_orders_are_kept_as_cupy_keeps_them() -> None:
    turned = np.arange(6.0).reshape(2, 3).T
    there = cp.asarray(turned)
    made = (
        there,
        cp.array(turned),
        cp.array(there),
        cp.zeros_like(there),
        cp.empty_like(there),
        cp.full_like(there, 1),
    )
    assert all(a.flags.f_contiguous and a.shape == (3, 2) for a in made)
    assert cp.array(turned, order="C").flags.c_contiguous and cp.zeros((2, 3), order="F").flags.f_contiguous
    assert cp.asarray(there) is there and cp.asarray(there, order="C").flags.c_contiguous
    assert cp.ascontiguousarray(there).flags.c_contiguous and cp.array(3.0, ndmin=2).shape == (1, 1)


# ---- ElementwiseKernel and ReductionKernel


def test_each_element(x: Any) -> None:
    squares = cp.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_difference")
    row, host = cp.asarray(np.arange(4, dtype=np.float32)), cp.asnumpy(x)
    np.testing.assert_array_equal(cp.asnumpy(squares(x, row)), (host - np.arange(4, dtype=np.float32)) ** 2)
    np.testing.assert_array_equal(cp.asnumpy(squares(x.T, 2)), (host.T - np.float32(2)) ** 2)
    out = cp.zeros((4, 3), np.float32).T
    assert squares(x, row, out) is out and out[0, 0] == x[0, 0] ** 2


def test_several_outputs_and_lines_around_the_loop(x: Any) -> None:
    both = cp.ElementwiseKernel(
        *("float32 x", "float32 twice, int32 tenths", "twice = x * two; tenths = (int)floorf(10 * x)", "both"),
        loop_prep="const float two = 2",
        preamble="// nothing more\n",
    )
    twice, tenths = both(x)
    assert (twice == 2 * x).all() and tenths.dtype == np.int32 and (tenths == np.floor(10 * cp.asnumpy(x))).all()


def test_raw_arrays(x: Any) -> None:
    reverse = cp.ElementwiseKernel("raw T x", "raw T y", "y[i] = x[x.size() - 1 - i] + (T)_ind.size()", "reverse")
    y = cp.zeros(12, np.float32)
    reverse(x, y, size=12)
    np.testing.assert_array_equal(cp.asnumpy(y), cp.asnumpy(x).ravel()[::-1] + np.float32(12))
    turn = cp.ElementwiseKernel(
        *("raw T x", "T y", "ptrdiff_t at[] = {_ind.get()[1], _ind.get()[0]}; y = x[at] * x.shape()[0]", "turn"),
        reduce_dims=False,  # otherwise y, which has no gaps, has one axis
    )
    np.testing.assert_array_equal(cp.asnumpy(turn(x, cp.zeros((4, 3), np.float32))), 3 * cp.asnumpy(x).T)


def one(operation: str = "y = x", **options: Any) -> Any:
    return cp.ElementwiseKernel("T x, T w", "T y", operation, "one", **options)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda x: one()(x), TypeError, "one takes 2 or 3 arguments, got 1"),
    "other dtypes": (lambda x: one()(x, x.astype(np.float64)), TypeError, "w is float64, and its type T is float32"),
    "NumPy's": (lambda x: one()(np.ones(3), x), TypeError, "x is a NumPy array: .*cp.asarray"),
    "what is no C++": (lambda x: one("y = x +")(x, x), cp.CompileError, r"one:1: error: .*\n +1 \| y = x \+;"),
    "no size": (
        lambda x: cp.ElementwiseKernel("raw T x", "raw T y", "y[i] = x[i]")(x, x),
        *(ValueError, "no array that is not raw: how many elements"),
    ),
    "complex": (
        lambda x: cp.ElementwiseKernel("complex64 x", "complex64 y", "y = x")(cp.zeros(3, np.complex64)),
        *(TypeError, "complex64: the CPU engine does not support this type"),
    ),
    "no parameter": (lambda x: cp.ElementwiseKernel("x", "T y", "y = x"), ValueError, "'x' is not a parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, x: Any) -> None:
    call, error, says = REFUSED[case]
    with pytest.raises(error, match=says):
        call(x)
