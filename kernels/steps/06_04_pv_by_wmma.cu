// 06, step 4, P V by WMMA: P goes back to shared memory in the half type; it overlays S, row by row.
// A warp holds acc in fragments. At every tile they make a shared-memory round trip, 16 columns at a
// time, in which each lane rescales its row; so does the output.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block BLOCK_M,
//          SHARED_BYTES bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Needs    sm_75 for float16, sm_80 for bfloat16; HEAD_DIM and strides multiples of 8, pointers of
//          16 bytes
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see
#include <mma.h>
#include "block.cuh"    // Block, Window: 05
#include "half2.cuh"    // pack: 06
#include "softmax.cuh"  // NEG_INF, LOG2_E, M_INIT: 05; row_allreduce over the four lanes of a row

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 128
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block: one for each thread, 32 for each warp
#endif
#ifndef BLOCK_N
#define BLOCK_N 32  // B_c, keys per tile
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (HEAD_DIM <= 64 ? 3 : 2)  // per SM: what the compiler keeps registers free for
#endif

constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // a row, in whole fragments
constexpr int CHUNKS = HEAD_DIM_PADDED / 8;                 // of 16 bytes in it
constexpr int STRIDE = HEAD_DIM_PADDED + 8;                 // padded: 8 rows are in different banks
constexpr int S_STRIDE = BLOCK_N + 4;  // the same for S; P overlays S, 2 S_STRIDE elements a row
constexpr int SHARED_BYTES = 2 * STRIDE * (BLOCK_M + 2 * BLOCK_N) + 4 * BLOCK_M * S_STRIDE;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "whole chunks; acc must fit the registers");
static_assert(
    BLOCK_M % 32 == 0 && BLOCK_N % 32 == 0,
    "a lane has a row; scores are computed 32 keys at a time");

namespace tc = nvcuda::wmma;
using Accumulator = tc::fragment<tc::accumulator, 16, 16, 16, float>;

// The block copies rows first .. first + ROWS - 1 of Q, K or V. Rows from end on become zeros.
template <int ROWS, typename T>
__device__ __forceinline__ void load_tile(
    T* tile, const T* __restrict__ source, long long stride, int first, int end) {
#pragma unroll 4
  for (int e = threadIdx.x; e < ROWS * CHUNKS; e += BLOCK_M) {
    const int r = first + e / CHUNKS, c = 8 * (e % CHUNKS);
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (r < end && c < HEAD_DIM) chunk = *reinterpret_cast<const uint4*>(source + r * stride + c);
    *reinterpret_cast<uint4*>(tile + e / CHUNKS * STRIDE + c) = chunk;
  }
}

// S = Q K^T for the 32 rows of a warp, into the warp's part of shared memory.
template <typename T>
__device__ __forceinline__ void gemm_qk(float* S_smem, const T* Q_smem, const T* K_smem) {
#pragma unroll
  for (int keys = 0; keys < BLOCK_N; keys += 32) {
    Accumulator S[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) tc::fill_fragment(S[m][n], 0.0f);
#pragma unroll 2  // fully unrolled, it spills on some architectures
    for (int k = 0; k < HEAD_DIM_PADDED; k += 16) {
      tc::fragment<tc::matrix_a, 16, 16, 16, T, tc::row_major> q_frag[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        tc::load_matrix_sync(q_frag[m], Q_smem + 16 * m * STRIDE + k, STRIDE);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // K^T: the rows of K are the columns of the right operand.
        tc::fragment<tc::matrix_b, 16, 16, 16, T, tc::col_major> k_frag;
        tc::load_matrix_sync(k_frag, K_smem + (keys + 16 * n) * STRIDE + k, STRIDE);
#pragma unroll
        for (int m = 0; m < 2; ++m) tc::mma_sync(S[m][n], q_frag[m], k_frag, S[m][n]);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        tc::store_matrix_sync(
            S_smem + 16 * m * S_STRIDE + keys + 16 * n, S[m][n], S_STRIDE, tc::mem_row_major);
  }
}

// acc += P V for the 32 rows of a warp.
template <typename T>
__device__ __forceinline__ void gemm_pv(
    Accumulator (&acc)[2][HEAD_DIM_PADDED / 16], const T* P_smem, const T* V_smem) {
#pragma unroll 1
  for (int k = 0; k < BLOCK_N; k += 16) {
    tc::fragment<tc::matrix_a, 16, 16, 16, T, tc::row_major> p_frag[2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      tc::load_matrix_sync(p_frag[m], P_smem + 16 * m * 2 * S_STRIDE + k, 2 * S_STRIDE);
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      tc::fragment<tc::matrix_b, 16, 16, 16, T, tc::row_major> v_frag;
      tc::load_matrix_sync(v_frag, V_smem + k * STRIDE + 16 * n, STRIDE);
#pragma unroll
      for (int m = 0; m < 2; ++m) tc::mma_sync(acc[m][n], p_frag[m], v_frag, acc[m][n]);
    }
  }
}

// Columns 16 n .. 16 n + 15 of acc to shared memory, where each lane can read its row.
__device__ __forceinline__ void store_acc_columns(
    float* S_smem, const Accumulator (&acc)[2][HEAD_DIM_PADDED / 16], int n) {
  __syncwarp();  // hazard: overwritten while another lane still reads its row
#pragma unroll
  for (int m = 0; m < 2; ++m)
    tc::store_matrix_sync(S_smem + 16 * m * S_STRIDE, acc[m][n], S_STRIDE, tc::mem_row_major);
  __syncwarp();  // hazard: a row could be read before the other lanes have stored their part
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_M, MIN_BLOCKS) flash_wmma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int last_row = window.last_row, begin = window.begin, end = window.end;

  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  T* Q_smem = reinterpret_cast<T*>(dynamic_smem);
  T* K_smem = Q_smem + BLOCK_M * STRIDE;
  T* V_smem = K_smem + BLOCK_N * STRIDE;
  const int r = threadIdx.x, warp_row = r / 32 * 32;  // this lane's row, its warp's first
  float* S_smem =
      reinterpret_cast<float*>(V_smem + BLOCK_N * STRIDE) + warp_row * S_STRIDE;  // of this warp
  float* s_row = S_smem + r % 32 * S_STRIDE;                                      // of this lane
  const int row_pos = first_row + r, low = row_pos + window.lo;
  const int high = min(row_pos + window.hi, end - 1);  // it sees keys low .. high
  load_tile<BLOCK_N>(K_smem, K, params.k.row, begin, end);
  load_tile<BLOCK_M>(Q_smem, Q, params.q.row, 0, q_len - first_row);
  Accumulator acc[2][HEAD_DIM_PADDED / 16];
#pragma unroll
  for (int n = 0; n < HEAD_DIM_PADDED / 8; ++n) tc::fill_fragment(acc[n % 2][n / 2], 0.0f);
  float m_i = M_INIT, l_i = 0.0f;  // m_i in units of log2
  const float softmax_scale_log2 = params.softmax_scale * LOG2_E;
  __syncthreads();  // hazard: Q and K could be read before other threads have written their part

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  for (int first = begin; first < end; first += BLOCK_N) {
    load_tile<BLOCK_N>(V_smem, V, params.v.row, first, end);
    gemm_qk(S_smem, Q_smem + warp_row * STRIDE, K_smem);
    __syncwarp();  // hazard: a row of S could be read before the other lanes have stored their part
    __align__(16) float s[BLOCK_N], m_new = m_i;
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 4)
      reinterpret_cast<float4&>(s[j]) = *reinterpret_cast<const float4*>(s_row + j);
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) s[j] *= softmax_scale_log2;
    // A key that a row does not see scores -inf, so that its weight is exactly 0.
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
#pragma unroll
      for (int j = 0; j < BLOCK_N; ++j)
        if (first + j < low || first + j > high) s[j] = NEG_INF;
    }
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) m_new = fmaxf(m_new, s[j]);

    const float rescale = exp2f(m_i - m_new);
    m_i = m_new;
    l_i *= rescale;
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      store_acc_columns(S_smem, acc, n);
#pragma unroll
      for (int c = 0; c < 16; ++c) s_row[c] *= rescale;
      __syncwarp();  // hazard: a fragment could be loaded before other lanes rescale their rows
#pragma unroll
      for (int m = 0; m < 2; ++m)
        tc::load_matrix_sync(acc[m][n], S_smem + 16 * m * S_STRIDE, S_STRIDE, tc::mem_row_major);
    }
    __syncwarp();  // hazard: P could overwrite what another lane still loads
    T* p_row = reinterpret_cast<T*>(s_row);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 8) {
      unsigned p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2f(s[j + 2 * i] - m_i), y = exp2f(s[j + 2 * i + 1] - m_i);
        l_i += x + y;
        p[i] = pack(T(), x, y);
      }
      *reinterpret_cast<uint4*>(p_row + j) = make_uint4(p[0], p[1], p[2], p[3]);
    }
    __syncthreads();  // hazard: P and V could be read incomplete, or K overwritten while in use
    load_tile<BLOCK_N>(K_smem, K, params.k.row, first + BLOCK_N, end);  // past the end: zeros
    gemm_pv(acc, reinterpret_cast<const T*>(S_smem), V_smem);
    __syncthreads();  // hazard: K could be read incomplete, or P and V overwritten while in use
  }

  // ---- epilogue: the row's sum; divide once
  const float sum = l_i;                                  // this lane has the whole row
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
  const bool in_bounds = first_row + r < q_len;
  if (lse && in_bounds) block.store_lse(lse, params, r, m_i, sum);
#pragma unroll
  for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
    store_acc_columns(S_smem, acc, n);
#pragma unroll
    for (int c = 0; c < 16; c += 8) {
      unsigned o[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        o[i] = pack(T(), s_row[c + 2 * i] * inverse, s_row[c + 2 * i + 1] * inverse);
      if (in_bounds && 16 * n + c < HEAD_DIM)
        *reinterpret_cast<uint4*>(O + r * params.o.row + 16 * n + c) =
            make_uint4(o[0], o[1], o[2], o[3]);
    }
  }
}
