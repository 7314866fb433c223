// The end of a consumer's rows in 16: O, whose columns lie in the accumulators in V^T's order of rows.

#pragma once
#include "fp8_tiles.cuh"
#include "hopper_epilogue.cuh"  // lse
#include "results.cuh"

// Stores a warp's 16 rows of O: V^T's rows are such that a lane has four neighbours, of each 16
// columns those from 4 t on.
template <typename T>
__device__ __forceinline__ void store_quads(
    const Tile& tile, int warp_row, const Output& acc, const Statistics& factor, T* O, bool packed,
    const AttentionParams& params) {
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  T* const out = O + (packed ? 0 : tile.sequence) * params.o.batch +
                 (tile.row + warp_row + g) * params.o.row + tile.head * params.o.head + 4 * t;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (warp_row + g + 8 * i >= tile.rows) continue;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      const float* const o = acc + 8 * n + 2 * i;
      store4(
          out + 8 * i * params.o.row + 16 * n, o[0] * factor[i], o[4] * factor[i], o[1] * factor[i],
          o[5] * factor[i]);
    }
  }
}
