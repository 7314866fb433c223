// 11 fused: what stands beside attention in a model, in the kernel that has the scores and the
// tiles. Else as 05.
//
// Since 05: BIAS adds an array to the scores, or masks by one; ALIBI adds -slope |distance| (Press
// et al., 2022), which is computed where it is needed; ROTARY rotates Q and K in shared memory,
// after their load (Su et al., 2021). An array is read by strides, of which some are 0: what serves
// a whole axis is there once.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block THREADS,
//          sizeof(Shared) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float32,
//          strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens.
//          lse (batch, heads, N) or (heads, tokens). bias (batch, heads, N, N_kv), alibi_slopes
//          (batch, heads), rotary_cos, rotary_sin (positions, ROTARY_DIM / 2), q_positions (batch,
//          N), k_positions (batch, N_kv)
// Traffic  Q, O and bias once; K, V and the tables: for each tile of rows, from the first key that
//          one of them sees to the last

#include "block.cuh"  // Block, Window: 05
#include "fused_params.cuh"

#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per block
#endif
#ifndef BLOCK_N
#define BLOCK_N 32  // B_c, keys per tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#ifndef THREADS
#define THREADS 128  // per block
#endif
#ifndef THREADS_X
#define THREADS_X 8  // threads that share a row
#endif
#ifndef VECTOR
#define VECTOR (HEAD_DIM % 4 == 0)  // rows start at multiples of 16 bytes: float4 loads and stores
#endif
#ifndef ASYNC
#define ASYNC (VECTOR && __CUDA_ARCH__ >= 800)  // copies by cp.async, which Turing lacks
#endif
#ifndef BIAS
#define BIAS 0  // 1: float32, added to the scaled scores; 3: bool, true where a row may see a key
#endif
#ifndef ALIBI
#define ALIBI 0  // 1: -slope |distance| is added to the scaled scores
#endif
#ifndef ROTARY
#define ROTARY 0  // 1: words p and p + ROTARY_DIM / 2 of Q and K are rotated; 2: 2 p and 2 p + 1
#endif
#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM  // words of a row that are rotated: the first ones
#endif
#if BIAS == 3
using Bias = bool;
#else
using Bias = float;
#endif
#include "float_tiles.cuh"  // tiles of S and O in registers, as in 05; and NEG_INF, LOG2_E, M_INIT

// Rotates ROWS rows in shared memory: word c of row r is tile[c * COLUMN_STRIDE + r * ROW_STRIDE].
// Row r is at positions[r], or at first_pos + r where there are none. Neighbouring threads take
// words of neighbouring banks.
template <int ROWS, int COLUMN_STRIDE, int ROW_STRIDE>
__device__ __forceinline__ void rotate(
    float* tile, const float* __restrict__ rotary_cos, const float* __restrict__ rotary_sin,
    const int* __restrict__ positions, int first_pos, int rows_left, const FusedParams& fused) {
  constexpr int PAIRS = ROTARY_DIM / 2;
#pragma unroll 1
  for (int e = threadIdx.x; e < ROWS * PAIRS; e += THREADS) {
    const int r = COLUMN_STRIDE == 1 ? e / PAIRS : e % ROWS,
              p = COLUMN_STRIDE == 1 ? e % PAIRS : e / ROWS;
    if (r >= rows_left) continue;
    // Positions are clamped to the tables' rows, so that none is read past them, whoever gave it.
    const long long pos =
        min(max(positions ? positions[r] : first_pos + r, 0), fused.positions - 1);
    const float cosine = rotary_cos[pos * fused.cos_row + p];
    const float sine = rotary_sin[pos * fused.sin_row + p];
    float& a = tile[(ROTARY == 2 ? 2 * p : p) * COLUMN_STRIDE + r * ROW_STRIDE];
    float& b = tile[(ROTARY == 2 ? 2 * p + 1 : p + PAIRS) * COLUMN_STRIDE + r * ROW_STRIDE];
    const float x = a, y = b;
    a = x * cosine - y * sine;
    b = y * cosine + x * sine;
  }
}

// s += bias in units of log2, after the product: a large bias would cost the sums of products their
// last bits.
__device__ __forceinline__ void add_bias(
    float (&s)[TILE_M][TILE_N], const void* __restrict__ bias, int rows_left, int keys_left, int x,
    int y, const FusedParams& fused) {
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const long long row =
        min(row_of(i, y), rows_left - 1) * fused.bias_row;  // clamped to the array
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) {
      const long long at =
          row + min(x + j * THREADS_X, keys_left - 1) * fused.bias_key;  // masked later
#if BIAS == 3
      if (!static_cast<const Bias*>(bias)[at]) s[i][j] = NEG_INF;
#else
      s[i][j] = fmaf(static_cast<const Bias*>(bias)[at], LOG2_E, s[i][j]);
#endif
    }
  }
}

// s -= slope |distance|. row_pos: the position of the block's first row among the keys, from the
// tile's first key on.
__device__ __forceinline__ void add_alibi(
    float (&s)[TILE_M][TILE_N], float slope_log2, int row_pos, int x, int y) {
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float distance = row_pos + row_of(i, y) - x;
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
      s[i][j] = fmaf(-slope_log2, fabsf(distance - j * THREADS_X), s[i][j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O,
    float* __restrict__ lse,                 // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,    // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,    // [sequences + 1]
    const void* __restrict__ bias,           // [batch, heads, N, N_kv], float or bool as BIAS says
    const float* __restrict__ alibi_slopes,  // [batch, heads]
    const float* __restrict__ rotary_cos,    // [positions, ROTARY_DIM / 2]
    const float* __restrict__ rotary_sin,    // the same
    const int* __restrict__ q_positions,     // [batch, N]; null: row i is at i + N_kv - N
    const int* __restrict__ k_positions,     // [batch, N_kv]; null: key j is at j
    const AttentionParams params, const FusedParams fused) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
#if BIAS
  bias = static_cast<const Bias*>(bias) + block.sequence * fused.bias_batch +
         block.head * fused.bias_head + first_row * fused.bias_row;
#endif
#if ALIBI
  const float slope_log2 = alibi_slopes[block.sequence * fused.alibi_batch + block.head] * LOG2_E;
#endif
  if (q_positions)
    q_positions += block.sequence * fused.q_positions_batch + block.q_first + first_row;
  if (k_positions) k_positions += block.sequence * fused.k_positions_batch + block.k_first;

  const Window window(BLOCK_M, block, params);
  const int first_pos = window.first_pos, last_row = window.last_row, begin = window.begin;
  const int end = window.end;

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on: a warp's float4 load takes 2
  // wavefronts if neighbouring lanes read the same address, and 4 if not.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.K, K, params.k.row, begin, end);
  const float softmax_scale_log2 = params.softmax_scale * LOG2_E;
  for (int e = threadIdx.x; e < BLOCK_M * D4; e += THREADS) {
    const int r = e % BLOCK_M, c = e / BLOCK_M;
    const float4 q = first_row + r < q_len ? load4(Q + r * params.q.row, c)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < 4; ++i) smem.Q[4 * c + i][r] = softmax_scale_log2 * word(q, i);
  }
  // smem.V may be wider than a row. Copies do not write those columns and O has no place for their
  // sums: zeros will do.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D4 * THREADS_X - D4); e += THREADS)
    smem.V[e % BLOCK_N][D4 + e / BLOCK_N] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float m_i[TILE_M],
      l_i[TILE_M];  // m_i in units of log2; l_i of this thread's columns until the end
  for (int i = 0; i < TILE_M; ++i) {
    m_i[i] = M_INIT;
    l_i[i] = 0.0f;
  }
  wait_for_copies();
  __syncthreads();  // hazard: Q and K could be read before other threads have written their part

#if ROTARY
  rotate<BLOCK_M, BLOCK_M, 1>(
      smem.Q[0], rotary_cos, rotary_sin, q_positions, first_pos, q_len - first_row, fused);
#endif

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][TILE_D] = {};
  for (int first = begin; first < end; first += BLOCK_N) {
    load_tile(smem.V, V, params.v.row, first, end);  // in flight during the scores
#if ROTARY
    rotate<BLOCK_N, 1, 4 * (D4 | 1)>(
        &smem.K[0][0].x, rotary_cos, rotary_sin, k_positions ? k_positions + first : nullptr, first,
        end - first, fused);
    __syncthreads();  // hazard: Q and K could be read before other threads have rotated their part
#endif
    float s[TILE_M][TILE_N] = {};
    gemm_qk(s, smem, x, y);
#if BIAS
    add_bias(
        s, static_cast<const Bias*>(bias) + first * fused.bias_key, q_len - first_row,
        block.kv_len - first, x, y, fused);
#endif
#if ALIBI
    add_alibi(s, slope_log2, first_pos - first, x, y);
#endif
    // A key that a row does not see scores -inf, so that its weight is exactly 0.
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end))
#pragma unroll
      for (int i = 0; i < TILE_M; ++i) {
        const int row_pos = first_row + row_of(i, y) - first - x;  // from the thread's first key
        const int low = row_pos + window.lo, high = min(row_pos + window.hi, end - 1 - first - x);
#pragma unroll
        for (int j = 0; j < TILE_N; ++j)
          if (j * THREADS_X < low || j * THREADS_X > high) s[i][j] = NEG_INF;
      }

#pragma unroll
    for (int i = 0; i < TILE_M; ++i) online_softmax_row(s[i], m_i[i], l_i[i], acc[i]);
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
#pragma unroll
      for (int i = 0; i < TILE_M; i += 4)
        *reinterpret_cast<float4*>(&smem.P[x + j * THREADS_X][row_of(i, y)]) =
            make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
    wait_for_copies();
    __syncthreads();  // hazard: P and V could be read incomplete, or K overwritten while in use
    load_tile(
        smem.K, K, params.k.row, first + BLOCK_N,
        end);  // in flight while V is used; past the end: zeros
    gemm_pv(acc, smem, x, y);
    wait_for_copies();
    __syncthreads();  // hazard: K could be read incomplete, or P and V overwritten while in use
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float sum = row_allreduce<THREADS_X>(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = row_of(i, y);
    if (first_row + r >= q_len) continue;
    if (lse && x == 0) block.store_lse(lse, params, r, m_i[i], sum);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float* a = acc[i] + 4 * c;
      const float4 o = make_float4(a[0] * inverse, a[1] * inverse, a[2] * inverse, a[3] * inverse);
      if (x + c * THREADS_X < D4) store4(O + r * params.o.row, x + c * THREADS_X, o);
    }
  }
}
