// The tiles of 16: their sizes, the two products, weights in e4m3. For 16_fp8.cu and its steps.

#pragma once
#include "fp8.cuh"
#include "hopper_softmax.cuh"
#include "hopper_tiles.cuh"

#ifndef STAGES
#define STAGES 2  // tiles of K, and of V^T, in shared memory
#endif
#ifndef QUARTERS
#define QUARTERS 0  // 1: above 128 columns, O of a tile of keys in four parts (16_06)
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 2.75f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

// Of the largest weight, until a larger one comes: 2^(6 + 2.75) is 430, and 448 fits. With 8 and 0.75, on an
// H200, a maximum moved in 36 of 100 tiles of a warp at 4096 keys, and the warpgroup's other warps waited.
constexpr int WEIGHT_EXPONENT = 6;

constexpr int ROW_BYTES = HEAD_DIM <= 64 ? 64 : 128;  // of a panel of Q or K, padded with zeros
constexpr int QK_PANELS = (HEAD_DIM + ROW_BYTES - 1) / ROW_BYTES;
constexpr int KEY_BYTES = BLOCK_N % 128 == 0  ? 128
                          : BLOCK_N % 64 == 0 ? 64
                                              : 32;        // of a row of V^T's panels
constexpr unsigned Q8_BYTES = 64 * QK_PANELS * ROW_BYTES;  // of Q of one consumer
constexpr unsigned K8_BYTES = BLOCK_N * QK_PANELS * ROW_BYTES;
constexpr int V_ROWS = HEAD_DIM_PADDED + 8;  // of V^T: V's columns, ones, seven of zeros
constexpr unsigned V8_BYTES = BLOCK_N * V_ROWS;
static_assert(BLOCK_N % 32 == 0, "a step of P V has 32 keys");
static_assert(HEAD_DIM % 16 == 0, "16-byte chunks; pairs of 8 columns");

// O of a tile of keys takes registers in addition to acc's: above 64 columns, half as many at a time.
constexpr int PARTS = QUARTERS && HEAD_DIM > 128 && HEAD_DIM_PADDED % 32 == 0 ? 4
                      : HEAD_DIM > 64                                         ? 2
                                                                              : 1;
constexpr int PART_COLUMNS = HEAD_DIM_PADDED / PARTS;
static_assert(PART_COLUMNS % 8 == 0, "whole groups of eight columns");

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

// Issues O_tile = P V, of this tile of keys alone, for the columns of V that O_tile has.
template <int N>
__device__ __forceinline__ void start_pv(
    float (&O_tile)[N], const Weights8& P, unsigned long long v) {
  wgmma_fence();
  wgmma_rs_new(e4m3(), O_tile, P[0], v);
#pragma unroll
  for (int i = 1; i < BLOCK_N / 32; ++i)
    wgmma_rs(e4m3(), O_tile, P[i], advance_bytes<KEY_BYTES>(v, i, V_ROWS), true);
  wgmma_commit();
}

// Issues O += P V, summed by the tensor core (16_01).
__device__ __forceinline__ void add_pv(Output& O, const Weights8& P, unsigned long long v) {
  wgmma_registers(O);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 32; ++i)
    wgmma_rs(e4m3(), O, P[i], advance_bytes<KEY_BYTES>(v, i, V_ROWS), true);
  wgmma_commit();
}

// The largest score of this lane's keys in row i of its two.
__device__ __forceinline__ float lane_maximum(const Scores& S, int i) {
  float s_max = S[2 * i], other = S[2 * i + 1];
#pragma unroll
  for (int n = 1; n < BLOCK_N / 8; ++n) {
    s_max = fmaxf(s_max, S[4 * n + 2 * i]);
    other = fmaxf(other, S[4 * n + 2 * i + 1]);
  }
  return fmaxf(s_max, other);
}

// A maximum in the units of m_i: log2, WEIGHT_EXPONENT below.
__device__ __forceinline__ float scaled_maximum(float s_max, float softmax_scale_log2) {
  return fmaf(s_max, softmax_scale_log2, -WEIGHT_EXPONENT);
}

// Moves m_i to maxima of this lane's keys that the warp has found to exceed it, and returns the factors
// by which everything so far has to be rescaled: 0 at the first key, 1 if a row's maximum stays.
__device__ __forceinline__ void raise_maxima(
    const Statistics& lane_maxima, Statistics& m_i, Statistics& rescale) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float m_new =
        row_allreduce(fmaxf(m_i[i], lane_maxima[i]), [](float a, float b) { return fmaxf(a, b); });
    rescale[i] = exp2f(m_i[i] - m_new);
    m_i[i] = m_new;
  }
}

// Follows maxima that exceed m_i by more than RESCALE_THRESHOLD in some row of the warp (07).
__device__ __forceinline__ void move_maxima(
    const Scores& S, Statistics& m_i, Statistics& rescale, float softmax_scale_log2) {
  Statistics maxima;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    maxima[i] = scaled_maximum(lane_maximum(S, i), softmax_scale_log2);
    exceeded |= maxima[i] > m_i[i] + RESCALE_THRESHOLD;
    rescale[i] = 1.0f;
  }
  if (__any_sync(0xffffffff, exceeded)) raise_maxima(maxima, m_i, rescale);
}

// As move_maxima, with half the instructions: Hopper has a maximum of three integers, and none of three
// floats. Unless all are negative, floats compare like their bits (10). If all are, the maximum of bits is
// too small, which matters only while a row's maximum is negative too: then it is looked at again.
// Returns whether a maximum of the warp's rows has moved.
__device__ __forceinline__ bool move_maxima_by_bits(
    const Scores& S, Statistics& m_i, Statistics& rescale, float softmax_scale_log2) {
  int bits[2], other[2];  // of both rows side by side, so that none waits for the maximum before
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int a = __float_as_int(S[4 * n + 2 * i]), b = __float_as_int(S[4 * n + 2 * i + 1]);
      int& of_two = n % 2 ? bits[i] : other[i];
      of_two = n < 2 ? max(a, b) : max(max(of_two, a), b);
    }
  Statistics s_max;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s_max[i] = __int_as_float(max(bits[i], other[i]));
    exceeded |= scaled_maximum(s_max[i], softmax_scale_log2) > m_i[i] + RESCALE_THRESHOLD;
    exceeded |= s_max[i] < 0.0f && m_i[i] < -WEIGHT_EXPONENT;
    rescale[i] = 1.0f;
  }
  if (!__any_sync(0xffffffff, exceeded)) return false;
  Statistics maxima;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (s_max[i] < 0.0f) s_max[i] = lane_maximum(S, i);
    maxima[i] = scaled_maximum(s_max[i], softmax_scale_log2);
  }
  raise_maxima(maxima, m_i, rescale);
  return true;
}

// Rescales what is summed up. Where `rescale` is 1 afterwards, an instruction that adds a part to acc reads two
// registers instead of three.
__device__ __forceinline__ void rescale_now(
    Output& acc, Statistics& l_i, const Statistics& rescale) {
  rescale_output(acc, rescale);
#pragma unroll
  for (int i = 0; i < 2; ++i) l_i[i] *= rescale[i];
}

// The weights in place of their scores.
__device__ __forceinline__ void compute_weights(
    Scores& S, const Statistics& m_i, float softmax_scale_log2) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) S[4 * n + i] = weight(S[4 * n + i], softmax_scale_log2, m_i[i / 2]);
}

// Adds this lane's weights to the sums of its rows (16_01 and 16_02).
__device__ __forceinline__ void add_weights(const Scores& P, Statistics& l_i) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; n += 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const p = P + 4 * n + 2 * i;
      l_i[i] += (p[0] + p[1]) + (p[4] + p[5]);
    }
}

// The weights in e4m3. Four neighbours of A are keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of each 16: see
// fp8.cuh.
__device__ __forceinline__ void to_operand(Weights8& P, const Scores& weights) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; n += 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const p = weights + 4 * n + 2 * i;
      P[n / 4][n % 4 + i] = pack_e4m3(p[0], p[1], p[4], p[5]);
    }
}

// As compute_weights and to_operand, for group i of 32 keys.
__device__ __forceinline__ void weights_of_group(
    Weights8& P, const Scores& S, const Statistics& m_i, float softmax_scale_log2, int group) {
#pragma unroll
  for (int n = 4 * group; n < 4 * group + 4; n += 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const s = S + 4 * n + 2 * i;
      const auto w = [&](float x) { return weight(x, softmax_scale_log2, m_i[i]); };
      P[n / 4][n % 4 + i] = pack_e4m3(w(s[0]), w(s[1]), w(s[4]), w(s[5]));
    }
}

// acc = rescale acc + factor O_tile, for the columns of one part.
__device__ __forceinline__ void add_part(
    Output& acc, const Statistics& rescale, const float* O_tile, int part, float factor = 1.0f) {
#pragma unroll
  for (int i = 0; i < PART_COLUMNS / 2; ++i) {
    float& o = acc[part * (PART_COLUMNS / 2) + i];
    o = fmaf(o, rescale[i / 2 % 2], factor * O_tile[i]);
  }
}

// Issues P V by parts, and adds all but the last to acc; that one, with the sums of the weights, is in
// flight afterwards. Of quarters, the next is in flight while one is added (16_06).
__device__ __forceinline__ void add_parts(
    Output& acc, const Statistics& rescale, const Weights8& P, unsigned long long v_tile,
    float (&O_last)[PART_COLUMNS / 2 + 4], float factor) {
  const auto v_part = [&](int i) { return advance_tiles(v_tile, i, PART_COLUMNS * KEY_BYTES); };
  if constexpr (PARTS == 1) {
    start_pv(O_last, P, v_tile);
  } else if constexpr (PARTS == 2) {
    float O_tile[PART_COLUMNS / 2];
    start_pv(O_tile, P, v_tile);
    wgmma_wait<0>();
    wgmma_registers(O_tile);
    add_part(acc, rescale, O_tile, 0, factor);
    start_pv(O_last, P, v_part(1));
  } else {
    float even[PART_COLUMNS / 2], odd[PART_COLUMNS / 2];
    start_pv(even, P, v_tile);
    start_pv(odd, P, v_part(1));
    wgmma_wait<1>();
    wgmma_registers(even);
    add_part(acc, rescale, even, 0, factor);
    start_pv(even, P, v_part(2));
    wgmma_wait<1>();
    wgmma_registers(odd);
    add_part(acc, rescale, odd, 1, factor);
    start_pv(O_last, P, v_part(3));
    wgmma_wait<1>();
    wgmma_registers(even);
    add_part(acc, rescale, even, 2, factor);
  }
}
