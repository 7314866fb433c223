// Block 0 reads a sum to which other blocks still add.
// finds: race
// launch: <<<2, 128>>>(zeros(128, float32), out(256))
#include "hopper.cuh"
extern "C" __global__ void sum_read_while_other_blocks_add(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // here
    commit();
    wait_read();
  }
  __syncthreads();
  s[t] = 0;
  read[128 * blockIdx.x + t] = blockIdx.x == 0 ? out[t] : 0;  // there  // fix: read[128 * blockIdx.x + t] = t;
}
