// The online softmax of 07: maxima that move when it pays, and scores of any size. Written out in
// 07_mma.cu and explained in its notebook. row_pair(S, i, n) finds two neighbours of row i in S and in
// acc.

#pragma once
#include "any_size.cuh"
#include "softmax.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row
#endif

// Everything so far is rescaled to the new maxima, but only when some score exceeds its limit, so
// that its weight would be above 2^RESCALE_THRESHOLD: smaller ones do no harm, because the division
// by l_i cancels them.
template <int ROWS, int KEYS, typename Scores, typename Output>
__device__ __forceinline__ void online_softmax_rescale(
    Scores& S, RowMaxima<ROWS, KEYS>& maxima, float (&l_i)[ROWS], Output& acc,
    float softmax_scale_log2) {
  float m_new[ROWS];
  bool exceeded = false, large = false;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(row_pair(S, i, n)[0], row_pair(S, i, n)[1]));
    m_new[i] = s_max * softmax_scale_log2;
    exceeded |= m_new[i] > maxima.limit[i];
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float m_old = maxima.get(i);
    m_new[i] = row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    note_large(large, m_new[i]);                    // of scores of any size, see any_size.cuh
    const float rescale = exp2f(m_old - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    l_i[i] *= rescale;
#pragma unroll
    for (int n = 0; n < (HEAD_DIM + 15) / 16 * 2; ++n) {
      row_pair(acc, i, n)[0] *= rescale;
      row_pair(acc, i, n)[1] *= rescale;
    }
  }
  maxima.set(m_new, large, S, softmax_scale_log2);  // limits: m_new + RESCALE_THRESHOLD
}
