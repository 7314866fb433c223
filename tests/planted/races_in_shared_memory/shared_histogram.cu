// Threads whose values are in one bin add to it without an atomic.
// finds: race, bins
// launch: <<<1, 64>>>(some(64, int32), zeros(8))
extern "C" __global__ void shared_histogram(const int *in, int *out) {
  __shared__ int bins[8];
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  bins[in[threadIdx.x] % 8] += 1;  // here // there  // fix: atomicAdd(&bins[in[threadIdx.x] % 8], 1);
  __syncthreads();
  if (threadIdx.x < 8) out[threadIdx.x] = bins[threadIdx.x];
}
