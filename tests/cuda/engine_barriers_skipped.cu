// Of tests/test_engine_barriers.py.
__device__ void meet() {
  __syncthreads();  // in a function
}
extern "C" __global__ void half_a_warp(int *out, int n) {
  if (threadIdx.x < n) {
    __syncthreads();  // here
  }
  out[threadIdx.x] = 1;
}
extern "C" __global__ void halving(int *out, int n) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int half = 32; half >= n; half /= 2) {
    if (threadIdx.x < half) {
      s[threadIdx.x] += s[threadIdx.x + half];
      __syncthreads();  // here
    }
  }
  if (threadIdx.x == 0) out[0] = s[0];
}
extern "C" __global__ void other_turns(int *out, int n) {
  for (int i = threadIdx.x; i < n; i += 64) {
    out[i] = i;
    __syncthreads();  // here
  }
}
template <int N>
__global__ void called(int *out, int n) {
  if (threadIdx.x < n) meet();
  out[threadIdx.x] = N;
}
extern "C" __global__ void in_a_loop(int *out, int n) {  // no fault: threads that have left are not waited for
  for (int i = 0; i < 2; ++i) {
    __syncthreads();
    if (threadIdx.x >= n) return;
  }
  out[threadIdx.x] = 1;
}
#define LEAVE_AFTER(n) \
  if (threadIdx.x >= n) return
extern "C" __global__ void by_a_macro(int *out, int n) {
  LEAVE_AFTER(n);
  __syncthreads();
  out[threadIdx.x] = 1;
}
