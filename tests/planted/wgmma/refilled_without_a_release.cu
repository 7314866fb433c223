// The producer does not wait until the consumers have released the buffer.
// finds: race
// launch: <<<1, 256, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void refilled_without_a_release(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 2; ++i) {
        // fix: if (i > 0) wait(&empty, 0);
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);  // here
        wait(&full, i);
      }
    return;
  }
  float d[4] = {};
  for (int i = 0; i < 2; ++i) {
    wait(&full, i);
    wg_fence();
    multiply(d, tile(s), tile(s), 1);  // there
    wg_commit();
    wg_wait<0>();
    hold(d);
    if (t == 0) arrive(&empty);
    if (i == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  out[t] = d[0];
}
