// 05 heads and masks: attention as models use it. The tiles of 04, without those that no row sees.
//
// Since 04: tensors have strides, so (batch, seq, heads, HEAD_DIM) is read in place. Several heads
// of Q may share one head of K and V (GQA). Packed sequences differ in length. A row sees a window
// of keys: tiles outside it are skipped, tiles across its border are masked, tiles inside it run as
// in 04.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block THREADS,
//          sizeof(Shared) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float32,
//          strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens.
//          lse (batch, heads, N) or (heads, tokens)
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see

#include "attention_params.cuh"
#include "hooks.cuh"  // Tiles: begin, begin + BLOCK_N, ...; hook_* and HOOK_*: nothing, until 11

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
#include "register_tiles.cuh"  // pieces of 04; NEG_INF, M_INIT, LOG2_E, LN_2

constexpr int COPIES = (BLOCK_N * D4 + THREADS - 1) / THREADS;  // float4 of a tile per thread

// Q and P are stored transposed: a thread reads four rows of one column as a float4. The padding
// avoids bank conflicts within a quarter of a warp, which reads 8 rows of K (an odd number of
// float4 apart) or stores 4 columns of P.
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  float4 K[BLOCK_N][D4 | 1], V[BLOCK_N][TILE_D4 * THREADS_X];
};

// Words 4c .. 4c + 3 of a row; zeros past its end.
__device__ __forceinline__ float4 load4(const float* __restrict__ row, int c) {
#if VECTOR
  return reinterpret_cast<const float4*>(row)[c];
#else
  const int cols_left = HEAD_DIM - 4 * c;
  row += 4 * c;
  return make_float4(
      row[0], cols_left > 1 ? row[1] : 0.0f, cols_left > 2 ? row[2] : 0.0f,
      cols_left > 3 ? row[3] : 0.0f);
#endif
}

__device__ __forceinline__ void store4(float* row, int c, float4 a) {
#if VECTOR
  reinterpret_cast<float4*>(row)[c] = a;
#else
  for (int i = 0; i < 4; ++i)
    if (4 * c + i < HEAD_DIM) row[4 * c + i] = word(a, i);
#endif
}

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros from row `end` on.
template <int WIDTH>
__device__ __forceinline__ void load_tile(
    float4 (*tile)[WIDTH], const float* __restrict__ source, long long stride, int first, int end) {
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / D4, c = e % D4;
    if (BLOCK_N * D4 % THREADS != 0 && e >= BLOCK_N * D4) break;
    const bool in_bounds = first + j < end;
    const float* row = source + (in_bounds ? first + j : 0) * stride;
#if ASYNC
    // Asynchronous: uses no registers, and the thread waits only in wait_for_copies(). Past the end
    // it reads 0 bytes.
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j][c]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(row + 4 * c),
                 "r"(in_bounds ? 16 : 0)
                 : "memory");
#else
    tile[j][c] = in_bounds ? load4(row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
  }
}

// s = this thread's tile of Q K^T. Four columns of Q and K at a time: with 8 x 8 scores, 16 float4
// serve 256 FFMAs.
__device__ __forceinline__ void gemm_qk(
    float (&s)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
#pragma unroll 1
  for (int c = 0; c < D4; ++c) {
    float4 k[TILE_N];
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) k[j] = smem.K[x + j * THREADS_X][c];
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
__device__ __forceinline__ void gemm_pv(
    float (&acc)[TILE_M][TILE_D], const Shared& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[TILE_D];
    load_rows(p_column, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D; ++c) v_row[c] = word(smem.V[j][x + c / 4 * THREADS_X], c % 4);
    outer_product(acc, p_column, v_row);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) heads_and_masks(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params HOOK_PARAMETERS) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  // Causal masks: longest-first (LPT) order. The last rows see the most keys, so their tiles, of
  // all heads, start first and light ones fill the gaps at the end. Otherwise a head's tiles are
  // neighbours and find K and V in the L2 cache.
  int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  if (params.window_right < UNLIMITED) {
    const unsigned heads = gridDim.y * gridDim.z;
    const unsigned block = tile + gridDim.x * (head + gridDim.y * sequence);
    tile = gridDim.x - 1 - block / heads;
    head = block % heads % gridDim.y;
    sequence = block % heads / gridDim.y;
  }
  hook_tile(tile, sequence, BLOCK_M, params.sequences, cu_seqlens_q);
  const int first_row = tile * BLOCK_M, kv_head = head / (params.heads / params.kv_heads);
  const bool packed = cu_seqlens_q != nullptr;
  const int q_first = packed ? cu_seqlens_q[sequence] : 0;
  const int k_first = packed ? cu_seqlens_k[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : params.N;
  const int kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += sequence * params.q.batch + (q_first + first_row) * params.q.row + head * params.q.head;
  O += sequence * params.o.batch + (q_first + first_row) * params.o.row + head * params.o.head;
  K += sequence * params.k.batch + k_first * params.k.row + kv_head * params.k.head;
  V += sequence * params.v.batch + k_first * params.v.row + kv_head * params.v.head;
  const Hooks hooks = {HOOK_ARGUMENTS sequence, head, kv_head, q_len, kv_len};

  // Row i is at key i + kv_len - q_len, so that the last row is at the last key. It sees keys i +
  // window_lo .. i + window_hi; keys begin .. end - 1 are all that some row of the tile sees.
  const int window_lo = kv_len - q_len - params.window_left;
  const int window_hi = kv_len - q_len + params.window_right;
  const int last_row = min(first_row + BLOCK_M, q_len) - 1;
  const int first_pos = first_row + kv_len - q_len, last_pos = last_row + kv_len - q_len;
  const int begin = max(first_pos - params.window_left, 0);
  const int end = min(last_pos + params.window_right + 1, kv_len);

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on: a warp's float4 load takes 2
  // wavefronts if neighbouring lanes read the same address, and 4 if not.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  Tiles<BLOCK_N> tiles(hooks, tile, begin, end);
  load_tile(smem.K, K, params.k.row, tiles.first(), end);
  const float scale = scale_of_q(params.softmax_scale);  // softmax_scale LOG2_E
  for (int e = threadIdx.x; e < BLOCK_M * D4; e += THREADS) {
    const int r = e % BLOCK_M, c = e / BLOCK_M;
    const float4 q = first_row + r < q_len ? load4(Q + r * params.q.row, c)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < 4; ++i) smem.Q[4 * c + i][r] = scale * word(q, i);
  }
  // smem.V may be wider than a row. Copies do not write those columns and O has no place for their
  // sums: zeros will do.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D4 * THREADS_X - D4); e += THREADS)
    smem.V[e % BLOCK_N][D4 + e / BLOCK_N] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float m_i[TILE_M];  // in units of log2
  float l_i[TILE_M];  // of this thread's columns until the end
  for (int i = 0; i < TILE_M; ++i) hook_start(m_i[i], l_i[i], hooks, x == 0);  // M_INIT and 0
  wait_for_copies();
  __syncthreads();  // hazard: Q and K could be read before other threads have written their part

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][TILE_D] = {};
  for (int first = tiles.first(), next; first < end; first = next) {
    next = tiles.next(first);                        // first + BLOCK_N, unless 11 leaves tiles out
    load_tile(smem.V, V, params.v.row, first, end);  // in flight during the scores
    float s[TILE_M][TILE_N] = {};
    gemm_qk(s, smem, x, y);
    hook_scores<THREADS_Y, THREADS_X>(s, hooks, first_pos + 4 * y, first + x, tiles.partial(first));
    // A key that a row does not see scores -inf, so that its weight is exactly 0.
    if (first < last_row + window_lo || first + BLOCK_N > min(first_row + window_hi + 1, end))
#pragma unroll
      for (int i = 0; i < TILE_M; ++i) {
        const int row_pos = first_row + row_of(i, y) - first - x;  // from the thread's first key
        const int low = row_pos + window_lo, high = min(row_pos + window_hi, end - 1 - first - x);
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
    load_tile(smem.K, K, params.k.row, next, end);  // in flight while V is used; past end: zeros
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
    if (lse && x == 0) {
      const long long head_row =
          ((long long)(packed ? 0 : sequence) * params.heads + head) * params.N + q_first;
      lse[head_row + first_row + r] = LN_2 * (m_i[i] + log2f(sum));
    }
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float* a = acc[i] + 4 * c;
      const float4 o = make_float4(a[0] * inverse, a[1] * inverse, a[2] * inverse, a[3] * inverse);
      if (x + c * THREADS_X < D4) store4(O + r * params.o.row, x + c * THREADS_X, o);
    }
  }
}
