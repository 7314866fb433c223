// A thread waits for its own copies alone: the others' need a barrier.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include "async.cuh"
extern "C" __global__ void no_barrier_after_the_wait(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // here
  COMMIT();
  WAIT(0);
  // fix: __syncthreads();
  out[t] = s[63 - t];  // there
}
