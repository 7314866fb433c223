// Of tests/test_engine_barriers.py.
extern "C" __global__ void reversed(const int *in, int *out, int n) {  // n of the block's threads stay
  __shared__ int s[256];
  const int t = threadIdx.x;
  if (t >= n) return;
  s[t] = in[t];
  __syncthreads();  // first
  const int other = s[n - 1 - t];
  __syncthreads();  // second
  s[t] = 2 * other;
  __syncthreads();
  out[t] = s[t] + s[n - 1 - t];
}
extern "C" __global__ void first_threads_leave(int *out, int n) {
  __shared__ int s;
  if (threadIdx.x < n) {
    if (threadIdx.x == n - 1) s = 41;
    return;
  }
  __syncthreads();
  out[threadIdx.x] = s + 1;
}
extern "C" __global__ void folds(const int *in, int *out, int n) {
  if (threadIdx.x >= n) return;
  const int x = in[threadIdx.x];
  out[threadIdx.x] = __syncthreads_count(x > 3);
  out[256 + threadIdx.x] = __syncthreads_and(x > 3);
  out[512 + threadIdx.x] = __syncthreads_or(x > 3);
}
extern "C" __global__ void uneven_loop(const int *in, int *out, int n) {  // a thread leaves when its part is done
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    atomicAdd(&total, in[i]);
    __syncthreads();
    if (i + blockDim.x >= n) out[threadIdx.x] = total >= in[i];
  }
}
extern "C" __global__ void numbered(int *out) {  // warps 0 and 1 meet in barrier 1, and some of their lanes have left
  __shared__ int s[64];
  const int t = threadIdx.x;
  if (t >= 64 || t % 32 >= 20) return;
  s[t] = t;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  out[t] = s[t ^ 32];
}
extern "C" __global__ void late_exit(int *out) {  // lanes leave while the others wait in the barrier already
  __shared__ int s[64];
  const int t = threadIdx.x;
  if (t % 32 < 16) {
    s[t] = t;
    asm volatile("barrier.sync 2, 64;" ::: "memory");
    out[t] = s[t ^ 32];
  } else {
    out[t] = -t;
  }
}
extern "C" __global__ void unnumbered(int *out) {  // of the whole block: a whole warp has left
  __shared__ int s[128];
  const int t = threadIdx.x;
  if (t >= 64 && t < 96) return;
  s[t] = t;
  asm volatile("bar.sync 3;" ::: "memory");
  out[t] = s[127 - t < 64 || 127 - t >= 96 ? 127 - t : t];
}
extern "C" __global__ void warp_wide(int *out) {  // a full mask, and lanes that have left
  const int t = threadIdx.x;
  if (t % 3 == 0) return;
  __syncwarp();
  out[t] = (int)__ballot_sync(0xffffffffu, t % 2);
  out[32 + t] = __reduce_add_sync(0xffffffffu, t);
  out[64 + t] = __all_sync(0xffffffffu, t % 3);
}
