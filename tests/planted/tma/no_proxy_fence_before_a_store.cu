// Plain stores need fence.proxy.async before TMA reads them.
// finds: no proxy fence
// launch: <<<1, 128, 16384>>>(map_of(out((64, 64), float16), (64, 64)))
#include "hopper.cuh"
extern "C" __global__ void no_proxy_fence_before_a_store(MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};  // there
  // fix: proxy_fence();
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // here
    commit();
    wait_read();
  }
}
