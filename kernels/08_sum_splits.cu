// 08 sum_splits: dK and dV of each head of K and V, where several blocks share the heads of its group.
//
// Since 08_backward_mma: a block has a tile of keys and all heads of Q that share them, so few heads of K
// and V make few blocks, and under a causal mask the longest has twice the mean's work. With GROUP_SPLITS
// blocks for a group, each has some of the heads and writes its part of dK and dV in float32. This kernel
// adds the parts, always in the same order.
//
// Launch   grid (ceil(N_kv HEAD_DIM / 8 / THREADS), kv_heads, batch), block THREADS
// Shapes   dK_splits, dV_splits float32 (batch, kv_heads, GROUP_SPLITS, N_kv, HEAD_DIM), as dense; dK, dV of
//          T by params, (batch, kv_heads, N_kv, HEAD_DIM); packed sequences are one batch
// Needs    HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  each split read once, dK and dV written once

#include "backward_params.cuh"
#include "results.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row: a multiple of 8
#endif
#ifndef GROUP_SPLITS
#define GROUP_SPLITS 2  // blocks that share the heads of a group
#endif
#ifndef THREADS
#define THREADS 256
#endif
static_assert(HEAD_DIM % 8 == 0, "a thread has eight columns");

// Eight columns of a key.
template <typename T>
__device__ __forceinline__ void sum_eight(const float* splits, long long of_split, T* out) {
  float4 sum[2] = {};
#pragma unroll
  for (int split = 0; split < GROUP_SPLITS; ++split)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = reinterpret_cast<const float4*>(splits + split * of_split)[i];
      sum[i].x += x.x, sum[i].y += x.y, sum[i].z += x.z, sum[i].w += x.w;
    }
  const Pair<T> pairs[4] = {
      pack(T(), sum[0].x, sum[0].y), pack(T(), sum[0].z, sum[0].w), pack(T(), sum[1].x, sum[1].y),
      pack(T(), sum[1].z, sum[1].w)};
  store8(out, pairs);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) sum_splits(
    const float* __restrict__ dK_splits, const float* __restrict__ dV_splits, T* __restrict__ dK,
    T* __restrict__ dV, const BackwardParams params) {
  // ---- prologue: the key and the columns of this thread
  const long long item = (long long)blockIdx.x * THREADS + threadIdx.x;
  const int key = item / (HEAD_DIM / 8), column = item % (HEAD_DIM / 8) * 8;
  if (key >= params.forward.N_kv) return;
  const int kv_head = blockIdx.y, batch = blockIdx.z;
  const long long of_split = (long long)params.forward.N_kv * HEAD_DIM;
  const long long first = ((long long)batch * params.forward.kv_heads + kv_head) * GROUP_SPLITS;

  // ---- dK and dV
  const auto sum = [&](const float* splits, T* out, const Strides& strides) {
    sum_eight(
        splits + first * of_split + (long long)key * HEAD_DIM + column, of_split,
        out + batch * strides.batch + key * strides.row + kv_head * strides.head + column);
  };
  sum(dK_splits, dK, params.d_k);
  sum(dV_splits, dV, params.d_v);
}
