// A thread writes to an operand before the product has been waited for.
// finds: race
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out((64, 8)))
#include "hopper.cuh"
extern "C" __global__ void operand_overwritten_in_flight(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 16384), load(s, in, &full, 0, 0), load(s + 4096, in, &full, 0, 64);
  wait(&full, 0);
  float d[4];
  wg_fence();
  multiply(d, tile(s), tile(s + 4096), 0);  // there
  wg_commit();
  // fix: wg_wait<0>();
  s[t] = __float2half(0);  // here
  wg_wait<0>();
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = d[i];
}
