// A thread writes a count, tells another warp by an mbarrier, and counts itself; that one counts, but does not wait.
// finds: race, count[0], block 0, thread 32
// launch: <<<1, 64>>>(zeros(1))
#include "hopper.cuh"
extern "C" __global__ void counted_without_waiting(int *out) {
  __shared__ int count[1];
  __shared__ unsigned long long told;
  int t = threadIdx.x;
  if (t == 0) init(&told, 1);
  __syncthreads();
  if (t == 0) count[0] = 5;  // there
  if (t == 0) arrive(&told);
  if (t == 0) atomicAdd(&count[0], 1);
  // fix: if (t == 32) wait(&told, 0);
  if (t == 32) atomicAdd(&count[0], 1);  // here
  __syncthreads();
  if (t == 0) out[0] = count[0];
}
