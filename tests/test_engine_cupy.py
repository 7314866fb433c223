"""CuPy's kernels with its headers, cuComplex, complex arguments, addresses as arguments, and pickling."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import libraries

needs_cupy = pytest.mark.skipif(libraries.folder() is None, reason="CuPy is not installed")
RNG = np.random.default_rng(11)
N = 96


def complex_numbers(dtype: type) -> np.ndarray:
    return (RNG.uniform(-2, 2, N) + 1j * RNG.uniform(-2, 2, N)).astype(dtype)


CUCOMPLEX = cuda_text("engine_cupy_cucomplex")


@on_each_device
@pytest.mark.parametrize("name, dtype", [("single", np.complex64), ("twice", np.complex128)])
def test_cucomplex(cp: Any, name: str, dtype: type) -> None:
    a, b, s = complex_numbers(dtype), complex_numbers(dtype), dtype(0.5 - 1.25j)
    out = cp.zeros((7, N), dtype)
    compiled(cp, CUCOMPLEX).get_function(name)((1,), (N,), (cp.asarray(a), cp.asarray(b), s, out))
    expected = [a + b, a - b, a * s, a / b, a * b + s, abs(a) + 1j * (-b.imag + s.real), b]
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(cp.asnumpy(out), np.array(expected), rtol=8 * eps, atol=8 * eps)


@on_each_device
def test_a_magnitude_whose_square_is_too_large(cp: Any) -> None:
    code = """
    #include <cuComplex.h>
    extern "C" __global__ void magnitude(const cuFloatComplex* z, float* out) {
      out[threadIdx.x] = cuCabsf(z[threadIdx.x]);
    }"""
    z = np.array([3e30 + 4e30j, 0, 1e-30j, complex(np.inf, 1)], np.complex64)
    out = cp.zeros(4, cp.float32)
    compiled(cp, code).get_function("magnitude")((1,), (4,), (cp.asarray(z), out))
    np.testing.assert_allclose(cp.asnumpy(out), [5e30, 0, 1e-30, np.inf], rtol=1e-6)


TEMPLATES = """
#include <cupy/complex.cuh>
#include <cupy/math_constants.h>
template <typename T>
__global__ void apply(const T* a, T factor, T* out) {
  int i = threadIdx.x, n = blockDim.x;
  T z = a[i];
  out[i] = z * factor + conj(z);
  out[n + i] = z / factor;
  out[2 * n + i] = exp(z);
  out[3 * n + i] = sqrt(z);
  out[4 * n + i] = T(abs(z), arg(z));
  out[5 * n + i] = T(real(z), isnan(z) ? CUDART_NAN : norm(z));
}
"""


@needs_cupy
@on_each_device
@pytest.mark.parametrize("scalar, dtype", [("float", np.complex64), ("double", np.complex128)])
def test_cupys_complex_numbers(cp: Any, scalar: str, dtype: type) -> None:
    name = f"apply<complex<{scalar}>>"
    a, factor = complex_numbers(dtype), dtype(0.75 + 0.5j)
    out = cp.zeros((6, N), dtype)
    compiled(cp, TEMPLATES, (name,)).get_function(name)((1,), (N,), (cp.asarray(a), factor, out))
    expected = [a * factor + a.conj(), a / factor, np.exp(a), np.sqrt(a), abs(a) + 1j * np.angle(a)]
    expected.append(a.real + 1j * abs(a) ** 2)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(cp.asnumpy(out), np.array(expected), rtol=16 * eps, atol=16 * eps)


@needs_cupy
@on_each_device
def test_cucomplex_translated(cp: Any) -> None:
    code = """
    #include <cuComplex.h>
    extern "C" __global__ void turn(cuFloatComplex* z) {
      z[threadIdx.x] = cuCmulf(z[threadIdx.x], make_cuFloatComplex(0.0f, 2.0f));
    }"""
    z = complex_numbers(np.complex64)
    given = cp.asarray(z.copy())
    cp.RawModule(code=code, translate_cucomplex=True).get_function("turn")((1,), (N,), (given,))
    np.testing.assert_allclose(cp.asnumpy(given), z * 2j, rtol=1e-6)


COPY = """
extern "C" __global__ void copy(const float* from, float* to, int n) {
  int i = threadIdx.x;
  if (i < n) to[i] = from[i];
}
"""


@on_each_device
def test_addresses_as_arguments(cp: Any) -> None:
    """An address is a pointer: as an int, a NumPy integer, a MemoryPointer, and within an array."""
    source = cp.arange(N, dtype=cp.float32)
    kernel = compiled(cp, COPY).get_function("copy")
    middle = source.data.ptr + 4 * 16
    for pointer in (middle, np.uint64(middle), source.data + 4 * 16):
        target = cp.zeros(N, cp.float32)
        kernel((1,), (N,), (pointer, target.data.ptr, np.int32(32)))
        np.testing.assert_array_equal(cp.asnumpy(target)[:33], [*range(16, 48), 0])


@on_each_device
def test_memory_without_an_array(cp: Any) -> None:
    memory = cp.cuda.alloc(4 * N)
    memory.copy_from(cp.arange(N, dtype=cp.float32).data, 4 * N)
    alias = cp.ndarray((N,), cp.float32, memory)
    target = cp.zeros(N, cp.float32)
    compiled(cp, COPY).get_function("copy")((1,), (N,), (memory, target, np.int32(N)))
    alias[...] = 7
    np.testing.assert_array_equal(cp.asnumpy(target), np.arange(N))
    compiled(cp, COPY).get_function("copy")((1,), (N,), (memory, target, np.int32(N)))
    np.testing.assert_array_equal(cp.asnumpy(target), np.full(N, 7))


@on_each_device
def test_pointers_in_an_array(cp: Any) -> None:
    """A table of addresses, as for batched kernels."""
    code = """
    extern "C" __global__ void sums(float* const* tables, float* out) {
      float sum = 0;
      for (int i = 0; i < 8; ++i) sum += tables[blockIdx.x][i];
      out[blockIdx.x] = sum;
    }"""
    parts = [cp.asarray(np.full(8, k, np.float32)) for k in (1, 2, 3)]
    table = cp.asarray(np.array([part.data.ptr for part in parts], np.uint64))
    out = cp.zeros(3, cp.float32)
    compiled(cp, code).get_function("sums")((3,), (1,), (table, out))
    np.testing.assert_array_equal(cp.asnumpy(out), [8, 16, 24])


def test_numbers_that_are_no_addresses() -> None:
    kernel, target = compiled(engine, COPY).get_function("copy"), engine.zeros(N, engine.float32)
    with pytest.raises(TypeError, match="expected a device array; got int 7"):
        kernel((1,), (N,), (7, target, N))
    with pytest.raises(TypeError, match=r"\(0x7ff00000\), which is not an address in an existing device array"):
        kernel((1,), (N,), (0x7FF00000, target, N))


def test_an_address_past_its_array_is_a_fault() -> None:
    source, target = engine.zeros(N, engine.float32), engine.zeros(N, engine.float32)
    code = COPY.replace("int i = threadIdx.x", "int i = threadIdx.x + 100000")
    with pytest.raises(engine.LaunchError, match=r"from\[100000\], which has \d+ elements"):
        compiled(engine, code).get_function("copy")((1,), (N,), (source.data.ptr, target, 1 << 30))


@on_each_device
@pytest.mark.parametrize("what", ["kernel", "module", "kernel of module"])
def test_pickled(cp: Any, what: str) -> None:
    module = cp.RawModule(code=COPY)
    thing = {"kernel": cp.RawKernel(COPY, "copy"), "module": module, "kernel of module": module.get_function("copy")}
    again = pickle.loads(pickle.dumps(thing[what]))
    kernel = again.get_function("copy") if what == "module" else again
    target = cp.zeros(N, cp.float32)
    kernel((1,), (N,), (cp.arange(N, dtype=cp.float32), target, np.int32(N)))
    np.testing.assert_array_equal(cp.asnumpy(target), np.arange(N))


def test_cupys_names_for_errors() -> None:
    with pytest.raises(engine.cuda.compiler.CompileException):
        engine.RawModule(code='extern "C" __global__ void broken( {}').compile()
    with pytest.raises(engine.cuda.driver.CUDADriverError, match="named symbol not found"):
        engine.RawModule(code=COPY).get_function("paste")


def test_warnings_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept with the build: the second time no compiler runs."""
    for _ in range(2):
        log = io.StringIO()
        engine.RawModule(code=COPY.replace("int i =", "int unused; int i =")).compile(log_stream=log)
        assert re.search(r"kernel\.cu:3: warning: unused variable", log.getvalue())
        monkeypatch.setattr(engine.compiler.subprocess, "run", None)
