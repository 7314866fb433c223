// What 08_backward_mma.cu and its steps do for each tile of rows before and after the loop of five
// products: lse and delta of the rows, zeros in dQ_accum; and dQ from dQ_accum. Notebook 08
// explains delta and the order of the fragments.

#pragma once
#include "backward_tiles.cuh"

// The tile of rows of a block: grid (tiles of the longest sequence, heads, sequences), or
// with SLOTS that of packed_tiles.cuh.
struct RowBlock {
  int tile, head, sequence, first_row;
  bool packed;
  int q_first, q_len;

  __device__ __forceinline__ RowBlock(const AttentionParams& forward, const int* cu_seqlens_q) {
    tile = blockIdx.x;
    head = blockIdx.y;
    sequence = blockIdx.z;
    if (SLOTS) find_tile(tile, sequence, BLOCK_M, forward.sequences, cu_seqlens_q);
    first_row = tile * BLOCK_M;
    packed = cu_seqlens_q != nullptr;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
  }

  // The number of the tile in the scratch arrays.
  __device__ __forceinline__ long long slot(const RowTiles& tiles) const {
    return (long long)head * tiles.of_head + tiles.first + (unsigned)tile;
  }
  // The first row in Q, O, dO or dQ, in elements.
  __device__ __forceinline__ long long of_rows(const Strides& q) const {
    return sequence * q.batch + (q_first + first_row) * q.row + head * q.head;
  }
};

// lse_delta: for each tile of rows, the log-sum-exp in units of log2 and then delta = rowsum(dO O).
// dQ_accum becomes zero, and so does the tile's turn (TURNS).
template <bool TURNS = false, typename T>
__device__ __forceinline__ void prepare_rows(
    const RowBlock& block, const RowTiles& tiles, const T* O, const T* dO, const float* lse,
    float* lse_delta, float* dQ_accum, const BackwardParams& params, int* turns = nullptr) {
  const AttentionParams& forward = params.forward;
  const long long slot = block.slot(tiles);
  O += block.of_rows(forward.o);
  dO += block.of_rows(params.d_o);
  lse += ((long long)(block.packed ? 0 : block.sequence) * forward.heads + block.head) * forward.N +
         block.q_first + block.first_row;
  lse_delta += slot * 2 * BLOCK_M;
  dQ_accum += slot * BLOCK_M * DQ_COLUMNS;
  if (TURNS && threadIdx.x == 0) turns[slot] = 0;
  for (int i = threadIdx.x; i < BLOCK_M * DQ_COLUMNS / 4; i += THREADS)
    reinterpret_cast<float4*>(dQ_accum)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  constexpr int LANES = 8;  // of a row
#pragma unroll
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += THREADS / LANES) {
    const bool exists = block.first_row + row < block.q_len;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = threadIdx.x % LANES; exists && chunk < HEAD_DIM / 8; chunk += LANES) {
      const uint4 x = *reinterpret_cast<const uint4*>(O + row * forward.o.row + 8 * chunk);
      const uint4 y = *reinterpret_cast<const uint4*>(dO + row * params.d_o.row + 8 * chunk);
      const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack(T(), xs[i]), b = unpack(T(), ys[i]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % LANES == 0) {
      const float l = exists ? lse[row] : NEG_INF;
      // A row that sees no key: its weights are exp(-inf) = 0. From 2^25 on lse is rounded by so
      // many powers of 2 that weights could overflow float16: it is raised by more than that.
      const float l_log2 = l * LOG2_E, raised = fabsf(l_log2) < 0x1p25f ? 0.0f : 0x1p-21f;
      lse_delta[row] = l == NEG_INF ? -NEG_INF : l_log2 + raised * fabsf(l_log2);
      lse_delta[BLOCK_M + row] = sum;
    }
  }
}

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
    unsigned out[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
      out[t] = pack(
          T(), x[2 * t] * params.forward.softmax_scale,
          x[2 * t + 1] * params.forward.softmax_scale);
    if (block.first_row + row < block.q_len)
      *reinterpret_cast<uint4*>(dQ + row * params.d_q.row + 8 * chunk) =
          make_uint4(out[0], out[1], out[2], out[3]);
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
      unsigned out[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float a = NEIGHBOURS ? x[t][2 * h] : x[2 * h][t];
        const float b = NEIGHBOURS ? x[t][2 * h + 1] : x[2 * h + 1][t];
        out[t] = pack(T(), a * params.forward.softmax_scale, b * params.forward.softmax_scale);
      }
      if (block.first_row + row + 8 * h < block.q_len)
        *reinterpret_cast<uint4*>(dQ + (row + 8 * h) * params.d_q.row + 8 * chunk) =
            make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}
