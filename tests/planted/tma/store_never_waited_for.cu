// A block ends while a TMA store reads its shared memory.
// finds: never waited for
// launch: <<<1, 128, 16384>>>(map_of(halves(64, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void store_never_waited_for(MAP to, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};
  proxy_fence();
  __syncthreads();
  out[t] = t;
  if (t == 0) {
    store(to, s, 0, 0);  // here
    commit();
    // fix: wait_read();
  }
}
