// Shared memory does not keep what the block before has written.
// finds: uninitialised, s[63], block 1, thread 0
// launch: <<<2, 64>>>(some(64), out(128))
extern "C" __global__ void from_the_block_before(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (blockIdx.x == 0) s[t] = in[t];  // fix: s[t] = in[t];
  __syncthreads();
  out[blockIdx.x * 64 + t] = s[63 - t];  // here
}
