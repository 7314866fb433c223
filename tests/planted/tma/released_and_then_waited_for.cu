// The wait for the addition comes after the release of its tile.
// finds: race
// launch: <<<1, 160>>>(zeros(128, float32))
#include "hopper.cuh"
extern "C" __global__ void released_and_then_waited_for(float *out) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  for (int i = 0; i < 3; ++i) {
    if (t < 128) {
      if (i > 0) asm volatile("bar.sync 2, 160;" ::: "memory");  // the tile is free
      s[t] = i;  // here
      proxy_fence();
    }
    if (t < 96) asm volatile("bar.arrive 1, 160;" ::: "memory");
    else asm volatile("bar.sync 1, 160;" ::: "memory");
    if (t >= 128) {
      if (t == 128) {
        bulk_add(out, s, 512);  // there
        commit();
        // fix: wait_read();
      }
      __syncwarp();
      if (i < 2) asm volatile("bar.arrive 2, 160;" ::: "memory");
    }
    if (t == 128) wait_read();
  }
  if (t == 128) wait_read();
}
