// Scores of any size, for the online softmax of 07, 10, 12 and 14. A weight is
// 2^(softmax_scale_log2 s - m_i), in one FFMA. Its product is exact, while m_i, that of the row's
// largest s, is rounded: from LARGE on by more than a weight in float16. Such scores give way to their
// distances from the maximum, both rounded alike, divided by the scale; m_i becomes 0. Explained in
// 07's notebook. To be included after row_pair(S, i, n), which finds keys 8 n and 8 n + 1
// of a thread in row i of S.

#pragma once
#include "softmax.cuh"

#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8.0f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

constexpr float LARGE = 0x1p13f;  // of a float from here on, 2^-11 is rounded away

__device__ __forceinline__ void note_large(bool& large, float maximum) {
  large |= maximum != M_INIT && fabsf(maximum) >= LARGE;
}

// The maxima of a thread's rows so far, in units of log2; KEYS: of a tile.
template <int ROWS, int KEYS>
struct RowMaxima {
  float m_i[ROWS];    // what is taken from scores: 0 where they are large
  float base[ROWS];   // what has been taken from them before: 0 where they are not
  float limit[ROWS];  // a score above it moves the maximum; where scores are large, any does

  __device__ __forceinline__ float get(int i) const { return m_i[i] + base[i]; }

  // large: one of the maxima is. Returns whether one of the warp's is.
  template <typename Scores>
  __device__ __forceinline__ bool set(
      const float (&m_new)[ROWS], bool large, Scores& S, float softmax_scale_log2) {
    large = __any_sync(0xffffffff, large);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      base[i] = large ? m_new[i] : 0.0f;
      m_i[i] = large ? 0.0f : m_new[i];
      limit[i] = large ? NEG_INF : m_new[i] + RESCALE_THRESHOLD;
    }
    if (!large) return false;
    const float inverse = __frcp_rn(softmax_scale_log2);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = row_pair(S, i, n)[e];
          s = (__fmul_rn(s, softmax_scale_log2) - m_new[i]) * inverse;
        }
    return true;
  }
};
