// Three warps arrive at an mbarrier for four.
// finds: deadlock
// launch: <<<1, 128>>>(out(128))
#include "hopper.cuh"
extern "C" __global__ void one_arrival_too_few(float *out) {
  __shared__ unsigned long long done;
  int t = threadIdx.x;
  if (t == 0) init(&done, 4);
  __syncthreads();
  if (t % 32 == 0 && t > 0) arrive(&done);  // fix: if (t % 32 == 0) arrive(&done);
  wait(&done, 0);  // here
  out[t] = t;
}
