// Threads wait at an mbarrier before it is initialised.
// finds: race
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void no_barrier_after_init(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) {
    init(&full, 1);  // there
    init_fence();
    expect(&full, 8192);
    load(s, in, &full, 0, 0);
  }
  // fix: __syncthreads();
  wait(&full, 0);  // here
  out[t] = s[t];
}
