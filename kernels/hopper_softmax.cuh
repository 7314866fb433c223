// The online softmax of a warpgroup's 64 rows, in the accumulators of wgmma: masks, maxima, weights.
// As in 07_mma.cu, whose notebook explains it. A thread has two rows, g and g + 8 of its warp's; its
// accumulator of key (or column) 8 n + 2 t + e of row g + 8 i is element 4 n + 2 i + e.

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
