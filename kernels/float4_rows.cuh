// Rows of floats in global memory, four words at a time: loads, stores, and copies of tiles to shared
// memory. Written out in 05_heads_and_masks.cu and explained in 04b's and 05's notebooks. Include after
// the sizes.

#pragma once

#ifndef VECTOR
#define VECTOR (HEAD_DIM % 4 == 0)  // rows start at multiples of 16 bytes: float4 loads and stores
#endif
#ifndef ASYNC
#define ASYNC (VECTOR && __CUDA_ARCH__ >= 800)  // copies by cp.async, which Turing lacks
#endif
#include "register_tiles.cuh"  // word, wait_for_copies

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

// The block copies rows first .. first + ROWS - 1 of a tile; zeros from row `end` on.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_tile(
    float4 (&tile)[ROWS][WIDTH], const float* __restrict__ source, long long stride, int first,
    int end) {
#pragma unroll
  for (int i = 0; i < (ROWS * D4 + THREADS - 1) / THREADS; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / D4, c = e % D4;
    if (ROWS * D4 % THREADS != 0 && e >= ROWS * D4) break;
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
