// A cache in e4m3, a byte for each number: what CACHE_E4M3 changes in 14. A number is its
// byte times the descale of its sequence and head of K or V. Bytes go to shared memory as they are, and
// become halves, exactly, in the registers in which mma.sync needs them.
//
// ldmatrix moves 2-byte elements, here pairs of e4m3. So lane 4 g + t gets dims 4 t .. 4 t + 3 of
// each 16 of key g, and Q is read in the same order, since a sum over d may take any. Of V, transposed
// on the way, it gets columns 2 g and 2 g + 1 of keys 2 t and 2 t + 1: the even columns of 16 are the
// eight columns of one product, and the odd ones those of the next.
//
// Products are of float16 for any type of Q: a power of two scales each row of Q into its range, and is
// undone in its scores.

#pragma once
#include "decode_tile.cuh"
#include "float_fragments.cuh"  // 07's products in float32

// Two pairs of e4m3 as two pairs of halves, exactly.
__device__ __forceinline__ void halves_of_e4m3(unsigned (&halves)[2], unsigned bytes) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(bytes));
}

// Four floats as e4m3, the first in the lowest byte, rounded to nearest; beyond 448 they become 448.
__device__ __forceinline__ unsigned e4m3_of_floats(float a, float b, float c, float d) {
  unsigned r;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// 16 new numbers in half precision, divided by their descale, as e4m3.
template <typename T>
__device__ __forceinline__ uint4 quantised(const void* from, float descale) {
  const uint4* chunks = static_cast<const uint4*>(from);
  const uint4 first = chunks[0], second = chunks[1];
  const unsigned pairs[8] = {first.x,  first.y,  first.z,  first.w,
                             second.x, second.y, second.z, second.w};
  unsigned fours[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack(T(), pairs[2 * i]), b = unpack(T(), pairs[2 * i + 1]);
    fours[i] = e4m3_of_floats(
        __fdiv_rn(a.x, descale), __fdiv_rn(a.y, descale), __fdiv_rn(b.x, descale),
        __fdiv_rn(b.y, descale));
  }
  return make_uint4(fours[0], fours[1], fours[2], fours[3]);
}

// Q's rows into shared memory as halves, the largest of each between 1 and 2; row_scale undoes that.
template <typename T>
__device__ __forceinline__ void load_as_halves(
    const Rows& rows, unsigned char* Q_smem, float* row_scale, const T* Q, int sequence, int unit) {
  for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += THREADS) {
    const int r = i / CHUNKS, chunk = i % CHUNKS;
    const uint4* from =
        reinterpret_cast<const uint4*>(Q + rows.offset(rows.params.q, sequence, unit, r));
    const bool is_there = r < rows.count && has_chunk<K_COLUMNS, sizeof(T)>(chunk);
    const uint4 words = is_there ? from[chunk] : make_uint4(0, 0, 0, 0);
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = unpack(T(), pairs[j]);
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    for (int d = CHUNKS / 2; d > 0; d /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, d));
    // 2^exponent and its inverse, both normal numbers.
    const unsigned exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
    const float inverse = __uint_as_float(254 - exponent << 23);
    unsigned halves[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = unpack(T(), pairs[j]);
      halves[j] = pack(__half(), x.x * inverse, x.y * inverse);
    }
    *reinterpret_cast<uint4*>(Q_smem + swizzle<CHUNKS>(r, chunk)) =
        make_uint4(halves[0], halves[1], halves[2], halves[3]);
    if (chunk == 0) row_scale[r] = __uint_as_float(exponent << 23);
  }
}

constexpr int E4M3_CHUNKS = HEAD_DIM / 16;  // of 16 bytes in a row of the cache
constexpr int KV_CHUNKS =
    CACHE_E4M3 ? E4M3_CHUNKS : CHUNKS;  // the same of any cache that ldmatrix reads

// S = Q K^T, times a factor for each row of this lane.
__device__ __forceinline__ void gemm_qk_e4m3(
    Scores& S, const unsigned char* Q_smem, unsigned k_lane, const float (&factor)[2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < E4M3_CHUNKS; c += 2) {
    unsigned a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * (c + i / 2) + t / 2, row = g + i % 2 * 8;
      const uint2 q =
          *reinterpret_cast<const uint2*>(Q_smem + swizzle<CHUNKS>(row, chunk) + 8 * (t % 2));
      a[i / 2][i % 2] = q.x;
      a[i / 2][2 + i % 2] = q.y;
    }
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned k[4], b[2];
      ldmatrix_x4(k, swizzle_advance<E4M3_CHUNKS>(k_lane, c) + 16 * n * HEAD_DIM);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // keys 8 (i / 2) .. + 7, chunk c + i % 2
        halves_of_e4m3(b, k[i]);
        mma_m16n8k16(__half(), S[0][2 * n + i / 2], a[i % 2], b[0], b[1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      row_pair(S, i, n)[0] *= factor[i];
      row_pair(S, i, n)[1] *= factor[i];
    }
}

// acc += P V, as in mma_tiles.cuh. acc[0][2 n] has the even columns of 16 n .. 16 n + 15, acc[0][2 n + 1]
// the odd ones.
__device__ __forceinline__ void gemm_pv_e4m3(
    Output& acc, const Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    unsigned v_lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k) {
    unsigned a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* s = row_pair(S, i % 2, 2 * k + i / 2);
      const float x = exp2f(fmaf(s[0], softmax_scale_log2, -m_i[i % 2]));
      const float y = exp2f(fmaf(s[1], softmax_scale_log2, -m_i[i % 2]));
      l_i[i % 2] += x + y;
      a[i] = pack(__half(), x, y);
    }
#pragma unroll
    for (int c = 0; c < E4M3_CHUNKS; c += 2) {
      unsigned v[4], first[2], second[2];  // of keys 2 t and 2 t + 1, and of 8 keys later
      ldmatrix_x4_trans(v, swizzle_advance<E4M3_CHUNKS>(v_lane, c) + 16 * k * HEAD_DIM);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        halves_of_e4m3(
            first, __byte_perm(v[2 * i], 0, 0x3120));  // the even column's two, the odd's
        halves_of_e4m3(second, __byte_perm(v[2 * i + 1], 0, 0x3120));
        mma_m16n8k16(__half(), acc[0][2 * (c + i)], a, first[0], second[0]);
        mma_m16n8k16(__half(), acc[0][2 * (c + i) + 1], a, first[1], second[1]);
      }
    }
  }
}

// As store_state, of acc in that order of columns, times V's descale.
template <typename T>
__device__ __forceinline__ void store_state_e4m3(
    unsigned char* smem, const Maxima& maxima, const Statistics& l_i, Output& acc,
    float v_descale) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < (STATE_ROWS + 7) / 8; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    if (g >= STATE_ROWS) break;
    const int row = warp * STATE_ROWS + g + 8 * i;
    float* o = reinterpret_cast<float*>(smem + STATES_BEGIN<T>) + row * STATE_STRIDE + 4 * t;
    if (t == 0)
      reinterpret_cast<float2*>(smem + ML_BEGIN<T>)[row] =
          make_float2(maxima.m_i[i] + maxima.base[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      const float *even = row_pair(acc, i, 2 * n), *odd = row_pair(acc, i, 2 * n + 1);
      *reinterpret_cast<float4*>(o + 16 * n) = make_float4(
          even[0] * v_descale, odd[0] * v_descale, even[1] * v_descale, odd[1] * v_descale);
    }
  }
}

// ---- with a cache of any type: Q into shared memory, and what scores of the lane's rows are multiplied by

struct Factors {
  float of_row[2];
};

template <typename T>
__device__ __forceinline__ const float* load_rows(
    const Rows& rows, unsigned char* Q_smem, const T* Q, int sequence, int unit) {
  __shared__ float row_scale[CACHE_E4M3 ? TILE_ROWS : 1];
  if constexpr (CACHE_E4M3) load_as_halves(rows, Q_smem, row_scale, Q, sequence, unit);
  else rows.load(Q_smem, Q, sequence, unit);
  return row_scale;
}

__device__ __forceinline__ Factors factors_of(const float* row_scale, float k_descale) {
  if (!CACHE_E4M3) return {};
  const int g = threadIdx.x % 32 / 4;
  return {row_scale[g] * k_descale, row_scale[g + 8] * k_descale};
}

// S = Q K^T. lane: where this lane reads the tile of K by ldmatrix.
template <typename T>
__device__ __forceinline__ void product_qk(
    Scores& S, const unsigned char* smem, unsigned q_lane, unsigned tile, unsigned lane,
    const Factors& factors) {
  if constexpr (CACHE_E4M3) gemm_qk_e4m3(S, smem, smem_address(smem) + tile + lane, factors.of_row);
  else if constexpr (sizeof(T) == 2) gemm_qk<T>(S, q_lane, smem_address(smem) + tile + lane);
  else dot_qk<ROW_CHUNKS<T>>(S, smem, smem + tile);
}

// acc += P V.
template <typename T>
__device__ __forceinline__ void product_pv(
    Output& acc, Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    const unsigned char* smem, unsigned tile, unsigned lane) {
  const unsigned at = smem_address(smem) + tile + lane;
  if constexpr (CACHE_E4M3) gemm_pv_e4m3(acc, S, m_i, l_i, softmax_scale_log2, at);
  else if constexpr (sizeof(T) == 2) gemm_pv<T>(acc, S, m_i, l_i, softmax_scale_log2, at);
  else sum_pv<ROW_CHUNKS<T>>(acc, S, m_i, l_i, softmax_scale_log2, smem + tile);
}

template <typename T>
__device__ __forceinline__ void store_state_of(
    unsigned char* smem, const Maxima& maxima, const Statistics& l_i, Output& acc,
    float v_descale) {
  if constexpr (CACHE_E4M3) store_state_e4m3<T>(smem, maxima, l_i, acc, v_descale);
  else store_state<T>(smem, maxima, l_i, acc);
}
