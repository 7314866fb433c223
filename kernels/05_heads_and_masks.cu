// 05 heads and masks: attention as models use it. The tiles of 04, without those that no row of a block sees.
//
// Since 04: tensors have strides, so (batch, seq, heads, HEAD_DIM) is read in place. Several heads of Q may share one
// head of K and V (GQA). Packed sequences differ in length. A row sees a window of keys: tiles outside it are skipped,
// tiles across its border are masked, tiles inside it run as in 04.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block THREADS, sizeof(Shared) bytes
//          of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float32, strides in elements, rows
//          contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Traffic  Q and O once; K and V: for each tile of rows, from the first key that one of them sees to the last

#include "attention_params.cuh"

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
#define VECTOR (HEAD_DIM % 4 == 0)  // global memory is read and written as float4: rows start at multiples of 16 bytes
#endif
#ifndef ASYNC
#define ASYNC (VECTOR && __CUDA_ARCH__ >= 800)  // K and V are copied by cp.async, which Turing lacks
#endif
#include "register_tiles.cuh"  // 04's tiles of S and O in registers, NEG_INF, LOG2_E, M_INIT

// The tile, head and sequence of this block.
struct Block {
  int head, kv_head, sequence;
  int first_row;         // of the tile, in its sequence
  int q_first, k_first;  // where a packed sequence begins in Q and K; else 0
  int q_len, kv_len;     // rows and keys of the sequence
  bool packed;

  __device__ __forceinline__ Block(
      int block_m, const AttentionParams& params, const int* cu_seqlens_q, const int* cu_seqlens_k) {
    int tile = blockIdx.x;
    head = blockIdx.y;
    sequence = blockIdx.z;
    // Causal masks: longest-first (LPT) order. The last rows see the most keys, so their tiles, of all heads, start
    // first and light ones fill the gaps at the end. Otherwise a head's tiles are neighbours and find K and V in the L2
    // cache.
    if (params.window_right < UNLIMITED) {
      const unsigned heads = gridDim.y * gridDim.z, block = tile + gridDim.x * (head + gridDim.y * sequence);
      tile = gridDim.x - 1 - block / heads;
      head = block % heads % gridDim.y;
      sequence = block % heads / gridDim.y;
    }
    kv_head = head / (params.heads / params.kv_heads);
    first_row = tile * block_m;
    packed = cu_seqlens_q != nullptr;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    k_first = packed ? cu_seqlens_k[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : params.N;
    kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv;
  }

  // Where the tile's first row is in Q or O, and the sequence's first key in K or V, in elements.
  __device__ __forceinline__ long long rows_offset(const Strides& q) const {
    return sequence * q.batch + (q_first + first_row) * q.row + head * q.head;
  }
  __device__ __forceinline__ long long keys_offset(const Strides& k) const {
    return sequence * k.batch + k_first * k.row + kv_head * k.head;
  }

  // The log-sum-exp of row r of the tile, from its maximum in units of log2 and its sum.
  __device__ __forceinline__ void store_lse(
      float* lse, const AttentionParams& params, int r, float m_i, float sum) const {
    const long long head_row = ((long long)(packed ? 0 : sequence) * params.heads + head) * params.N + q_first;
    lse[head_row + first_row + r] = LN_2 * (m_i + log2f(sum));
  }
};

// The keys that rows of a tile see. The last row of Q is at the last key: row i is at key i + kv_len - q_len.
struct Window {
  int lo, hi;               // row i sees keys i + lo .. i + hi
  int last_row;             // of the tile
  int first_pos, last_pos;  // the keys at which the first and the last row are
  int begin, end;           // keys begin .. end - 1 are all that some row of the tile sees

  __device__ __forceinline__ Window(int block_m, const Block& block, const AttentionParams& params) {
    lo = block.kv_len - block.q_len - params.window_left;
    hi = block.kv_len - block.q_len + params.window_right;
    last_row = min(block.first_row + block_m, block.q_len) - 1;
    first_pos = block.first_row + block.kv_len - block.q_len;
    last_pos = last_row + block.kv_len - block.q_len;
    begin = max(first_pos - params.window_left, 0);
    end = min(last_pos + params.window_right + 1, block.kv_len);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) heads_and_masks(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V, float* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; null: not wanted
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each sequence of Q begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: its sequence is shorter than the longest
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int last_row = window.last_row, begin = window.begin, end = window.end;

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on: a warp's float4 load takes 2 wavefronts if
  // neighbouring lanes read the same address, and 4 if not.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.K, K, params.k.row, begin, end);
  const float softmax_scale_log2 = params.softmax_scale * LOG2_E;
  for (int e = threadIdx.x; e < BLOCK_M * D4; e += THREADS) {
    const int r = e % BLOCK_M, c = e / BLOCK_M;
    const float4 q = first_row + r < q_len ? load4(Q + r * params.q.row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < 4; ++i) smem.Q[4 * c + i][r] = softmax_scale_log2 * word(q, i);
  }
  // smem.V may be wider than a row. Copies do not write those columns and O has no place for their sums: zeros will do.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D4 * THREADS_X - D4); e += THREADS)
    smem.V[e % BLOCK_N][D4 + e / BLOCK_N] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float m_i[TILE_M], l_i[TILE_M];  // m_i in units of log2; l_i of this thread's columns only, until the epilogue
  for (int i = 0; i < TILE_M; ++i) {
    m_i[i] = M_INIT;
    l_i[i] = 0.0f;
  }
  wait_for_copies();
  __syncthreads();  // hazard: Q and K are read before another thread has written its part of them

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][TILE_D] = {};
  for (int first = begin; first < end; first += BLOCK_N) {
    load_tile(smem.V, V, params.v.row, first, end);  // in flight while the scores are computed
    float s[TILE_M][TILE_N] = {};
    gemm_qk(s, smem, x, y);
    // A key that a row does not see scores -inf, so that its weight is exactly 0.
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end))
#pragma unroll
      for (int i = 0; i < TILE_M; ++i) {
        const int row_pos = first_row + row_of(i, y) - first - x;  // relative to the thread's first key
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
    __syncthreads();  // hazard: P and V are read before another thread has written its part; K is replaced while in use
    load_tile(smem.K, K, params.k.row, first + BLOCK_N, end);  // in flight while V is used; past the end: zeros
    gemm_pv(acc, smem, x, y);
    wait_for_copies();
    __syncthreads();  // hazard: K is read before another thread has written its part; P and V are replaced while in use
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float sum = row_allreduce<THREADS_X>(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that sees no key: zeros, and lse = -inf
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
