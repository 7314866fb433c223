// The tiles of 16: their sizes, the two products, weights in e4m3. For 16_fp8.cu and its steps.

#pragma once
#include "fp8.cuh"
#include "hopper_softmax.cuh"
#include "hopper_tiles.cuh"

#ifndef STAGES
#define STAGES 2  // tiles of K, and of V^T, in shared memory
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 0.75f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

#ifndef POLYNOMIALS
#define POLYNOMIALS 0  // of 8 groups of 8 keys, so many have weights without exp2
#endif
#ifndef EXP_TURNS
#define EXP_TURNS 0  // 1: the consumers take turns at exp2
#endif
#ifndef GROUP
#define GROUP 4  // groups of 8 keys whose weights are computed, then rounded
#endif

constexpr int WEIGHT_EXPONENT = 8;  // of the largest weight: 2^(8 + 0.75) is 430, and 448 fits

constexpr int ROW_BYTES = HEAD_DIM <= 64 ? 64 : 128;  // of a panel of Q or K, padded with zeros
constexpr int QK_PANELS = (HEAD_DIM + ROW_BYTES - 1) / ROW_BYTES;
constexpr int KEY_BYTES = BLOCK_N % 128 == 0  ? 128
                          : BLOCK_N % 64 == 0 ? 64
                                              : 32;        // of a row of V^T's panels
constexpr unsigned Q8_BYTES = 64 * QK_PANELS * ROW_BYTES;  // of Q of one consumer
constexpr unsigned K8_BYTES = BLOCK_N * QK_PANELS * ROW_BYTES;
constexpr unsigned V8_BYTES = BLOCK_N * HEAD_DIM_PADDED;
static_assert(BLOCK_N % 32 == 0, "a step of P V has 32 keys");
static_assert(HEAD_DIM % 16 == 0, "16-byte chunks; pairs of 8 columns");

// O_tile takes registers beside acc's: above 128 columns, one half after the other.
constexpr int PARTS = HEAD_DIM > 128 ? 2 : 1, PART_COLUMNS = HEAD_DIM_PADDED / PARTS;
using OutputPart = float[PART_COLUMNS / 2];

using Weights8 = unsigned[BLOCK_N / 32][4];  // P as the left operand of P V

// Issues S = Q K^T for the warpgroup's 64 rows, 32 columns of Q and K at a time.
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  wgmma_fence();
  wgmma_ss_new(e4m3(), S, q, k);
#pragma unroll
  for (int i = 1; i < (HEAD_DIM + 31) / 32; ++i)
    wgmma_ss(
        e4m3(), S, advance_bytes<ROW_BYTES>(q, i, 64), advance_bytes<ROW_BYTES>(k, i, BLOCK_N),
        true);
  wgmma_commit();
}

// Issues O_tile = P V, of this tile of keys alone, for PART_COLUMNS columns.
__device__ __forceinline__ void start_pv(
    OutputPart& O_tile, const Weights8& P, unsigned long long v, int part) {
  v = advance_tiles(v, part, PART_COLUMNS * KEY_BYTES);
  wgmma_fence();
  wgmma_rs_new(e4m3(), O_tile, P[0], v);
#pragma unroll
  for (int i = 1; i < BLOCK_N / 32; ++i)
    wgmma_rs(e4m3(), O_tile, P[i], advance_bytes<KEY_BYTES>(v, i, HEAD_DIM_PADDED), true);
  wgmma_commit();
}

// Issues O += P V, summed by the tensor core (16_01 and 16_03).
__device__ __forceinline__ void add_pv(Output& O, const Weights8& P, unsigned long long v) {
  wgmma_registers(O);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 32; ++i)
    wgmma_rs(e4m3(), O, P[i], advance_bytes<KEY_BYTES>(v, i, HEAD_DIM_PADDED), true);
  wgmma_commit();
}

// The new maxima, and the factors by which everything so far has to be rescaled. They move only when
// some score of the warp exceeds its maximum by more than RESCALE_THRESHOLD (07). m_i is in units of
// log2, WEIGHT_EXPONENT below a maximum.
__device__ __forceinline__ void move_maxima(
    const Scores& S, Statistics& m_i, Statistics& l_i, Statistics& rescale,
    float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = S[2 * i], other = S[2 * i + 1];  // of this lane's keys
#pragma unroll
    for (int n = 1; n < BLOCK_N / 8; ++n) {
      s_max = fmaxf(s_max, S[4 * n + 2 * i]);
      other = fmaxf(other, S[4 * n + 2 * i + 1]);
    }
    m_new[i] = fmaf(fmaxf(s_max, other), softmax_scale_log2, -WEIGHT_EXPONENT);
    exceeded |= m_new[i] > m_i[i] + RESCALE_THRESHOLD;
    rescale[i] = 1.0f;
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    m_new[i] = row_allreduce(fmaxf(m_i[i], m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    rescale[i] = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new[i];
    l_i[i] *= rescale[i];
  }
}

// 2^x on the FMA pipes: 2^round(x) by the exponent, the rest by a polynomial of degree 2, whose error,
// 1.7e-3, is far below the rounding to e4m3.
__device__ __forceinline__ float exp2_polynomial(float x) {
  x = fmaxf(x, -40.0f);
  const float shifted = x + 0x1.8p23f, rest = x - (shifted - 0x1.8p23f);
  const float p = fmaf(fmaf(0.2426f, rest, 0.6951f), rest, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

// The weights of keys 8 from .. 8 to - 1 in place of their scores, by exp2 and by the polynomial.
__device__ __forceinline__ void compute_weights(
    Scores& S, const Statistics& m_i, float softmax_scale_log2, int from, int to) {
#pragma unroll
  for (int n = from; n < to; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = S[4 * n + i];
      s = n % 8 < POLYNOMIALS ? exp2_polynomial(fmaf(s, softmax_scale_log2, -m_i[i / 2]))
                              : weight(s, softmax_scale_log2, m_i[i / 2]);
    }
}

// The sums of weights of keys 8 from .. 8 to - 1, and the weights in e4m3. Four neighbours of A are keys
// 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of each 16: see fp8.cuh.
__device__ __forceinline__ void to_operand(
    Weights8& P, const Scores& S, Statistics& l_i, int from, int to) {
#pragma unroll
  for (int n = from; n < to; n += 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const s = S + 4 * n + 2 * i;
      P[n / 4][n % 4 + i] = pack_e4m3(s[0], s[1], s[4], s[5]);
      l_i[i] += (s[0] + s[1]) + (s[4] + s[5]);
    }
}
