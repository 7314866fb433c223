// Of tests/test_engine_foreign.py.
#include <cooperative_groups.h>
#include <cuda/barrier>
extern "C" __global__ void reversed(const float4* in, float4* out) {
  __shared__ float4 s[64];
  __shared__ cuda::barrier<cuda::thread_scope_block> landed;
  if (threadIdx.x == 0) init(&landed, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(&s[threadIdx.x], &in[threadIdx.x], sizeof(float4), landed);
  landed.arrive_and_wait();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void copied(const float4* in, float4* out) {
  __shared__ float4 s[64];
  __shared__ cuda::barrier<cuda::thread_scope_block> landed;
  if (threadIdx.x == 0) init(&landed, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(cooperative_groups::this_thread_block(), s, in, cuda::aligned_size_t<16>(1024), landed);  // copied
  out[threadIdx.x] = s[threadIdx.x];  // too early
  landed.arrive_and_wait();
}
