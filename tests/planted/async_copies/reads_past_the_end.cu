// A copy reads behind its array.
// finds: out of bounds, in[64], thread 62
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void reads_past_the_end(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t + 2]);  // here  // fix: copy(&s[t], &in[t]);
  COMMIT();
  WAIT(0);
  out[t] = s[t];
}
