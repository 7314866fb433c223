// Of tests/test_engine_warp.py.
#define FULL 0xffffffffu

template <typename T>
__global__ void shuffle(const T *in, T *out, int kind, int argument, int width) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  T value = in[t];
  if (kind == 0) out[t] = __shfl_sync(FULL, value, argument, width);
  if (kind == 1) out[t] = __shfl_up_sync(FULL, value, argument, width);
  if (kind == 2) out[t] = __shfl_down_sync(FULL, value, argument, width);
  if (kind == 3) out[t] = __shfl_xor_sync(FULL, value, argument, width);
}
extern "C" __global__ void shuffle_by_lane(const int *in, const int *from, int *out) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  out[t] = __shfl_sync(FULL, in[t], from[t]);
}
extern "C" __global__ void votes(const int *in, unsigned *out) {
  int t = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[t] = __ballot_sync(FULL, in[t]);
  out[n + t] = __any_sync(FULL, in[t] > 5);
  out[2 * n + t] = __all_sync(FULL, in[t] > 0);
}
template <typename T>
__global__ void matches(const T *in, unsigned *out) {
  int t = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, same;
  out[t] = __match_any_sync(FULL, in[t]);
  out[n + t] = __match_all_sync(FULL, in[t], &same);
  out[2 * n + t] = same;
}
template <typename T>
__global__ void reductions(const T *in, T *out, unsigned *bits) {
  int t = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[t] = __reduce_add_sync(FULL, in[t]);
  out[n + t] = __reduce_min_sync(FULL, in[t]);
  out[2 * n + t] = __reduce_max_sync(FULL, in[t]);
  bits[t] = __reduce_and_sync(FULL, (unsigned)in[t]);
  bits[n + t] = __reduce_or_sync(FULL, (unsigned)in[t]);
  bits[2 * n + t] = __reduce_xor_sync(FULL, (unsigned)in[t]);
}
template <typename T>
__device__ T warp_sum(T value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
  return value;
}
template <typename T>
__global__ void block_sum(const T *in, T *out) {
  __shared__ T sums[32];
  T sum = warp_sum(in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : T(0));
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
  }
}
extern "C" __global__ void divergent(const int *in, int *out) {  // each third lane with its like
  unsigned lane = threadIdx.x % 32, third = lane % 3, mask = (0x49249249u << third);
  int value = in[threadIdx.x];
  if (third == 0) {
    value = __shfl_sync(mask, value, 30) + __popc(__ballot_sync(mask, value > 50));
  } else if (third == 1) {
    value = __reduce_add_sync(mask, value);
  } else {
    value = __shfl_up_sync(mask, value, 3);
    __syncwarp(mask);
    value *= 2;
  }
  __syncwarp();
  out[threadIdx.x] = value;
}
extern "C" __global__ void other_branch(const int *in, int *out) {  // one operation, from two places of the source
  int value = in[threadIdx.x];
  if (threadIdx.x % 2) value = __shfl_xor_sync(FULL, value, 1);
  else value = 1000 + __shfl_xor_sync(FULL, value, 1);
  out[threadIdx.x] = value;
}
extern "C" __global__ void some_leave(const int *in, int *out, int *masks, int stay) {
  if (threadIdx.x % 32 >= stay) return;
  int value = in[threadIdx.x];
  __syncwarp();
  for (int step = 1; step < stay; step *= 2) {
    int other = __shfl_up_sync(FULL, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  out[threadIdx.x] = value;
  masks[threadIdx.x] = __ballot_sync(FULL, 1);
}
extern "C" __global__ void through_shared(const int *in, int *out) {  // a warp's own exchange, no block barrier
  __shared__ int tile[256];
  int t = threadIdx.x, warp = t / 32 * 32, lane = t % 32;
  for (int step = 0; step < 5; ++step) {
    tile[t] = step ? tile[t] : in[t];
    __syncwarp();
    int next = tile[warp + (lane + 1) % 32];
    __syncwarp();
    tile[t] = next;
    __syncwarp();
  }
  out[t] = tile[t];
}
extern "C" __global__ void active(unsigned *out) {
  int t = threadIdx.x, n = blockDim.x, lane = t % 32;
  out[t] = __activemask();
  if (lane < 5) out[n + t] = __activemask();
  else if (lane % 2) out[n + t] = __activemask();
  else out[n + t] = 0;
  if (lane == 7) return;
  __syncwarp(FULL);
  out[2 * n + t] = __activemask();
}
