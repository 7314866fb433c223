// Nobody waits for the copies.
// finds: not waited for, s
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void no_wait(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  // fix: WAIT(0);
  __syncthreads();
  out[t] = s[63 - t];  // here
  WAIT(0);
}
