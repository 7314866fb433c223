// A wait for the phase before returns at once.
// finds: not waited for
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void wrong_parity(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  wait(&full, 1);  // fix: wait(&full, 0);
  out[t] = s[t];  // here
  wait(&full, 0);
}
