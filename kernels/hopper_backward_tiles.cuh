// What 13_hopper_backward.cu and its steps have in common: the sizes of tiles, the products of a
// warpgroup, and dQ after the loop. Notebook 13 explains the products. All are transposed but dV and
// dK:
//   S^T = K Q^T   dP^T = V dO^T   P^T = exp(S^T - lse)   dS^T = P^T (dP^T - delta)
//   dV += P^T dO   dK += dS^T Q   dQ^T += K^T dS^T   where delta = rowsum(dO O)
//
// Launch   hopper_backward: grid (ceil(longest kv_len / BLOCK_N), kv_heads, sequences), SHARED_BYTES
//          of dynamic shared memory; the other two: grid (ceil(longest q_len / BLOCK_M), heads,
//          sequences); block THREADS for all three; with SLOTS the grids of packed_tiles.cuh
// Shapes   as 08_backward_mma; Q, K, V and dO by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes
//          of 64 columns, and of BLOCK_M rows of Q and dO, BLOCK_N of K and V
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 08_backward_mma

#pragma once
#include "backward_params.cuh"
#include "half2.cuh"
#include "hopper.cuh"
#include "results.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row: a multiple of 8, at most 128
#endif
#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 128  // B_c, keys per block
#endif

constexpr int CONSUMERS = 2;                                // warpgroups that compute
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // TMA fills columns up with zeros
constexpr int PANELS = (HEAD_DIM + 63) / 64, DQ_COLUMNS = 64 * PANELS;
// dQ^T is computed, 64 columns of dQ by DQ_ROWS of its rows in a warpgroup: a panel of the columns, or
// where there is only one, half of the rows.
constexpr int DQ_ROWS = PANELS == 2 ? BLOCK_M : BLOCK_M / 2;
constexpr unsigned KEYS_BYTES = PANELS * BLOCK_N * 128, ROWS_BYTES = PANELS * BLOCK_M * 128;
constexpr unsigned DS_BYTES = 2 * BLOCK_M * BLOCK_N, DQ_BYTES = 4 * 64 * DQ_ROWS;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "16-byte chunks; dK and dV in registers");
static_assert(BLOCK_N == 64 * CONSUMERS, "64 keys per consumer");
static_assert(BLOCK_M % 16 == 0 && BLOCK_M <= 128, "a step of dV and dK has 16 rows");

#include "hopper_backward_schedule.cuh"  // with these sizes

using Weights = unsigned[BLOCK_M / 16][4];   // P^T or dS^T, as a left operand
using KeyRows = float[HEAD_DIM_PADDED / 2];  // dK or dV, of 64 keys

// Issues dV += P^T dO or dK += dS^T Q, 16 rows at a time.
template <typename T>
__device__ __forceinline__ void start_keys(
    KeyRows& acc, const Weights& P, unsigned long long rows) {
  wgmma_registers(acc);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_M / 16; ++i) wgmma_rs(T(), acc, P[i], advance_rows(rows, i), true);
  wgmma_commit();
}

// Issues dQ^T = K^T dS^T over the keys of both warpgroups, 16 at a time: they are rows of K, and columns
// of dS, whose panels have 64 keys.
template <typename T>
__device__ __forceinline__ void start_dq(
    float (&dQ)[DQ_ROWS / 2], unsigned long long k, unsigned long long dS) {
  wgmma_registers(dQ);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
    wgmma_ss<1, 0>(T(), dQ, advance_rows(k, i), advance_columns(dS, i, BLOCK_M), i > 0);
  wgmma_commit();
}

// dQ = softmax_scale dQ_accum: from the order of the fragments of dQ^T to rows, 16 columns of two rows
// at a time, by THREADS threads.
template <int THREADS, typename T>
__device__ __forceinline__ void convert_fragments(
    const RowBlock& block, const float* dQ_accum, T* dQ, const BackwardParams& params) {
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  dQ += block.of_rows(params.d_q);
  dQ_accum += block.slot(tiles) * BLOCK_M * DQ_COLUMNS;
  for (int i = threadIdx.x; i < CONSUMERS * DQ_ROWS / 8 * 16; i += THREADS) {
    const int t = i % 4, warp = i / 4 % 4, n = i / 16 % (DQ_ROWS / 8), consumer = i / (2 * DQ_ROWS);
    const int row = 8 * n + 2 * t + (PANELS == 2 ? 0 : consumer * DQ_ROWS);
    const int column = 16 * warp + (PANELS == 2 ? 64 * consumer : 0);
    float4 x[8];  // of lane 4 g + t: (row, g), (row + 1, g), (row, g + 8), (row + 1, g + 8)
#pragma unroll
    for (int g = 0; g < 8; ++g)
      x[g] = reinterpret_cast<const float4*>(
          dQ_accum)[(consumer * DQ_ROWS / 8 + n) * 128 + 32 * warp + 4 * g + t];
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Pair<T> out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float *a = &x[2 * j].x, *b = &x[2 * j + 1].x;
          out[j] = pack(
              T(), a[2 * h + e] * params.forward.softmax_scale,
              b[2 * h + e] * params.forward.softmax_scale);
        }
        if (block.first_row + row + e < block.q_len && column + 8 * h < HEAD_DIM)
          store8(dQ + (row + e) * params.d_q.row + column + 8 * h, out);
      }
  }
}
