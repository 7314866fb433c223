// A word of the tile is written while a TMA store reads it.
// finds: race
// launch: <<<1, 128, 16384>>>(map_of(out((64, 64), float16), (64, 64)))
#include "hopper.cuh"
extern "C" __global__ void store_overwritten_before_it_read(MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // there
    commit();
    // fix: wait_read();
    ((__half2 *)s)[5] = __half2{};  // here
    wait_read();
  }
}
