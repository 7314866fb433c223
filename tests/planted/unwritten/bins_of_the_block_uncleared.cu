// Bins in shared memory are added to before they are cleared.
// finds: uninitialised, bins[0]
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
extern "C" __global__ void bins_of_the_block_uncleared(const int *in, int *out) {
  __shared__ int bins[64];
  __shared__ int most;
  if (threadIdx.x == 0) atomicExch(&most, 0);
  // fix: bins[threadIdx.x] = 0;
  __syncthreads();
  atomicMax(&most, atomicAdd(&bins[in[threadIdx.x]], 1));  // here
  __syncthreads();
  out[threadIdx.x] = most;
}
