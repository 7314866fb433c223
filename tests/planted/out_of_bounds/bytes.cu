// An array of 61 bytes is read by 64 threads.
// finds: out of bounds, in[61], thread 61
// launch: <<<1, 64>>>(some(61, int8), out(64))
extern "C" __global__ void bytes(const signed char *in, float *out) {
  out[threadIdx.x] = in[threadIdx.x];  // here  // fix: out[threadIdx.x] = in[min(threadIdx.x, 60)];
}
