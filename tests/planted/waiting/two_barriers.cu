// The two branches have a barrier each; these are different ones.
// finds: barrier divergence
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void two_barriers(const float *in, float *out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = in[threadIdx.x];
    __syncthreads();  // here  // fix:
  } else {
    out[threadIdx.x] = 0;
    __syncthreads();  // there  // fix:
  }
}
