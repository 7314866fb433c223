// A copy writes behind its array.
// finds: out of bounds, s[60], thread 60
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void copies_past_the_end(const float *in, float *out) {
  __shared__ float s[60];
  int t = threadIdx.x;
  if (t < 64) copy(&s[t], &in[t]);  // here  // fix: if (t < 60) copy(&s[t], &in[t]);
  COMMIT();
  WAIT(0);
  __syncthreads();
  out[t] = s[t % 60];
}
