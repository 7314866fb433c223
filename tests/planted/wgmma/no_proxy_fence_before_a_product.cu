// Plain stores need fence.proxy.async before wgmma reads them.
// finds: no proxy fence
// launch: <<<1, 128, 16384>>>(halves(4096), out(128))
#include "hopper.cuh"
extern "C" __global__ void no_proxy_fence_before_a_product(const __half2 *in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = in[i];  // there
  // fix: proxy_fence();
  __syncthreads();
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
