// A kernel ends with a copy in flight.
// finds: never waited for, s[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void never_waited_for(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // here
  COMMIT();
  out[t] = in[t];
  // fix: WAIT(0);
}
