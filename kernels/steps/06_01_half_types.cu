// 06, step 1, half types: Q, K, V and O are float16 or bfloat16, so they take half as many bytes in
// global memory.
//
// Since 05: K and V keep their type in shared memory; every sum and product is still float32, in
// the register tiles.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block THREADS,
//          sizeof(Shared) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Needs    sm_75 for float16, sm_80 for bfloat16; HEAD_DIM and strides multiples of 8, pointers of
//          16 bytes
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see
#include "block.cuh"  // Block, Window: 05
#include "half2.cuh"  // pack: 06

#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per block
#endif
#ifndef BLOCK_N
#define BLOCK_N 32  // B_c, keys per tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 128
#endif
#ifndef THREADS
#define THREADS 128  // per block
#endif
#ifndef THREADS_X
#define THREADS_X 8  // threads that share a row
#endif
#ifndef ASYNC
#define ASYNC (__CUDA_ARCH__ >= 800)  // copies by cp.async, which Turing lacks
#endif

#include "register_tiles.cuh"  // of 04; and NEG_INF, LOG2_E, M_INIT

constexpr int CHUNKS = HEAD_DIM / 8;                   // of 16 bytes in a row of K or V
constexpr int STRIDE = (HEAD_DIM + 15) / 16 * 16 + 8;  // elements of a padded row of K
constexpr int COPIES = (BLOCK_N * CHUNKS + THREADS - 1) / THREADS;  // chunks of a tile per thread
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "whole chunks; acc must fit the registers");

// Q and P are stored transposed: a thread reads four rows of one column as a float4. The padding
// avoids bank conflicts within a quarter of a warp, which reads 8 rows of K (an odd number of
// chunks apart) or stores 4 columns of P.
template <typename T>
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  T K[BLOCK_N][STRIDE], V[BLOCK_N][4 * TILE_D4 * THREADS_X];
};

// Elements 4c .. 4c + 3 of a row, in float32.
template <typename T>
__device__ __forceinline__ float4 load4(const T* __restrict__ row, int c) {
  const uint2 four = reinterpret_cast<const uint2*>(row)[c];
  const T* a = reinterpret_cast<const T*>(&four);
  return make_float4(a[0], a[1], a[2], a[3]);
}

template <typename T>
__device__ __forceinline__ void store4(T* row, int c, float4 a) {
  reinterpret_cast<uint2*>(row)[c] = make_uint2(pack(T(), a.x, a.y), pack(T(), a.z, a.w));
}

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros from row `end` on.
template <int WIDTH, typename T>
__device__ __forceinline__ void load_tile(
    T (*tile)[WIDTH], const T* __restrict__ source, long long stride, int first, int end) {
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / CHUNKS, c = 8 * (e % CHUNKS);
    if (BLOCK_N * CHUNKS % THREADS != 0 && e >= BLOCK_N * CHUNKS) break;
    const bool in_bounds = first + j < end;
    const T* chunk = source + (in_bounds ? first + j : 0) * stride + c;
#if ASYNC
    // Asynchronous: uses no registers, and the thread waits only in wait_for_copies(). Past the end
    // it reads 0 bytes.
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j][c]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(chunk),
                 "r"(in_bounds ? 16 : 0)
                 : "memory");
#else
    *reinterpret_cast<uint4*>(&tile[j][c]) =
        in_bounds ? *reinterpret_cast<const uint4*>(chunk) : make_uint4(0, 0, 0, 0);
#endif
  }
}

// s = this thread's tile of Q K^T. Four columns of Q and K at a time: with 8 x 8 scores, 16 float4
// serve 256 FFMAs.
template <typename T>
__device__ __forceinline__ void gemm_qk(
    float (&s)[TILE_M][TILE_N], const Shared<T>& smem, int x, int y) {
#pragma unroll 1
  for (int c = 0; c < D4; ++c) {
    float4 k[TILE_N];
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) k[j] = load4(smem.K[x + j * THREADS_X], c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float q_column[TILE_M], k_column[TILE_N];
      load_rows(q_column, smem.Q[4 * c + i], y);
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) k_column[j] = word(k[j], i);
      outer_product(s, q_column, k_column);
    }
  }
}

// acc += this thread's tile of P V.
template <typename T>
__device__ __forceinline__ void gemm_pv(
    float (&acc)[TILE_M][TILE_D], const Shared<T>& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[TILE_D];
    load_rows(p_column, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float4 v = load4(smem.V[j], x + c * THREADS_X);
#pragma unroll
      for (int i = 0; i < 4; ++i) v_row[4 * c + i] = word(v, i);
    }
    outer_product(acc, p_column, v_row);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) flash_wmma(
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

  extern __shared__ float4 dynamic_smem[];
  Shared<T>& smem = *reinterpret_cast<Shared<T>*>(dynamic_smem);
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
  for (int e = threadIdx.x; e < BLOCK_N * (4 * TILE_D4 * THREADS_X - HEAD_DIM); e += THREADS)
    smem.V[e % BLOCK_N][HEAD_DIM + e / BLOCK_N] = 0.0f;
  float m_i[TILE_M],
      l_i[TILE_M];  // m_i in units of log2; l_i of this thread's columns until the end
  for (int i = 0; i < TILE_M; ++i) {
    m_i[i] = M_INIT;
    l_i[i] = 0.0f;
  }
  wait_for_copies();
  __syncthreads();  // hazard: Q and K could be read before other threads have written their part

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][TILE_D] = {};
  for (int first = begin; first < end; first += BLOCK_N) {
    load_tile(smem.V, V, params.v.row, first, end);  // in flight during the scores
    float s[TILE_M][TILE_N] = {};
    gemm_qk(s, smem, x, y);
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
