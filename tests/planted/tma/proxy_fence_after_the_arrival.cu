// A fence after bar.arrive orders nothing for the threads at the barrier.
// finds: no proxy fence
// launch: <<<1, 160>>>(zeros(128, float32))
#include "hopper.cuh"
extern "C" __global__ void proxy_fence_after_the_arrival(float *out) {
  __shared__ __align__(16) float s[2][128];
  int t = threadIdx.x;
  if (t < 128) {
    s[0][t] = 1;  // there
    // fix: proxy_fence();
    asm volatile("bar.arrive 1, 160;" ::: "memory");
    s[1][t] = 2;
    proxy_fence();
    asm volatile("bar.arrive 2, 160;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 160;" ::: "memory");
    if (t == 128) bulk_add(out, s[0], 512);  // here
    asm volatile("bar.sync 2, 160;" ::: "memory");
    if (t == 128) {
      bulk_add(out, s[1], 512);
      commit();
      wait_read();
    }
  }
}
