// Block 1 reads what block 0 writes to a __device__ array.
// finds: race, sums, block 1
// launch: <<<2, 64>>>(some(64), out(2))
__device__ float sums[2];
extern "C" __global__ void between_blocks_by_a_variable(const float *in, float *out) {
  if (threadIdx.x == 0) sums[blockIdx.x] = in[blockIdx.x];  // there
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];  // here  // fix: if (threadIdx.x == 0) out[blockIdx.x] = sums[blockIdx.x];
}
