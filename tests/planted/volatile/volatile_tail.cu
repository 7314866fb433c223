// The warp-synchronous tail of old reductions: volatile orders nothing between lanes.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(1))
extern "C" __global__ void volatile_tail(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  if (t < 32) {
    volatile float *v = s;
    for (int half = 32; half > 0; half /= 2) {
      float sum = v[t] + v[t + half];  // there
      // fix: __syncwarp();
      v[t] = sum;  // here
      // fix: __syncwarp();
    }
  }
  if (t == 0) out[0] = s[0];
}
