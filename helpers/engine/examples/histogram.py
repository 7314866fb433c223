"""An ordinary CuPy program with its own kernel, as an example of replacing CuPy by the engine: it counts numbers."""

import cupy as cp

CODE = r"""
extern "C" __global__ void histogram(const int* values, int n, int* counts, int bins) {
  extern __shared__ int own[];
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) own[bin] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    if (values[i] >= 0 && values[i] < bins) atomicAdd(&own[values[i]], 1);
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) atomicAdd(&counts[bin], own[bin]);
}
"""


def histogram(values: cp.ndarray, bins: int, code: str = CODE) -> cp.ndarray:
    """Count how often 0, 1, ..., bins - 1 occur in an array of int32."""
    counts = cp.zeros(bins, cp.int32)
    kernel = cp.RawKernel(code, "histogram")
    args = (values, cp.int32(values.size), counts, cp.int32(bins))
    kernel((4,), (128,), args, shared_mem=4 * bins)
    return counts
