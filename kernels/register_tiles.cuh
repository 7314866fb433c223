// Register tiles: a thread's rows and columns of S and O, outer products of columns, the softmax of
// a row. Written out in 04_register_tiles.cu, where the sizes are explained, as in its notebook.

#pragma once
#include "softmax.cuh"

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 32
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef THREADS
#define THREADS 128
#endif
#ifndef THREADS_X
#define THREADS_X 8
#endif
#ifndef ASYNC
#define ASYNC 0
#endif

constexpr int THREADS_Y = THREADS / THREADS_X;
constexpr int TILE_M = BLOCK_M / THREADS_Y;  // rows of S and O per thread
constexpr int TILE_N = BLOCK_N / THREADS_X;  // columns of S per thread: x, x + THREADS_X, ...

constexpr int D4 = (HEAD_DIM + 3) / 4;                     // float4 per row, padded with zeros
constexpr int TILE_D4 = (D4 + THREADS_X - 1) / THREADS_X;  // float4 of O per thread and row
constexpr int TILE_D = 4 * TILE_D4;
static_assert(
    THREADS % 32 == 0 && BLOCK_M % (4 * THREADS_Y) == 0 && BLOCK_N % THREADS_X == 0,
    "each thread needs the same tile, of 4 rows or 8");

__device__ __forceinline__ float word(const float4& a, int i) {
  return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

// The row within the block that is row i of a thread's tile: groups of four, a float4.
__device__ __forceinline__ int row_of(int i, int y) {
  return i / 4 * (4 * THREADS_Y) + 4 * y + i % 4;
}

// Waits for this thread's own copies; the other threads' need a barrier as well.
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// tile += a b^T, column by column in serpentine order: down one column and up the next, so that
// consecutive FFMAs share an operand, which the compiler then marks .reuse: it is not read from the
// register file a second time.
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

// The maximum or the sum over the threads of a row, which differ in bit 0 of their lane and in bits
// 2 and up.
template <int LANES, typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
  static_assert(LANES >= 4 && 32 % (2 * LANES) == 0, "two rows' threads must fit a warp");
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
#pragma unroll
  for (int bit = 4; bit <= LANES; bit *= 2) a = op(a, __shfl_xor_sync(0xffffffff, a, bit));
  return a;
}

// One row: the new maximum, everything so far rescaled to it, and s, which was a row of S, becomes
// one of P.
template <int COLUMNS>
__device__ __forceinline__ void online_softmax_row(
    float (&s)[COLUMNS], float& m_i, float& l_i, float (&acc)[TILE_D]) {
  float m_new = m_i;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) m_new = fmaxf(m_new, s[j]);
  m_new = row_allreduce<THREADS_X>(m_new, [](float a, float b) { return fmaxf(a, b); });
  const float rescale = exp2f(m_i - m_new);  // 0 at the first key; 1 if the maximum stays
  m_i = m_new;
  l_i *= rescale;
#pragma unroll
  for (int c = 0; c < TILE_D; ++c) acc[c] *= rescale;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    s[j] = exp2f(s[j] - m_new);
    l_i += s[j];
  }
}
