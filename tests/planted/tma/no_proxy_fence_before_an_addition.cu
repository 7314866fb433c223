// Plain stores need fence.proxy.async before a bulk addition reads them.
// finds: no proxy fence
// launch: <<<2, 128>>>(zeros(128, float32), out(256))
#include "hopper.cuh"
extern "C" __global__ void no_proxy_fence_before_an_addition(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;  // there
// fix: proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // here
    commit();
    wait_read();
  }
  __syncthreads();
  s[t] = 0;
  read[128 * blockIdx.x + t] = t;
}
