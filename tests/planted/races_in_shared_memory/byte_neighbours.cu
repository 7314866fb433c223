// Two threads store to one byte; in the twin each has a byte of its own.
// finds: race, s, thread 1
// launch: <<<1, 64>>>(some(64, int8), out(64))
extern "C" __global__ void byte_neighbours(const signed char *in, float *out) {
  __shared__ signed char s[64];
  int t = threadIdx.x;
  s[t & 62] = in[t];  // here // there  // fix: s[t] = in[t];
  __syncthreads();
  out[t] = s[t & 62];
}
