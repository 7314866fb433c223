// The second wait is for the first phase, which is over.
// finds: not waited for
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void parity_that_never_turns(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 64 * i);  // there
    wait(&full, 0);  // fix: wait(&full, i & 1);
    sum += (float)s[t];  // here
    __syncthreads();
  }
  wait(&full, 1);
  out[t] = sum;
}
