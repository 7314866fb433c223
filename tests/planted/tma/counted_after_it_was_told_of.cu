// A thread writes a count, tells another warp by an mbarrier, and counts itself while that one reads.
// finds: race, count[0], block 0, thread 32
// launch: <<<1, 64>>>(zeros(1))
#include "hopper.cuh"
extern "C" __global__ void counted_after_it_was_told_of(int *out) {
  __shared__ int count[1];
  __shared__ unsigned long long told;
  int t = threadIdx.x;
  if (t == 0) init(&told, 1);
  __syncthreads();
  if (t == 0) count[0] = 5;
  // fix: if (t == 0) atomicAdd(&count[0], 1);
  if (t == 0) arrive(&told);
  if (t == 0) atomicAdd(&count[0], 1);  // there  // fix:
  if (t == 32) wait(&told, 0), out[0] = count[0];  // here
}
