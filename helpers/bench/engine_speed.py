"""Compare the CPU engine with plain C++: three kernels, and the loops that compute the same.

    python3 -m helpers.bench.engine_speed                # CPU time of launches and of the loops
    python3 -m helpers.bench.engine_speed --xray         # CPU time of each kernel's X-ray as well

`sgemm` stresses barriers and 64-bit indices, `transpose` short threads, `histogram` atomics. CPU time is that of all
threads; on a busy machine its minimum is the steadiest figure. Needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from helpers import engine
from helpers.engine import compiler
from helpers.xray import xray

KERNELS = r"""
extern "C" __global__ void sgemm(const float* A, const float* B, float* C, size_t M, size_t N, size_t K) {
  constexpr size_t TILE = 16;
  __shared__ float As[TILE][TILE], Bs[TILE][TILE];
  const size_t row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
  float sum = 0;
  for (size_t k = 0; k < K; k += TILE) {
    As[threadIdx.y][threadIdx.x] = row < M && k + threadIdx.x < K ? A[row * K + k + threadIdx.x] : 0.0f;
    Bs[threadIdx.y][threadIdx.x] = col < N && k + threadIdx.y < K ? B[(k + threadIdx.y) * N + col] : 0.0f;
    __syncthreads();
    for (size_t i = 0; i < TILE; ++i) sum += As[threadIdx.y][i] * Bs[i][threadIdx.x];
    __syncthreads();
  }
  if (row < M && col < N) C[row * N + col] = sum;
}
extern "C" __global__ void transpose(const float* in, float* out, int n) {
  __shared__ float tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * n + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) out[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];
}
extern "C" __global__ void histogram(const unsigned char* values, unsigned* counts, int n) {
  __shared__ unsigned own[256];
  own[threadIdx.x] = 0;
  __syncthreads();
  const int stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) atomicAdd(&own[values[i]], 1u);
  __syncthreads();
  atomicAdd(&counts[threadIdx.x], own[threadIdx.x]);
}
"""

LOOPS = r"""
#include <stddef.h>
extern "C" void sgemm(const float* A, const float* B, float* C, size_t M, size_t N, size_t K) {
  for (size_t i = 0; i < M * N; ++i) C[i] = 0;
  for (size_t i = 0; i < M; ++i)
    for (size_t k = 0; k < K; ++k)
      for (size_t j = 0; j < N; ++j) C[i * N + j] += A[i * K + k] * B[k * N + j];
}
extern "C" void transpose(const float* in, float* out, int n) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) out[j * n + i] = in[i * n + j];
}
extern "C" void histogram(const unsigned char* values, unsigned* counts, int n) {
  for (int i = 0; i < n; ++i) counts[values[i]]++;
}
"""


@dataclass(frozen=True)
class Case:
    """A kernel with its launch. inputs: host arrays; output: shape and dtype; sizes: the arguments after them."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    inputs: tuple[np.ndarray, ...]
    output: tuple[tuple[int, ...], Any]
    sizes: tuple[Any, ...]

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of a launch; the output, zeros, is the one at `len(self.inputs)`."""
        return (*map(engine.asarray, self.inputs), engine.zeros(*self.output), *self.sizes)


def cases(n: int = 256, side: int = 1024, values: int = 1 << 20) -> list[Case]:
    """Return the three cases: products of n x n, a transpose of side x side, a histogram of so many bytes."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    image = rng.standard_normal((side, side), dtype=np.float32)
    data = rng.integers(0, 256, values).astype(np.uint8)
    return [
        Case("sgemm", (n // 16, n // 16), (16, 16), (a, b), ((n, n), np.float32), (np.uint64(n),) * 3),
        Case("transpose", (side // 32,) * 2, (32, 8), (image,), ((side, side), np.float32), (np.int32(side),)),
        Case("histogram", (64,), (256,), (data,), ((256,), np.uint32), (np.int32(values),)),
    ]


def loops() -> ctypes.CDLL:
    """Compile the loops at -O3 for this machine's processor, and load them.

    Raises:
        subprocess.CalledProcessError: the compiler refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loops.cpp", Path(folder) / "loops.so"
        source.write_text(LOOPS)
        options = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*compiler.compiler()[0], *options, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def run_loop(library: ctypes.CDLL, case: Case) -> np.ndarray:
    """Compute a case by its loop, and return the output."""
    out = np.zeros(*case.output)
    arrays = [array.ctypes.data_as(ctypes.c_void_p) for array in (*case.inputs, out)]
    getattr(library, case.name)(*arrays, *(np.ctypeslib.as_ctypes_type(type(s))(int(s)) for s in case.sizes))
    return out


def milliseconds(function: Callable[[], object], repeats: int = 7) -> list[float]:
    """Return the CPU time of calls, after one that warms up: milliseconds, sorted."""
    function()
    taken = []
    for _ in range(repeats):
        before = time.process_time()
        function()
        taken.append(1e3 * (time.process_time() - before))
    return sorted(taken)


def main() -> None:
    """Print a line for each case: minimum, and in brackets the maximum of 7."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--xray", action="store_true", help="time each kernel's X-ray too")
    options = parser.parse_args()
    library = loops()
    for case in cases():
        kernel, arguments = engine.RawKernel(KERNELS, case.name), case.arguments()
        plain = milliseconds(partial(run_loop, library, case))
        ours = milliseconds(partial(kernel, case.grid, case.block, arguments))
        ratio = f"{ours[0] / plain[0]:.0f} x"
        line = f"{case.name:10} engine {ours[0]:7.1f} ms ({ours[-1]:.1f}), C++ {plain[0]:6.2f} ms, {ratio}"
        if options.xray:
            looked = milliseconds(partial(xray, kernel, case.grid, case.block, arguments), 2)
            line += f", X-ray {looked[0]:.0f} ms"
        print(line)


if __name__ == "__main__":
    main()
