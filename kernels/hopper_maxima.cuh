// The maxima of 10, which move when a score exceeds its row's limit, for scores of any size.
// As in 07_mma.cu, whose notebook explains it.

#pragma once
#include "hopper_softmax.cuh"

#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i follows only maxima that exceed it by more, in powers of 2
#endif
constexpr float LARGE = 0x1p13f;  // of a float from here on, 2^-11 is rounded away

// The rows' maxima so far, in units of log2: m_i + base. One of them is 0: m_i where scores are so
// large that rounding it would matter. See RowMaxima::set in any_size.cuh.
struct Maxima {
  Statistics m_i, base;
  Statistics limit;  // a score above it moves the maximum; where they are large, any does
};

// Moves the maxima if a score exceeds its limit, for scores of any size. Returns whether one does;
// everything so far then has to be multiplied by `rescale`.
__device__ __forceinline__ bool move_maxima(
    Scores& S, Maxima& maxima, Statistics& l_i, Statistics& rescale, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeds = false, large = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    m_new[i] = s_max * softmax_scale_log2;
    exceeds |= m_new[i] > maxima.limit[i];
  }
  if (!__any_sync(0xffffffff, exceeds))
    return false;  // they are negative: exceeds_limit takes them for 0
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float m_old = maxima.m_i[i] + maxima.base[i];
    m_new[i] = row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    large |= m_new[i] != M_INIT && fabsf(m_new[i]) >= LARGE;
    rescale[i] = exp2f(m_old - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    l_i[i] *= rescale[i];
  }
  large = __any_sync(0xffffffff, large);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    maxima.m_i[i] = large ? 0.0f : m_new[i];
    maxima.base[i] = large ? m_new[i] : 0.0f;
    // exceeds_limit takes scores below 0 for 0: that is the limit if weights up to it fit float16.
    const float limit = fmaxf(m_new[i] + RESCALE_THRESHOLD, fminf(m_new[i] + 15.0f, 0.0f));
    maxima.limit[i] = large ? NEG_INF : limit;
  }
  if (!large) return true;
  const float inverse = __frcp_rn(softmax_scale_log2);
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i)
    S[i] = (__fmul_rn(S[i], softmax_scale_log2) - m_new[i / 2 % 2]) * inverse;
  return true;
}
