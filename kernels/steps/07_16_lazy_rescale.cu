// 07, step 16, rescale when it pays: only when a maximum exceeds m_i by RESCALE_THRESHOLD. A score is
// scaled and m_i subtracted by one FFMA; masks are bits, of which one R2P instruction tests seven.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 32 WARPS, 2
//          HEAD_DIM_PADDED (BLOCK_M + 4 BLOCK_N) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see
#include "block.cuh"      // Block, Window: 05
#include "half2.cuh"      // pack: 06
#include "load_tile.cuh"  // this thread's share of a tile, by cp.async: step 13
#include "ptx.cuh"        // mma.sync, ldmatrix, cp.async, and the layouts of fragments
#include "softmax.cuh"    // NEG_INF, LOG2_E, M_INIT: 05; row_allreduce over the four lanes of a row
#include "swizzle.cuh"    // swizzle, swizzle_advance: step 12

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block
#endif
#ifndef BLOCK_N
#define BLOCK_N 64  // B_c, keys per tile
#endif
#ifndef WARPS
#define WARPS 4  // per block; each has BLOCK_M / WARPS of its rows
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // per SM: what the compiler keeps registers free for
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8.0f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int TILES_M = BLOCK_M / (16 * WARPS);  // MMA atoms of 16 rows in a warp tile
constexpr int ROWS = 2 * TILES_M;                // per thread: g, g + 8, ... of its warp's
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // a row, in whole fragments
constexpr int CHUNKS = HEAD_DIM_PADDED / 8;                 // of 16 bytes in it
constexpr int SPAN = SWIZZLE_SPAN<CHUNKS>;                  // threads that copy a row
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "whole chunks; acc must fit the registers");
static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "a warp has whole fragments");
using Statistics = float[ROWS];
using Scores = float[TILES_M][BLOCK_N / 8][4];  // accumulators of S: 16 rows and 8 keys each
using Output = float[TILES_M][HEAD_DIM_PADDED / 8][4];

// S = Q K^T for this warp's rows.
template <typename T>
__device__ __forceinline__ void gemm_qk(Scores& S, unsigned q_lane, unsigned k_lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM_PADDED / 16; ++k) {
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
      ldmatrix_x4(a[m], swizzle_advance<CHUNKS>(q_lane, 2 * k) + 32 * m * HEAD_DIM_PADDED);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, swizzle_advance<CHUNKS>(k_lane, 2 * k) + 32 * n * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), S[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), S[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// One bit for each of a thread's keys 8 n and 8 n + 1 of KEYS: set for those before `limit`. The
// compiler moves up to seven such bits into predicates by one instruction, R2P, instead of
// comparing each key with both ends of the window.
template <int KEYS>
__device__ __forceinline__ unsigned keys_before(int limit) {
  static_assert(KEYS <= 128, "one bit per key of a thread");
  const int keys = min(max(limit, 0), KEYS);
  return (1ull << (keys / 8 * 2 + min(keys % 8, 2))) - 1;
}

// A key that a row does not see scores -inf, so that its weight is exactly 0. row_pos, the position
// of the thread's first row among the keys, and end are relative to the thread's first key.
__device__ __forceinline__ void mask(Scores& S, int row_pos, int end, int lo, int hi) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int low = row_pos + 8 * i + lo, high = row_pos + 8 * i + hi;
    const unsigned seen = keys_before<BLOCK_N>(min(high + 1, end)) & ~keys_before<BLOCK_N>(low);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(seen >> (2 * n + e) & 1)) row_pair(S, i, n)[e] = NEG_INF;
  }
}

// Everything so far is rescaled to the new maximum, but only when some weight would exceed
// 2^RESCALE_THRESHOLD: smaller ones do no harm, because the division by l_i cancels them.
__device__ __forceinline__ void online_softmax_rescale(
    const Scores& S, Statistics& m_i, Statistics& l_i, Output& acc, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(row_pair(S, i, n)[0], row_pair(S, i, n)[1]));
    m_new[i] = fmaxf(m_i[i], s_max * softmax_scale_log2);
    exceeded |= m_new[i] - m_i[i] > RESCALE_THRESHOLD;
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
    const float rescale = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new[i];
    l_i[i] *= rescale;
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 8; ++n) {
      row_pair(acc, i, n)[0] *= rescale;
      row_pair(acc, i, n)[1] *= rescale;
    }
  }
}

// acc += P V, 16 keys after 16 keys: tensor cores work on some while this thread weighs the next.
template <typename T>
__device__ __forceinline__ void gemm_pv(
    Output& acc, const Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    unsigned v_lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k) {
    // The accumulators of 2 x 8 keys have the layout that the left operand of 16 keys needs.
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * m + i % 2;
        const float* s = row_pair(S, row, 2 * k + i / 2);
        const float x = exp2f(fmaf(s[0], softmax_scale_log2, -m_i[row]));
        const float y = exp2f(fmaf(s[1], softmax_scale_log2, -m_i[row]));
        l_i[row] += x + y;
        a[m][i] = pack(T(), x, y);
      }
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, swizzle_advance<CHUNKS>(v_lane, 2 * n) + 32 * k * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) flash_mma(
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
  // ldmatrix takes the address of a row from each lane: q_lane, k_lane and v_lane are the first.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  constexpr unsigned TILE = 2 * BLOCK_N * HEAD_DIM_PADDED;  // bytes of a tile of K or V
  const unsigned Q_smem = smem_address(dynamic_smem);
  const unsigned K_smem = Q_smem + 2 * BLOCK_M * HEAD_DIM_PADDED;
  const unsigned V_smem = K_smem + 2 * TILE;
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16 * TILES_M;
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(warp_row + lane_id % 16, lane_id / 16);
  const unsigned k_lane = K_smem + swizzle<CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = V_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const int copy_row = threadIdx.x / SPAN, copy_chunk = threadIdx.x % SPAN;  // this thread copies
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  Q += copy_row * params.q.row + 8 * copy_chunk;
  K += (begin + copy_row) * params.k.row + 8 * copy_chunk;
  V += (begin + copy_row) * params.v.row + 8 * copy_chunk;
  if (begin < end) {
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + copy_offset, Q, params.q.row, q_len - first_row - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        K_smem + copy_offset, K, params.k.row, end - begin - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        V_smem + copy_offset, V, params.v.row, end - begin - copy_row, HEAD_DIM);
    cp_async_commit();
  }
  Output acc = {};
  Statistics m_i, l_i = {};  // m_i in units of log2; l_i of this lane's keys until the epilogue
#pragma unroll
  for (int i = 0; i < ROWS; ++i) m_i[i] = M_INIT;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  unsigned stage_offset = 0;  // of the half of K_smem and V_smem in use, not being filled
  for (int first = begin; first < end; first += BLOCK_N, stage_offset ^= TILE) {
    cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    const int next = first + BLOCK_N;
    if (next < end) {
      K += BLOCK_N * params.k.row;
      V += BLOCK_N * params.v.row;
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          K_smem + (stage_offset ^ TILE) + copy_offset, K, params.k.row, end - next - copy_row,
          HEAD_DIM);
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          V_smem + (stage_offset ^ TILE) + copy_offset, V, params.v.row, end - next - copy_row,
          HEAD_DIM);
      cp_async_commit();
    }
    Scores S = {};
    gemm_qk<T>(S, q_lane, k_lane + stage_offset);
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    online_softmax_rescale(S, m_i, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, m_i, l_i, softmax_scale_log2, v_lane + stage_offset);
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = warp_row + 8 * i + g;
    if (first_row + r >= q_len) continue;
    if (lse && t == 0) block.store_lse(lse, params, r, m_i[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      *reinterpret_cast<unsigned*>(O + r * params.o.row + 8 * n + 2 * t) =
          pack(T(), row_pair(acc, i, n)[0] * inverse, row_pair(acc, i, n)[1] * inverse);
  }
}
