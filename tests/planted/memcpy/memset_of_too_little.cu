// memset of one word less than is used.
// finds: uninitialised, dynamic shared memory[63], thread 63
// launch: <<<1, 64, 256>>>(some(64, int32), zeros(64), int32(256))
extern "C" __global__ void memset_of_too_little(const int *in, int *out, int bytes) {
  extern __shared__ int bins[];
  if (threadIdx.x == 0) memset(bins, 0, bytes - 4);  // fix: if (threadIdx.x == 0) memset(bins, 0, bytes);
  __syncthreads();
  atomicAdd(&bins[in[threadIdx.x]], 1);  // here
  __syncthreads();
  out[threadIdx.x] = bins[threadIdx.x];
}
