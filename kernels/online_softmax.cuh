// The online softmax of 07: maxima that move when it pays, and scores of any size. Written out in
// 07_mma.cu and explained in its notebook. To be included after the sizes, ROWS of a thread among
// them; row_pair(S, i, n) finds two neighbours of row i in S and in acc.

#pragma once
#include "softmax.cuh"

#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8.0f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

constexpr float LARGE = 0x1p13f;  // of a float from here on, 2^-11 is rounded away
using Statistics = float[ROWS];
struct Maxima {      // of the rows so far, in units of log2: m_i + base
  Statistics m_i;    // 0 where the scores are large
  Statistics base;   // 0 where they are not
  Statistics limit;  // a score above it moves the maximum; where they are large, any does
};

// A weight is 2^(softmax_scale_log2 s - m_i), in one FFMA. Its product is exact, while m_i, that of
// the row's largest s, is rounded: from LARGE on by more than a weight in float16. Such scores give
// way to their distances from the maximum, both rounded alike, divided by the scale; m_i becomes 0.
template <typename Scores>
__device__ __forceinline__ void subtract_maxima(
    Scores& S, const Statistics& maximum, float softmax_scale_log2) {
  const float inverse = __frcp_rn(softmax_scale_log2);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = row_pair(S, i, n)[e];
        s = (__fmul_rn(s, softmax_scale_log2) - maximum[i]) * inverse;
      }
}

// Everything so far is rescaled to the new maxima, but only when some score exceeds its limit, so
// that its weight would be above 2^RESCALE_THRESHOLD: smaller ones do no harm, because the division
// by l_i cancels them.
template <typename Scores, typename Output>
__device__ __forceinline__ void online_softmax_rescale(
    Scores& S, Maxima& maxima, Statistics& l_i, Output& acc, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false, large = false;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(row_pair(S, i, n)[0], row_pair(S, i, n)[1]));
    m_new[i] = s_max * softmax_scale_log2;
    exceeded |= m_new[i] > maxima.limit[i];
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float m_old = maxima.m_i[i] + maxima.base[i];  // one of them is 0
    m_new[i] = row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    large |= m_new[i] != M_INIT && fabsf(m_new[i]) >= LARGE;
    const float rescale = exp2f(m_old - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    l_i[i] *= rescale;
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 8; ++n) {
      row_pair(acc, i, n)[0] *= rescale;
      row_pair(acc, i, n)[1] *= rescale;
    }
  }
  large = __any_sync(0xffffffff, large);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    maxima.base[i] = large ? m_new[i] : 0.0f;
    maxima.m_i[i] = large ? 0.0f : m_new[i];
    maxima.limit[i] = large ? NEG_INF : m_new[i] + RESCALE_THRESHOLD;
  }
  if (large) subtract_maxima(S, m_new, softmax_scale_log2);
}
