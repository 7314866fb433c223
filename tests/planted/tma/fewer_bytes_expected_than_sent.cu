// Two loads, and the mbarrier expects the bytes of one.
// finds: wrong byte count
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void fewer_bytes_expected_than_sent(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t == 0) {
    expect(&full, 8192);  // fix: expect(&full, 2 * 8192);
    for (int i = 0; i < 2; ++i) load(s + 4096 * i, in, &full, 0, 64 * i);  // here
  }
  wait(&full, 0);
  out[t] = s[t];
  if (t == 0) arrive(&full);  // fix:
  wait(&full, 1);  // fix:
}
