// Of tests/test_engine_foreign.py.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
struct State { int values[32]; int last; };
extern __shared__ State of_file;
__global__ void never_defined(float* x);
cudaDeviceProp of_the_host;

K an_object(int* out) {
  extern __shared__ struct State state;
  const int t = threadIdx.x;
  state.values[t] = t;
  if (t == 31) state.last = 100;
  __syncthreads();
  out[t] = state.values[31 - t] + state.last;
}
K an_object_of_the_file(int* out) {
  of_file.values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = of_file.values[31 - threadIdx.x] + 100;
}
K shared_before_extern(int* out) {
  __shared__ __align__(16) extern int s[];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[31 - threadIdx.x] + 100;
}
K scopes(int* out) {
  const int t = threadIdx.x;
  out[t] = atomicCAS_block(out + t, 0, 31) + atomicCAS_system(out + t, 31, 0) - t + 100;
}
K headers(int* out) {
  const __half half = __float2half(31.f - threadIdx.x);
  const __nv_bfloat16 other = __float2bfloat16(100.f);
  out[threadIdx.x] = (int)(__half2float(half) + __bfloat162float(other));
}
K vshr(int* out) {
  const int t = threadIdx.x, a = (131 - t) << 2;
  int clamped, wrapped, left;
  asm("vshr.s32.s32.u32.clamp %0, %1, %2;" : "=r"(clamped) : "r"(-a), "r"(40));
  asm("vshr.u32.u32.u32.wrap %0, %1, %2;" : "=r"(wrapped) : "r"(a), "r"(34));
  asm("vshl.s32.u32.u32.clamp %0, %1, %2;" : "=r"(left) : "r"(a), "r"(32));
  out[t] = wrapped + clamped + 1 + left;
}
K other_lines(int* out) {  // a block of two warps, which meet at the barrier, wherever each of them stands
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x] + 68;
  } else {
    __syncthreads();
  }
}
