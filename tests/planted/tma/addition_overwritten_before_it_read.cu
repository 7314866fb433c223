// A tile is written again while a bulk addition reads it.
// finds: race
// launch: <<<2, 128>>>(zeros(128, float32), out(256))
#include "hopper.cuh"
extern "C" __global__ void addition_overwritten_before_it_read(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // there
    commit();
    // fix: wait_read();
  }
  __syncthreads();
  s[t] = 0;  // here
  if (t == 0) wait_read();
  read[128 * blockIdx.x + t] = t;
}
