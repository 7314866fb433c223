// The accumulators were written by the threads: the next product needs wgmma.fence.
// finds: no wgmma fence
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void no_wgmma_fence(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  for (int i = 0; i < 2; ++i) {
    if (i > 5) wg_fence();  // fix: wg_fence();
    multiply(d, tile(s, 32 * i), tile(s, 32 * i), i);  // here
    wg_commit();
    wg_wait<0>();
    hold(d);
    for (int k = 0; k < 4; ++k) d[k] *= 0.5f;
  }
  out[t] = d[0];
}
