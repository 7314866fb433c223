// All threads read a flag before a barrier says that thread 0 has set it.
// finds: race, large[0], thread 1
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void flag(const float *in, float *out) {
  __shared__ int large;
  if (threadIdx.x == 0) large = in[0] > 0.5f;  // there
  // fix: __syncthreads();
  out[threadIdx.x] = large ? 1.0f : 0.0f;  // here
}
