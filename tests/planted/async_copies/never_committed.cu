// A wait for groups does not include copies that were not committed.
// finds: not waited for, s
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void never_committed(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  // fix: COMMIT();
  WAIT(0);
  out[t] = s[t];  // here
  asm volatile("cp.async.wait_all;");
}
