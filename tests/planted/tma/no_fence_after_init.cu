// TMA has to see the mbarrier that a thread has initialised.
// finds: no proxy fence
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void no_fence_after_init(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1);  // there  // fix: if (t == 0) init(&full, 1); if (t == 0) init_fence();
  __syncthreads();
  if (t == 0) {
    expect(&full, 8192);
    load(s, in, &full, 0, 0);  // here
  }
  wait(&full, 0);
  out[t] = s[t];
}
