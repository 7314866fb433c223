// What a warp of 07 does with its tile: S = Q K^T, masks, the online softmax, acc += P V. Written out
// in 07_mma.cu, where the sizes are explained, as in its notebook.

#pragma once
#include "half2.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "swizzle.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_M
#define BLOCK_M 128
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif
#ifndef WARPS
#define WARPS 4
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int TILES_M = BLOCK_M / (16 * WARPS);  // MMA atoms of 16 rows in a warp tile
constexpr int ROWS = 2 * TILES_M;                // per thread: g, g + 8, ... of its warp's
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // a row, in whole fragments
constexpr int CHUNKS = HEAD_DIM_PADDED / 8;                 // of 16 bytes in it
constexpr int SPAN = SWIZZLE_SPAN<CHUNKS>;                  // threads that copy a row
static_assert(HEAD_DIM % 8 == 0, "whole chunks");
static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "a warp has whole fragments");
#include "online_softmax.cuh"  // finds row_pair of ptx.cuh

using Statistics = float[ROWS];
using Maxima = RowMaxima<ROWS, BLOCK_N>;        // of the rows so far, in units of log2
using Scores = float[TILES_M][BLOCK_N / 8][4];  // accumulators of S: 16 rows and 8 keys each
using Output = float[TILES_M][HEAD_DIM_PADDED / 8][4];

#include "load_tile.cuh"  // this thread's share of a tile, by cp.async

// The address that this lane passes to ldmatrix for fragment (i, k) of a tile, 16 rows and columns.
// `lane` is that of fragment (0, 0), or what finds the element, such as a tensor of CuTe.
__device__ __forceinline__ unsigned fragment_address(unsigned lane, int i, int k) {
  return swizzle_advance<CHUNKS>(lane, 2 * k) + 32 * i * HEAD_DIM_PADDED;
}

template <typename Lane>
__device__ __forceinline__ unsigned fragment_address(const Lane& lane, int i, int k) {
  return smem_address(&lane(i, k));
}

// S = Q K^T for this warp's rows.
template <typename T, typename Lane, typename KeyLane>
__device__ __forceinline__ void gemm_qk(Scores& S, const Lane& q_lane, const KeyLane& k_lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM_PADDED / 16; ++k) {
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) ldmatrix_x4(a[m], fragment_address(q_lane, m, k));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, fragment_address(k_lane, n, k));
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), S[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), S[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += P V, 16 keys after 16 keys: tensor cores work on some while this thread weighs the next.
template <typename T, typename Lane>
__device__ __forceinline__ void gemm_pv(
    Output& acc, const Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    const Lane& v_lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k) {
    // The accumulators of 2 x 8 keys have the layout that the left operand of 16 keys needs.
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * m + i % 2;
        const float* s = row_pair(S, row, 2 * k + i / 2);
        const float x = exp2f(fmaf(s[0], softmax_scale_log2, -m_i[row]));
        const float y = exp2f(fmaf(s[1], softmax_scale_log2, -m_i[row]));
        l_i[row] += x + y;
        a[m][i] = pack(T(), x, y);
      }
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, fragment_address(v_lane, k, n));
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
