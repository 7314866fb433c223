// The end of a warpgroup's 64 rows: their sums and lse, and the stores of O. As in 07_mma.cu, whose
// notebook explains it.

#pragma once
#include "half2.cuh"
#include "hopper_softmax.cuh"
#include "hopper_tiles.cuh"
#include "softmax.cuh"
#include "tile_io.cuh"

// lse of a warp's 16 rows, from row `warp_row` of the tile on, and the factors that turn O's sums
// into weighted means.
__device__ __forceinline__ void finish_rows(
    const Tile& tile, int warp_row, const Statistics& m_i, const Statistics& l_i,
    Statistics& inverse, float* lse, bool packed, const AttentionParams& params) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    inverse[i] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);  // no key seen: zeros, lse = -inf
    const int r = warp_row + 8 * i + threadIdx.x % 32 / 4;
    if (lse && threadIdx.x % 4 == 0 && r < tile.rows) {
      const long long head_row = (long long)(packed ? 0 : tile.sequence) * params.heads + tile.head;
      lse[head_row * params.N + tile.row + r] = LN_2 * (m_i[i] + log2f(sum));
    }
  }
}

// O of a warp's 16 rows, as the fragments have them: 4 bytes a store.
template <typename T>
__device__ __forceinline__ void store_fragments(
    const Tile& tile, int warp_row, const Output& acc, const Statistics& inverse, T* O, bool packed,
    const AttentionParams& params) {
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int batch = packed ? 0 : tile.sequence;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = warp_row + 8 * i + g;
    if (r >= tile.rows) continue;
    T* const out = O + batch * params.o.batch + (tile.row + r) * params.o.row +
                   tile.head * params.o.head + 2 * t;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      *reinterpret_cast<unsigned*>(out + 8 * n) =
          pack(T(), acc[4 * n + 2 * i] * inverse[i], acc[4 * n + 2 * i + 1] * inverse[i]);
  }
}

// O of a warp's 16 rows, by way of `staged`.
template <typename T>
__device__ __forceinline__ void store_rows(
    const Tile& tile, int warp_row, const Output& acc, const Statistics& inverse,
    unsigned char* staged, T* O, bool packed, const AttentionParams& params) {
  T* const out = O + (packed ? 0 : tile.sequence) * params.o.batch +
                 (tile.row + warp_row) * params.o.row + tile.head * params.o.head;
  store_panels(staged, acc, inverse, out, params.o.row, tile.rows - warp_row, HEAD_DIM);
}
