// Thread 0 leaves a buffer for all threads: the next phase may end before others have waited for this one.
// finds: overtaken wait
// launch: <<<1, 160, 4096>>>(map_of(halves(64, 64), (64, 16)), out(128))
#include "hopper.cuh"
extern "C" __global__ void left_by_one_for_all(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) init(&full[i], 1), init(&empty[i], 1);
    init_fence();
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 6; ++i) {
        wait(&empty[i % 2], (i / 2 & 1) ^ 1);
        expect(&full[i % 2], 2048);  // there
        load(s + 1024 * (i % 2), in, &full[i % 2], 0, 16 * (i % 4));
      }
    return;
  }
  for (int i = 0; i < 6; ++i) {
    wait(&full[i % 2], i / 2 & 1);  // here
    // fix: asm volatile("bar.sync 1, 128;" ::: "memory");  // all have waited
    if (t == 0) arrive(&empty[i % 2]);
  }
  out[t] = t;
}
