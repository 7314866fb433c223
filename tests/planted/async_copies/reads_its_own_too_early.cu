// A thread has to wait for its own copies too.
// finds: not waited for, s[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void reads_its_own_too_early(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  // fix: WAIT(0);
  out[t] = s[t];  // here
  WAIT(0);
}
