// A block ends while a bulk addition reads its shared memory.
// finds: never waited for
// launch: <<<1, 128>>>(zeros(128, float32), zeros(128, float32))
#include "hopper.cuh"
extern "C" __global__ void addition_never_waited_for(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // here
    commit();
    // fix: wait_read();
  }
  __syncthreads();
  out[t] = read[t];  // fix:
}
