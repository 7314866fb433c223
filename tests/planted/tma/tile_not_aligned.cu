// TMA with the 128-byte swizzle needs an aligned tile.
// finds: misaligned
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void tile_not_aligned(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s + 32, in, &full, 0, 0);  // here  // fix: if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);
  wait(&full, 0);
  out[t] = s[t];
}
