// Copies of tiles into swizzled shared memory by cp.async. Written out in
// steps/07_13_addresses_of_copies.cu.

#pragma once
#include "ptx.cuh"
#include "swizzle.cuh"

// This thread's share of a tile, which THREADS threads copy; its rows have CHUNKS chunks in shared
// memory. SPAN threads copy a row: `target` and `source` are the thread's first chunk, rows_left is
// how many rows there are from there on. What is past the end, or past `columns`, becomes zeros.
template <int TILE_ROWS, int CHUNKS, int THREADS, typename T>
__device__ __forceinline__ void load_tile(
    unsigned target, const T* __restrict__ source, long long stride, int rows_left, int columns) {
  constexpr int SPAN = SWIZZLE_SPAN<CHUNKS>, STEP = THREADS / SPAN, ELEMENTS = 16 / sizeof(T);
  static_assert(STEP % 8 == 0, "a thread's rows must be multiples of 8 apart to share one swizzle");
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i += STEP, source += STEP * stride) {
    if (i + STEP > TILE_ROWS && i + threadIdx.x / SPAN >= TILE_ROWS) break;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += SPAN) {
      const bool in_bounds = i < rows_left && ELEMENTS * int(threadIdx.x % SPAN + j) < columns;
      cp_async(target + 16 * (i * CHUNKS + j), source + ELEMENTS * j, in_bounds ? 16 : 0);
    }
  }
}
