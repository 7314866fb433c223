// A bulk addition reads words that other threads have written, with no barrier between.
// finds: race
// launch: <<<2, 128>>>(zeros(128, float32), out(256))
#include "hopper.cuh"
extern "C" __global__ void no_barrier_before_an_addition(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;  // there
  proxy_fence();
// fix: __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // here
    commit();
    wait_read();
  }
  __syncthreads();
  s[t] = 0;
  read[128 * blockIdx.x + t] = t;
}
