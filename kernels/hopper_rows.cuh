// What a warpgroup does with the accumulators of its 64 rows: masks, weights, the sums at the end,
// O. As in 07_mma.cu, whose notebook explains it. A thread has two rows, g and g + 8 of its warp's;
// its accumulator of key (or column) 8 n + 2 t + e of row g + 8 i is element 4 n + 2 i + e.

#pragma once
#include "half2.cuh"
#include "hopper_tiles.cuh"
#include "mask.cuh"
#include "softmax.cuh"

using Statistics = float[2];
using Scores = float[BLOCK_N / 2];
using Weights = unsigned[BLOCK_N / 16][4];  // P as the left operand of P V
using Output = float[HEAD_DIM_PADDED / 2];

// A key that a row does not see scores -inf, so that its weight is exactly 0. row_pos, the position
// of the thread's first row among the keys, and end are relative to the thread's first key.
__device__ __forceinline__ void mask(
    Scores& S, int row_pos, int end, const AttentionParams& params) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int window_lo = row_pos + 8 * i - params.window_left;
    const int window_hi = min(row_pos + 8 * i + params.window_right + 1, end);
#pragma unroll
    for (int keys = 0; keys < BLOCK_N; keys += 128) {
      const unsigned seen =
          keys_before<128>(window_hi - keys) & ~keys_before<128>(window_lo - keys);
#pragma unroll
      for (int n = keys / 8; n < BLOCK_N / 8 && n < keys / 8 + 16; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(seen >> (2 * (n - keys / 8) + e) & 1)) S[4 * n + 2 * i + e] = NEG_INF;
    }
  }
}

// The new maxima, and the factors by which everything so far has to be rescaled.
__device__ __forceinline__ void online_softmax_maxima(
    const Scores& S, Statistics& m_i, Statistics& l_i, Statistics& rescale,
    float softmax_scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    s_max = row_allreduce(s_max, [](float a, float b) { return fmaxf(a, b); });
    const float m_new = fmaxf(m_i[i], s_max * softmax_scale_log2);
    rescale[i] = exp2f(m_i[i] - m_new);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new;
    l_i[i] *= rescale[i];
  }
}

// The weights of keys 8 from .. 8 to - 1 in place of their scores, and their sums, of this lane's
// keys.
__device__ __forceinline__ void online_softmax_weights(
    Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2, int from, int to) {
#pragma unroll
  for (int n = from; n < to; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        S[4 * n + 2 * i + e] = weight(S[4 * n + 2 * i + e], softmax_scale_log2, m_i[i]);
      l_i[i] += S[4 * n + 2 * i] + S[4 * n + 2 * i + 1];
    }
}

__device__ __forceinline__ void rescale_output(Output& acc, const Statistics& rescale) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] *= rescale[i / 2 % 2];
}

// The weights of keys 8 from .. 8 to - 1 in 16 bits. The accumulators of 2 x 8 keys have the layout
// that the left operand of 16 keys needs.
template <typename T>
__device__ __forceinline__ void to_operand(Weights& P, const Scores& S, int from, int to) {
#pragma unroll
  for (int n = from; n < to; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      P[n / 2][n % 2 * 2 + i] = pack(T(), S[4 * n + 2 * i], S[4 * n + 2 * i + 1]);
}

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
  store_panels(staged, acc, inverse, out, params.o.row, tile.rows - warp_row);
}
