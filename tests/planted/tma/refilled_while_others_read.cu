// A thread loads the next tile while others still read this one.
// finds: not waited for
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void refilled_while_others_read(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 64 * i);  // here
    wait(&full, i);
    for (int k = 0; k < 64; k += 2) sum += (float)((__half2 *)s)[(32 * t + k / 2) % 2048].x;  // there
    // fix: __syncthreads();
  }
  out[t] = sum;
}
