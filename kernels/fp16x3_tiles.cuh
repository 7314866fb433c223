// 15 by fp16: three products in place of one, the online softmax. For 15_fp16x3.cu and the
// step before it; explained in 15's notebook.

#pragma once
#include "fp16x3_split.cuh"
#include "hopper_softmax.cuh"
#include "hopper_tiles.cuh"

#ifndef STAGES
#define STAGES 5  // tiles in shared memory, of K and V in turn
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i follows only maxima that exceed it by more, in powers of 2
#endif
static_assert(HEAD_DIM <= 128, "two accumulators of O must fit the registers");

constexpr int WEIGHT_EXPONENT = 7;  // of the largest weight; with RESCALE_THRESHOLD below 2^15
static_assert(WEIGHT_EXPONENT + RESCALE_THRESHOLD <= 15, "weights must fit fp16");

// S += Q K^T, or S = Q K^T if `accumulate` is false, for the warpgroup's 64 rows.
__device__ __forceinline__ void add_qk(
    Scores& S, unsigned long long q, unsigned long long k, bool accumulate) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(
        __half(), S, advance_columns(q, i, 64), advance_columns(k, i, BLOCK_N),
        accumulate || i > 0);
}

// Issues S = Q K^T. Each addition cuts some bits off its sum: off that of the small products, bits
// that are worth less. So those come first. Behind each tile of hi is that of lo.
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  const unsigned long long q_lo = advance_tiles(q, 1, Q_BYTES);
  const unsigned long long k_lo = advance_tiles(k, 1, TILE_BYTES);
  wgmma_registers(S);
  wgmma_fence();
  add_qk(S, q_lo, k, false);
  add_qk(S, q, k_lo, true);
  add_qk(S, q, k, true);
  wgmma_commit();
}

__device__ __forceinline__ void add_pv(
    Output& O, const Weights& P, unsigned long long v, bool accumulate) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
    wgmma_rs(__half(), O, P[i], advance_rows(v, i), accumulate || i > 0);
}

// Issues O_tile = P V, of this tile of keys alone.
__device__ __forceinline__ void start_pv(
    Output& O_tile, const Weights& P_hi, const Weights& P_lo, unsigned long long v) {
  const unsigned long long v_lo = advance_tiles(v, 1, TILE_BYTES);
  wgmma_registers(O_tile);
  wgmma_fence();
  add_pv(O_tile, P_lo, v, false);
  add_pv(O_tile, P_hi, v_lo, true);
  add_pv(O_tile, P_hi, v, true);
  wgmma_commit();
}

// Everything so far is rescaled to the new maxima, but only when some score exceeds m_i by more than
// RESCALE_THRESHOLD (07). m_i is in units of log2, WEIGHT_EXPONENT below a maximum.
__device__ __forceinline__ void online_softmax_rescale(
    const Scores& S, Statistics& m_i, Statistics& l_i, Output& acc, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    m_new[i] = fmaxf(m_i[i], s_max * softmax_scale_log2 - WEIGHT_EXPONENT);
    exceeded |= m_new[i] > m_i[i] + RESCALE_THRESHOLD;
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
  Statistics rescale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
    rescale[i] = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new[i];
    l_i[i] *= rescale[i];
  }
  rescale_output(acc, rescale);
}
