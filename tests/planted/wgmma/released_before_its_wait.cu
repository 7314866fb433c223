// The buffer is released while the product still reads it.
// finds: race
// launch: <<<1, 256, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void released_before_its_wait(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 3; ++i) {
        if (i > 0) wait(&empty, (i - 1) & 1);
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);  // here
      }
    return;
  }
  float d[4] = {};
  for (int i = 0; i < 3; ++i) {
    wait(&full, i & 1);
    wg_fence();
    multiply(d, tile(s), tile(s), 1);  // there
    wg_commit();
    if (t == 0) arrive(&empty);  // fix:
    wg_wait<0>();
    hold(d);
    // fix: if (t == 0) arrive(&empty);
  }
  out[t] = d[0];
}
