// Copies for the next tile start while slower threads still read this one.
// finds: race, s
// launch: <<<1, 64>>>(some(192), out(64))
#include "async.cuh"
extern "C" __global__ void no_barrier_before_the_tile_is_used_again(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  float sum = 0;
  for (int tile = 0; tile < 3; ++tile) {
    copy(&s[t], &in[64 * tile + t]);  // here
    COMMIT();
    WAIT(0);
    __syncthreads();
    for (int i = 0; i < 64; ++i) sum += s[i];  // there
    // fix: __syncthreads();
  }
  out[t] = sum;
}
