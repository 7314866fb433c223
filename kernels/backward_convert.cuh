// What 08_backward_mma.cu and its steps do for each tile of rows after the loop of five products: dQ
// from dQ_accum. Notebook 08 explains the order of the fragments.

#pragma once
#include "backward_tiles.cuh"
#include "results.cuh"

// dQ = softmax_scale dQ_accum, whose tiles are rows of DQ_COLUMNS.
template <typename T>
__device__ __forceinline__ void convert_rows(
    const RowBlock& block, const float* dQ_accum, T* dQ, const BackwardParams& params) {
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  dQ += block.of_rows(params.d_q);
  dQ_accum += block.slot(tiles) * BLOCK_M * DQ_COLUMNS;
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK_M * (HEAD_DIM / 8); i += THREADS) {
    const int chunk = i % (HEAD_DIM / 8), row = i / (HEAD_DIM / 8);
    const float* const x = dQ_accum + row * DQ_COLUMNS + 8 * chunk;
    Pair<T> out[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
      out[t] = pack(
          T(), x[2 * t] * params.forward.softmax_scale,
          x[2 * t + 1] * params.forward.softmax_scale);
    if (block.first_row + row < block.q_len) store8(dQ + row * params.d_q.row + 8 * chunk, out);
  }
}

// dQ = softmax_scale dQ_accum, in rows again. A tile of dQ_accum is in the order of the fragments:
// those of the first warp come first, and the four elements of a lane are neighbours or 32 apart.
template <bool NEIGHBOURS, typename T>
__device__ __forceinline__ void convert_fragments(
    const RowBlock& block, const float* dQ_accum, T* dQ, const BackwardParams& params) {
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  dQ += block.of_rows(params.d_q);
  dQ_accum += block.slot(tiles) * BLOCK_M * DQ_COLUMNS;
  // A thread has 8 columns of two rows, 8 apart: the elements of four lanes of a fragment.
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK_M / 2 * (HEAD_DIM / 8); i += THREADS) {
    const int chunk = i % (HEAD_DIM / 8), g = i / (HEAD_DIM / 8) % 8, band = i / (HEAD_DIM / 8) / 8;
    const int row = 16 * band + g, column_block = chunk / 2;
    const int warp = band / DQ_TILES + WARPS_DQ * (column_block % WARPS_DQ_D), m = band % DQ_TILES;
    const int fragment =
        (warp * DQ_TILES + m) * 2 * DQ_BLOCKS + column_block / WARPS_DQ_D * 2 + chunk % 2;
    float x[4][4];  // of lane t and element i, or of i and t
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float4*>(x[j]) = reinterpret_cast<const float4*>(
          dQ_accum)[32 * fragment + (NEIGHBOURS ? 4 * g + j : 8 * j + g)];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Pair<T> out[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float a = NEIGHBOURS ? x[t][2 * h] : x[2 * h][t];
        const float b = NEIGHBOURS ? x[t][2 * h + 1] : x[2 * h + 1][t];
        out[t] = pack(T(), a * params.forward.softmax_scale, b * params.forward.softmax_scale);
      }
      if (block.first_row + row + 8 * h < block.q_len)
        store8(dQ + (row + 8 * h) * params.d_q.row + 8 * chunk, out);
    }
  }
}
