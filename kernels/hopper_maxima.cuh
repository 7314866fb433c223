// The maxima of 10, which move when a score exceeds its row's limit, for scores of any size.
// As in 07_mma.cu, whose notebook explains it.

#pragma once
#include "hopper_softmax.cuh"

// Keys 8 n and 8 n + 1 of this thread in row i, for any_size.cuh.
__device__ __forceinline__ float* row_pair(Scores& S, int i, int n) { return S + 4 * n + 2 * i; }
#include "any_size.cuh"
using Maxima = RowMaxima<2, BLOCK_N>;

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
    const float m_old = maxima.get(i);
    m_new[i] = row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    note_large(large, m_new[i]);
    rescale[i] = exp2f(m_old - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    l_i[i] *= rescale[i];
  }
  // exceeds_limit takes scores below 0 for 0: that is the limit if weights up to it fit float16.
  if (!maxima.set(m_new, large, S, softmax_scale_log2))
#pragma unroll
    for (int i = 0; i < 2; ++i)
      maxima.limit[i] = fmaxf(maxima.limit[i], fminf(m_new[i] + 15.0f, 0.0f));
  return true;
}
