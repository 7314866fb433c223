// The two products of a warp in float32, on the CUDA cores, with S and acc where mma.sync has them:
// so that the softmax between them is that of the half types. A row has CHUNKS chunks of 16 bytes,
// swizzled.

#pragma once
#include "decode_tile.cuh"  // Scores, Output, Statistics: of mma_tiles.cuh, with the sizes of 14

__device__ __forceinline__ float dot(float4 a, float4 b, float c) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, c))));
}

// S = Q K^T of 16 rows: lane 4 g + t has rows g and g + 8, keys 8 n + 2 t and 8 n + 2 t + 1.
template <int CHUNKS>
__device__ __forceinline__ void dot_qk(
    Scores& S, const unsigned char* Q_smem, const unsigned char* K_smem) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto chunk_of = [](const unsigned char* tile, int row, int chunk) {
    return *reinterpret_cast<const float4*>(tile + swizzle<CHUNKS>(row, chunk));
  };
#pragma unroll 2
  for (int c = 0; c < CHUNKS; ++c) {
    const float4 q[2] = {chunk_of(Q_smem, g, c), chunk_of(Q_smem, g + 8, c)};
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 k = chunk_of(K_smem, 8 * n + 2 * t + e, c);
        S[0][n][e] = dot(q[0], k, S[0][n][e]);
        S[0][n][2 + e] = dot(q[1], k, S[0][n][2 + e]);
      }
  }
}

// acc += P V: each weight goes to the four lanes of its row.
template <int CHUNKS>
__device__ __forceinline__ void sum_pv(
    Output& acc, Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    const unsigned char* V_smem) {
  int lane_id = threadIdx.x % 32;
  // With few columns the compiler would keep all addresses from tile to tile, and spill.
  if (HEAD_DIM == 64) asm volatile("" : "+r"(lane_id));
  const int t = lane_id % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < BLOCK_N / 4; ++j) {
      float& s = row_pair(S, i, j / 2)[j % 2];
      s = exp2f(fmaf(s, softmax_scale_log2, -m_i[i]));
      l_i[i] += s;
    }
#pragma unroll
  for (int key = 0; key < BLOCK_N; ++key) {
    const int owner = lane_id / 4 * 4 + key % 8 / 2;
    const float p = __shfl_sync(0xffffffff, S[0][key / 8][key % 2], owner);
    const float p_8 = __shfl_sync(0xffffffff, S[0][key / 8][2 + key % 2], owner);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const float2 v = *reinterpret_cast<const float2*>(
          V_smem + swizzle<CHUNKS>(key, 2 * n + t / 2) + 8 * (t % 2));
      acc[0][n][0] = fmaf(p, v.x, acc[0][n][0]);
      acc[0][n][1] = fmaf(p, v.y, acc[0][n][1]);
      acc[0][n][2] = fmaf(p_8, v.x, acc[0][n][2]);
      acc[0][n][3] = fmaf(p_8, v.y, acc[0][n][3]);
    }
  }
}
