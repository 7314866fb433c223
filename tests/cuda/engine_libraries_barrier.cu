// Of tests/test_engine_libraries.py.
#include <cuda/barrier>
extern "C" __global__ void kernel(const int* x, int* out) {
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ int s[128];
  int t = threadIdx.x;
  if (t == 0) init(&barrier, blockDim.x);
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    s[t] = x[t] + round;
    cuda::barrier<cuda::thread_scope_block>::arrival_token token = barrier.arrive();
    int own = 3 * t;
    barrier.wait(cuda::std::move(token));
    out[round * 128 + t] = s[127 - t] + own;
    barrier.arrive_and_wait();
  }
}
extern "C" __global__ void copies(const int* x, int* out) {
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ alignas(16) int s[512];
  int t = threadIdx.x;
  if (t == 0) init(&barrier, blockDim.x);
  __syncthreads();
  cuda::memcpy_async(s + t, x + t, sizeof(int), barrier);
  if (t < 64) cuda::memcpy_async(s + 128 + 4 * t, x + 128 + 4 * t, cuda::aligned_size_t<16>(16), barrier);
  barrier.arrive_and_wait();
  out[t] = s[127 - t];
  out[128 + t] = s[255 - t];
}
