// The last word of the tile is not loaded, and is read.
// finds: uninitialised, s[63], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void last_of_a_tile(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t < 63) s[t] = in[t];  // fix: if (t < 64) s[t] = in[t];
  __syncthreads();
  out[t] = s[63 - t];  // here
}
