// Words of global memory that other threads of the block write need a barrier too.
// finds: race, out
// launch: <<<1, 64>>>(some(64), zeros(64, float32), out(64))
extern "C" __global__ void within_a_block(const float *in, float *out, float *sums) {
  int t = threadIdx.x;
  out[t] = in[t];  // here
  // fix: __syncthreads();
  sums[t] = out[t] + out[(t + 1) % 64];  // there
}
