// Register tiles in float32: a thread's tile of S and of O, products by FFMA, copies of tiles, the softmax of a row.
// Written out in 04_register_tiles.cu, explained in its notebook; rows have strides here. To be included after the sizes.

#pragma once
#include "softmax.cuh"

constexpr int THREADS_Y = THREADS / THREADS_X;
constexpr int TILE_M = BLOCK_M / THREADS_Y;  // rows of S and O per thread
constexpr int TILE_N = BLOCK_N / THREADS_X;  // columns of S per thread: x, x + THREADS_X, ...

constexpr int D4 = (HEAD_DIM + 3) / 4;                     // float4 per row; the last one is filled with zeros
constexpr int TILE_D4 = (D4 + THREADS_X - 1) / THREADS_X;  // float4 of a row of O per thread: x, x + THREADS_X, ...
constexpr int TILE_D = 4 * TILE_D4;
constexpr int COPIES = (BLOCK_N * D4 + THREADS - 1) / THREADS;  // float4 of a tile of K or V per thread
static_assert(THREADS % 32 == 0 && THREADS_X >= 4 && 32 % (2 * THREADS_X) == 0, "two rows' threads must fit a warp");
static_assert(
    BLOCK_M % (4 * THREADS_Y) == 0 && BLOCK_N % THREADS_X == 0, "each thread needs the same tile, of 4 rows or 8");

// Q and P are stored transposed: a thread reads four rows of one column as a float4. The padding avoids bank conflicts
// within a quarter of a warp, which reads 8 rows of K (an odd number of float4 apart) or stores 4 columns of P.
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  float4 K[BLOCK_N][D4 | 1], V[BLOCK_N][TILE_D4 * THREADS_X];
};

__device__ __forceinline__ float word(const float4& a, int i) {
  return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

// The row within the block that is row i of a thread's tile: groups of four, which one float4 holds.
__device__ __forceinline__ int row_of(int i, int y) { return i / 4 * (4 * THREADS_Y) + 4 * y + i % 4; }

// Words 4c .. 4c + 3 of a row; zeros past its end.
__device__ __forceinline__ float4 load4(const float* __restrict__ row, int c) {
#if VECTOR
  return reinterpret_cast<const float4*>(row)[c];
#else
  const int cols_left = HEAD_DIM - 4 * c;
  row += 4 * c;
  return make_float4(
      row[0], cols_left > 1 ? row[1] : 0.0f, cols_left > 2 ? row[2] : 0.0f, cols_left > 3 ? row[3] : 0.0f);
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

// The whole block copies rows first .. first + BLOCK_N - 1 of K or V. Rows from end on become zeros.
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
    // Asynchronous: uses no registers, and the thread waits only in wait_for_copies(). Past the end it reads 0 bytes.
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j][c]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(row + 4 * c),
                 "r"(in_bounds ? 16 : 0)
                 : "memory");
#else
    tile[j][c] = in_bounds ? load4(row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
  }
}

// Waits for this thread's own copies; the other threads' need a barrier as well.
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// tile += a b^T, column by column in serpentine order: down one column and up the next, so that consecutive FFMAs share
// an operand, which the compiler then marks .reuse: it is not read from the register file a second time.
template <int COLUMNS>
__device__ __forceinline__ void outer_product(
    float (&tile)[TILE_M][COLUMNS], const float (&a)[TILE_M], const float (&b)[COLUMNS]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int n = 0; n < TILE_M; ++n) {
      const int i = j % 2 == 0 ? n : TILE_M - 1 - n;
      tile[i][j] += a[i] * b[j];
    }
}

// This thread's rows of one column of Q or P.
__device__ __forceinline__ void load_rows(float (&a)[TILE_M], const float* column, int y) {
#pragma unroll
  for (int i = 0; i < TILE_M; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(column + row_of(i, y));
    a[i] = four.x;
    a[i + 1] = four.y;
    a[i + 2] = four.z;
    a[i + 3] = four.w;
  }
}

// s = this thread's tile of Q K^T. Four columns of Q and K at a time: with 8 x 8 scores, 16 float4 serve 256 FFMAs.
__device__ __forceinline__ void gemm_qk(float (&s)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
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
__device__ __forceinline__ void gemm_pv(float (&acc)[TILE_M][TILE_D], const Shared& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[TILE_D];
    load_rows(p_column, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D; ++c) v_row[c] = word(smem.V[j][x + c / 4 * THREADS_X], c % 4);
    outer_product(acc, p_column, v_row);
  }
}

// The maximum or the sum over the threads of a row, which differ in bit 0 of their lane and in bits 2 and up.
template <int LANES, typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
#pragma unroll
  for (int bit = 4; bit <= LANES; bit *= 2) a = op(a, __shfl_xor_sync(0xffffffff, a, bit));
  return a;
}

// One row: the new maximum, everything so far rescaled to it, and s, which was a row of S, becomes one of P.
__device__ __forceinline__ void online_softmax_row(float (&s)[TILE_N], float& m_i, float& l_i, float (&acc)[TILE_D]) {
  float m_new = m_i;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) m_new = fmaxf(m_new, s[j]);
  m_new = row_allreduce<THREADS_X>(m_new, [](float a, float b) { return fmaxf(a, b); });
  const float rescale = exp2f(m_i - m_new);  // 0 at the first key; 1 if the maximum stays
  m_i = m_new;
  l_i *= rescale;
#pragma unroll
  for (int c = 0; c < TILE_D; ++c) acc[c] *= rescale;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) {
    s[j] = exp2f(s[j] - m_new);
    l_i += s[j];
  }
}
