// The kernel has dynamic shared memory, and the launch gives none.
// finds: out of bounds, dynamic shared memory[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void no_shared_mem(const float *in, float *out) {
  extern __shared__ float s[];  // fix: __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];  // here
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
