// The thread that asks for a store fences for all, behind the barrier: only its own writes become visible to TMA.
// finds: no proxy fence
// launch: <<<1, 32>>>(out(32))
#include "hopper.cuh"
extern "C" __global__ void proxy_fence_by_another_thread(float *out) {
  __shared__ __align__(128) float s[32];
  int t = threadIdx.x;
  s[t] = t;  // there
  // fix: proxy_fence();
  __syncthreads();
  if (t == 0) {
    proxy_fence();  // fix:
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" :: "l"(out), "r"(at(s)) : "memory");  // here
    commit();
    wait_read();
  }
}
