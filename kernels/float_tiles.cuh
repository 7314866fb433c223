// Register tiles in float32, rows with strides: copies of tiles and both products. Written out in
// 05_heads_and_masks.cu. To be included after the sizes.

#pragma once
#include "register_tiles.cuh"

constexpr int COPIES = (BLOCK_N * D4 + THREADS - 1) / THREADS;  // float4 of a tile per thread

// Q and P are stored transposed: a thread reads four rows of one column as a float4. The padding
// avoids bank conflicts within a quarter of a warp, which reads 8 rows of K (an odd number of
// float4 apart) or stores 4 columns of P.
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  float4 K[BLOCK_N][D4 | 1], V[BLOCK_N][TILE_D4 * THREADS_X];
};

// Words 4c .. 4c + 3 of a row; zeros past its end.
__device__ __forceinline__ float4 load4(const float* __restrict__ row, int c) {
#if VECTOR
  return reinterpret_cast<const float4*>(row)[c];
#else
  const int cols_left = HEAD_DIM - 4 * c;
  row += 4 * c;
  return make_float4(
      row[0], cols_left > 1 ? row[1] : 0.0f, cols_left > 2 ? row[2] : 0.0f,
      cols_left > 3 ? row[3] : 0.0f);
#endif
}

__device__ __forceinline__ void store4(float* row, int c, float4 a) {
#if VECTOR
  reinterpret_cast<float4*>(row)[c] = a;
#else
  for (int i = 0; i < 4; ++i)
    if (4 * c + i < HEAD_DIM) row[4 * c + i] = word(a, i);
#endif
}

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros from row `end` on.
template <int WIDTH>
__device__ __forceinline__ void load_tile(
    float4 (*tile)[WIDTH], const float* __restrict__ source, long long stride, int first, int end) {
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / D4, c = e % D4;
    if (BLOCK_N * D4 % THREADS != 0 && e >= BLOCK_N * D4) break;
    const bool in_bounds = first + j < end;
    const float* row = source + (in_bounds ? first + j : 0) * stride;
#if ASYNC
    // Asynchronous: uses no registers, and the thread waits only in wait_for_copies(). Past the end
    // it reads 0 bytes.
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j][c]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(row + 4 * c),
                 "r"(in_bounds ? 16 : 0)
                 : "memory");
#else
    tile[j][c] = in_bounds ? load4(row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
  }
}

// s = this thread's tile of Q K^T. Four columns of Q and K at a time: with 8 x 8 scores, 16 float4
// serve 256 FFMAs.
__device__ __forceinline__ void gemm_qk(
    float (&s)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
#pragma unroll 1
  for (int c = 0; c < D4; ++c) {
    float4 k[TILE_N];
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) k[j] = smem.K[x + j * THREADS_X][c];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float q_column[TILE_M], k_column[TILE_N];
      load_rows(q_column, smem.Q[4 * c + i], y);
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) k_column[j] = word(k[j], i);
      outer_product(s, q_column, k_column);
    }
  }
}

// acc += this thread's tile of P V.
__device__ __forceinline__ void gemm_pv(
    float (&acc)[TILE_M][TILE_D], const Shared& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[TILE_D];
    load_rows(p_column, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D; ++c) v_row[c] = word(smem.V[j][x + c / 4 * THREADS_X], c % 4);
    outer_product(acc, p_column, v_row);
  }
}
