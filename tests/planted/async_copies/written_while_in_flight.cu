// A word is written while a copy to it is in flight.
// finds: not waited for, s
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void written_while_in_flight(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  // fix: WAIT(0);
  s[t] = 1;  // here
  WAIT(0);
  out[t] = s[t];
}
