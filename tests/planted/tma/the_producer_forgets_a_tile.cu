// The consumers wait for a third tile, which nobody loads.
// finds: deadlock
// launch: <<<1, 256, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void the_producer_forgets_a_tile(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 2; ++i) {  // fix: for (int i = 0; i < 3; ++i) {
        if (i > 0) wait(&empty, (i - 1) & 1);
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);
      }
    return;
  }
  float sum = 0;
  for (int i = 0; i < 3; ++i) {
    wait(&full, i & 1);  // here
    sum += (float)s[t];
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (t == 0) arrive(&empty);
  }
  out[t] = sum;
}
