// Each step of a tree reduction needs the sums of the step before.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(1))
extern "C" __global__ void tree_reduction(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (t < half) s[t] += s[t + half];  // here // there
    // fix: __syncthreads();
  }
  if (t == 0) out[0] = s[0];
}
