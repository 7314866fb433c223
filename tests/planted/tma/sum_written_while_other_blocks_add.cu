// Block 0 writes to a sum to which other blocks still add.
// finds: race
// launch: <<<2, 128>>>(zeros(128, float32), out(256))
#include "hopper.cuh"
extern "C" __global__ void sum_written_while_other_blocks_add(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // here
    commit();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncthreads();
  s[t] = 0;
  if (blockIdx.x == 0) out[t] = 1;  // there  // fix: if (blockIdx.x == 0) atomicAdd(&out[t], 1.0f);
  read[128 * blockIdx.x + t] = t;
}
