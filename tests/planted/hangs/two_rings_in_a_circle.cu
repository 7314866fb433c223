// Producer and consumers each wait for the other: the producer asks for an empty stage before the first round too.
// finds: deadlock, block 0, thread 0
// launch: <<<1, 160>>>(out(128))
#include "hopper.cuh"
extern "C" __global__ void two_rings_in_a_circle(float *out) {
  __shared__ unsigned long long full, empty;
  __shared__ float stage[128];
  int t = threadIdx.x;
  if (t == 0) init(&full, 32), init(&empty, 128), init_fence();
  __syncthreads();
  if (t >= 128) {
    for (int i = 0; i < 3; ++i) {
      wait(&empty, i & 1);  // fix: if (i > 0) wait(&empty, (i - 1) & 1);
      for (int k = t - 128; k < 128; k += 32) stage[k] = i;
      arrive(&full);
    }
    return;
  }
  float sum = 0;
  for (int i = 0; i < 3; ++i) {
    wait(&full, i & 1);  // here
    sum += stage[t];
    arrive(&empty);
  }
  out[t] = sum;
}
