// Odd elements are not written.
// finds: never written, out[1]
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void every_other(const float *in, float *out) {
  if (threadIdx.x % 2 == 0) out[threadIdx.x] = in[threadIdx.x];  // fix: out[threadIdx.x] = in[threadIdx.x];
}
