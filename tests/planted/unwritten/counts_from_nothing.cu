// Atomic additions to bins that nobody has cleared.
// finds: uninitialised, bins[0], thread 0
// launch: <<<1, 64>>>(some(64, int32), empty(64, int32))
extern "C" __global__ void counts_from_nothing(const int *in, int *bins) {
  // fix: bins[threadIdx.x] = 0; __syncthreads();
  atomicAdd(&bins[in[threadIdx.x]], 1);  // here
}
