// Tiles in panels of 64 columns, between global and shared memory: copies by TMA, zeros in place of
// rows, stores of accumulators. PANELS of a tile: how many hold its columns.

#pragma once
#include "hopper.cuh"
#include "results.cuh"

// All panels of ROWS rows from global to shared memory, issued by one thread.
template <int ROWS, int PANELS>
__device__ __forceinline__ void tma_load_panels(
    unsigned target, const TensorMap& map, unsigned barrier, int row, int head, int batch) {
  for (int panel = 0; panel < PANELS; ++panel)
    tma_load(target + panel * ROWS * 128, map, barrier, panel * PANEL_COLUMNS, row, head, batch);
}

// Rows `from` .. ROWS - 1 of a tile become zeros: where sequences are packed, they belong to the
// next one. Their weights are 0, but 0 times inf would be NaN. Done by `threads` threads, of which
// this one is number `thread`; they need a barrier before the product.
template <int ROWS, int PANELS>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int from, int thread, int threads) {
  for (int i = max(from, 0) * 8 + thread; i < ROWS * 8; i += threads)
    for (int panel = 0; panel < PANELS; ++panel)
      *reinterpret_cast<uint4*>(tile + panel * ROWS * 128 + 16 * i) = uint4{};
  async_proxy_fence();
}

// The accumulators of a warp's 16 rows, times `factor`, as rows of T; only the first `rows` and
// `columns` are stored. 64 columns at a time go through `staged`, 16 rows of 128 bytes in shared
// memory, swizzled: stmatrix writes the fragments, then 8 lanes copy each row.
template <typename T, int N>
__device__ __forceinline__ void store_panels(
    unsigned char* staged, const float (&acc)[N], const float (&factor)[2], T* out,
    long long row_stride, int rows, int columns) {
  const int lane_id = threadIdx.x % 32;
  const int chunk = lane_id % 8, row = lane_id / 8;  // 16 bytes of the row that this lane copies
  out += row * row_stride + 8 * chunk;
#pragma unroll
  for (int panel = 0; panel < (N + 31) / 32; ++panel) {
    __syncwarp();  // hazard: other lanes still copy the previous panel
#pragma unroll
    for (int n = 8 * panel; n < 8 * panel + 8 && n < N / 4; n += 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] =
            pack(T(), acc[4 * n + 2 * i] * factor[i % 2], acc[4 * n + 2 * i + 1] * factor[i % 2]);
      stmatrix_x4(
          smem_address(staged) + lane_id % 16 * 128 + ((n % 8 + lane_id / 16) ^ lane_id % 8) * 16,
          words[0], words[1], words[2], words[3]);
    }
    __syncwarp();  // hazard: other lanes have not stored their rows yet
#pragma unroll
    for (int r = 0; r < 16; r += 4)
      if (row + r < rows && 64 * panel + 8 * chunk < columns)
        *reinterpret_cast<uint4*>(out + r * row_stride + 64 * panel) =
            *reinterpret_cast<const uint4*>(
                staged + (row + r) * 128 + (chunk ^ (row + r) % 8) * 16);
  }
}

// The same in float32 from registers: four lanes have 32 bytes of a row.
template <int N>
__device__ __forceinline__ void store_panels(
    unsigned char*, const float (&acc)[N], const float (&factor)[2], float* out,
    long long row_stride, int rows, int columns) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
      if (g + 8 * i < rows && 8 * n < columns)
        store2(
            out + (g + 8 * i) * row_stride + 8 * n + 2 * t, acc[4 * n + 2 * i] * factor[i],
            acc[4 * n + 2 * i + 1] * factor[i]);
}
