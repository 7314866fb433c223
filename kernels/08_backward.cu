// 08 backward: the gradients of Q, K and V. P is computed again, from Q, K and the lse that the
// forward saved.
//
//   S = softmax_scale Q K^T    P = exp(S - lse)    delta = rowsum(dO * O)
//   dP = dO V^T                dS = P * (dP - delta)
//   dV = P^T dO                dK = softmax_scale dS^T Q          dQ = softmax_scale dS K
//
// backward is one loop of five products: a block has a tile of keys, keeps their dK and dV in
// registers, and goes through the rows that see them. Several blocks add to the same rows of dQ,
// atomically, in an order that differs from run to run. Without atomics the gradients take seven
// products: backward leaves dQ out, and backward_dq, with a block for each tile of rows, computes S
// and dP again.
//
// Launch   backward_preprocess: grid (ceil(N / (THREADS / 32)), heads, batch); packed sequences: N
//          is the number of all tokens, batch 1
//          backward: grid (ceil(keys of the longest sequence / BLOCK_N), kv_heads, sequences)
//          backward_dq: grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences)
//          All three: block THREADS. backward and backward_dq: sizeof(Shared) bytes of dynamic
//          shared memory
// Shapes   as 05; dO, dQ as Q, dK, dV as K; lse and delta, one number per row, (batch, heads, N) or
//          (heads, tokens)
// Traffic  backward: K, V, dK, dV once; Q, dO and the additions to dQ: for each tile of keys, the
//          rows that see it
//          backward_dq: Q, dO, dQ once; K and V: for each tile of rows, the keys that it sees

#include "backward_params.cuh"
#include "backward_hooks.cuh"  // nothing, until the library adds something (11)

#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 64  // B_c, keys per tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#ifndef THREADS
#define THREADS 128  // per block
#endif
#ifndef THREADS_X
#define THREADS_X 8  // threads side by side: over the columns of S, and over those of dQ, dK, dV
#endif
#include "float4_rows.cuh"     // load4, store4, load_tile: 05
#include "register_tiles.cuh"  // row_of, load_rows and the sizes of a thread's tiles: 04

#ifndef VECTOR_ATOMICS
#define VECTOR_ATOMICS \
  (VECTOR && __CUDA_ARCH__ >= 900)  // one instruction adds four floats to dQ; from Hopper on
#endif
constexpr int TILE_K = BLOCK_N / THREADS_Y;  // rows of dK and dV per thread: y, y + THREADS_Y, ...
constexpr int ROWS_UNROLL = HEAD_DIM <= 64 ? 1 : 2;  // of sums over rows, four rows at a time
constexpr int KEYS_UNROLL = 8;                       // of sums over keys
static_assert(
    THREADS % 32 == 0 && THREADS_X % 2 == 0 && THREADS_Y % 2 == 0, "four lanes are a square");
static_assert(BLOCK_N % THREADS_Y == 0, "each thread needs the same tiles");

// An odd number of float4 per row: threads that read one column of neighbouring rows use different
// banks. P is stored transposed, as in 05. dS takes its place.
using Transposed = float[BLOCK_N][BLOCK_M + 8];
struct __align__(16) Shared {
  float4 Q[BLOCK_M][D4 | 1], dO[BLOCK_M][D4 | 1], K[BLOCK_N][D4 | 1], V[BLOCK_N][D4 | 1];
  Transposed P;
  float lse[BLOCK_M], delta[BLOCK_M];  // lse in units of log2
};

// Where in a row this thread's float4 number c is. Past the row's end: the last one, whose products are
// not stored.
__device__ __forceinline__ int column_of(int c, int x) {
  return D4 % THREADS_X == 0 ? x + c * THREADS_X : min(x + c * THREADS_X, D4 - 1);
}

// Adds to words 4c .. 4c + 3 of a row, to which other blocks add too.
__device__ __forceinline__ void atomic_add4(float* row, int c, float4 a) {
#if VECTOR_ATOMICS
  atomicAdd(reinterpret_cast<float4*>(row) + c, a);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * c + i < HEAD_DIM) atomicAdd(row + 4 * c + i, word(a, i));
#endif
}

// Stores this thread's columns of a row of a gradient, or adds them to what other blocks add.
template <bool ADD = false>
__device__ __forceinline__ void store_row(
    float* row, const float (&acc)[TILE_D], float scale, int x) {
#pragma unroll
  for (int c = 0; c < TILE_D4; ++c) {
    const float* a = acc + 4 * c;
    if (x + c * THREADS_X >= D4) continue;
    const float4 four = make_float4(scale * a[0], scale * a[1], scale * a[2], scale * a[3]);
    if (ADD) atomic_add4(row, x + c * THREADS_X, four);
    else store4(row, x + c * THREADS_X, four);
  }
}

// lse and delta of rows first .. first + BLOCK_M - 1. Rows from end on add nothing: their Q, dO and
// delta are zeros.
__device__ __forceinline__ void load_lse_delta(
    Shared& smem, const float* __restrict__ lse, const float* __restrict__ delta, int first,
    int end) {
  for (int r = threadIdx.x; r < BLOCK_M; r += THREADS) {
    smem.lse[r] = hook_lse(first + r < end ? LOG2_E * lse[first + r] : 0.0f, first + r < end);
    smem.delta[r] = first + r < end ? delta[first + r] : 0.0f;
  }
}

// s = this thread's tile of a b^T: Q K^T or dO V^T. With 8 x 8 products, 16 float4 serve 256 FFMAs.
__device__ __forceinline__ void gemm_abt(
    float (&s)[TILE_M][TILE_N], const float4 (&a)[BLOCK_M][D4 | 1],
    const float4 (&b)[BLOCK_N][D4 | 1], int x, int y) {
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) s[i][j] = 0.0f;
#pragma unroll 1
  for (int c = 0; c < D4; ++c) {
    float4 key[TILE_N];
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) key[j] = b[x + j * THREADS_X][c];
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      const float4 row = a[row_of(i, y)][c];
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int j = 0; j < TILE_N; ++j) s[i][j] += word(row, w) * word(key[j], w);
    }
  }
}

// acc += this thread's tile of a^T b, for its keys: P^T dO or dS^T Q. The sum is over the rows, four
// at a time.
__device__ __forceinline__ void gemm_atb(
    float (&acc)[TILE_K][TILE_D], const Transposed& a, const float4 (&b)[BLOCK_M][D4 | 1], int x,
    int y) {
#pragma unroll ROWS_UNROLL
  for (int r = 0; r < BLOCK_M; r += 4) {
    float4 p[TILE_K];
#pragma unroll
    for (int n = 0; n < TILE_K; ++n)
      p[n] = *reinterpret_cast<const float4*>(&a[y + n * THREADS_Y][r]);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int c = 0; c < TILE_D4; ++c) {
        const float4 row = b[r + w][column_of(c, x)];
#pragma unroll
        for (int n = 0; n < TILE_K; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[n][4 * c + i] += word(p[n], w) * word(row, i);
      }
  }
}

// acc += this thread's tile of a b, for its rows: dS K. The sum is over the keys.
__device__ __forceinline__ void gemm_ab(
    float (&acc)[TILE_M][TILE_D], const Transposed& a, const float4 (&b)[BLOCK_N][D4 | 1], int x,
    int y) {
#pragma unroll KEYS_UNROLL
  for (int j = 0; j < BLOCK_N; ++j) {
    float ds[TILE_M];
    load_rows(ds, a[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float4 key = b[j][column_of(c, x)];
#pragma unroll
      for (int i = 0; i < TILE_M; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) acc[i][4 * c + n] += ds[i] * word(key, n);
    }
  }
}

// smem.P = this thread's tile of P, or of dS.
__device__ __forceinline__ void store_tile(
    Shared& smem, const float (&s)[TILE_M][TILE_N], int x, int y) {
#pragma unroll
  for (int j = 0; j < TILE_N; ++j)
#pragma unroll
    for (int i = 0; i < TILE_M; i += 4)
      *reinterpret_cast<float4*>(&smem.P[x + j * THREADS_X][row_of(i, y)]) =
          make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
}

// dS = P * (dP - delta) for this thread's tile, whose P this thread has stored itself.
__device__ __forceinline__ void scores_gradient(
    float (&dp)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
  float delta[TILE_M];
  load_rows(delta, smem.delta, y);
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) {
    float p[TILE_M];
    load_rows(p, smem.P[x + j * THREADS_X], y);
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) dp[i][j] = p[i] * (dp[i][j] - delta[i]);
  }
}

// The tile, head and sequence of this block, as in 05, and which keys a row sees: row i sees keys
// i + window_lo .. i + window_hi.
struct Place {
  enum Tile { ROWS, KEYS };

  int tile, head, sequence;  // a tile of rows and its head, or a tile of keys and a head of K and V
  int q_first, k_first;      // where a packed sequence begins; else 0
  int q_len, kv_len, window_lo, window_hi;
  bool packed;

  // Causal masks: the first keys are seen by the most rows, and the last rows see the most keys. These
  // tiles, of all heads, start first.
  __device__ __forceinline__ Place(
      Tile of, const int* __restrict__ cu_seqlens_q, const int* __restrict__ cu_seqlens_k,
      const AttentionParams& forward) {
    tile = blockIdx.x;
    head = blockIdx.y;
    sequence = blockIdx.z;
    if (forward.window_right < UNLIMITED) {
      const unsigned heads = gridDim.y * gridDim.z,
                     block = tile + gridDim.x * (head + gridDim.y * sequence);
      tile = of == ROWS ? gridDim.x - 1 - block / heads : block / heads;
      head = block % heads % gridDim.y;
      sequence = block % heads / gridDim.y;
    }
    hook_tile(
        tile, sequence, of == ROWS ? BLOCK_M : BLOCK_N, forward.sequences,
        of == ROWS ? cu_seqlens_q : cu_seqlens_k);
    packed = cu_seqlens_q != nullptr;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    k_first = packed ? cu_seqlens_k[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
    kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
    window_lo = kv_len - q_len - forward.window_left;
    window_hi = kv_len - q_len + forward.window_right;
  }

  // The sequence's first row in Q, dO or dQ; a key in K, V, dK or dV; its first row in lse or delta.
  __device__ __forceinline__ long long row_offset(const Strides& q, int head) const {
    return sequence * q.batch + q_first * q.row + head * q.head;
  }
  __device__ __forceinline__ long long key_offset(const Strides& k, int head, int key = 0) const {
    return sequence * k.batch + (k_first + key) * k.row + head * k.head;
  }
  __device__ __forceinline__ long long lse_offset(const AttentionParams& forward, int head) const {
    return ((long long)(packed ? 0 : sequence) * forward.heads + head) * forward.N + q_first;
  }
};

// s was this thread's tile of Q K^T and becomes P. No maximum and no sum: lse has both. Where the row
// does not see the key, P is 0, also if its lse is -inf because it sees none.
__device__ __forceinline__ void weights(
    float (&s)[TILE_M][TILE_N], const Shared& smem, float softmax_scale_log2, const Place& at,
    int first_row, int first_key, int x, int y) {
  float lse[TILE_M];
  load_rows(lse, smem.lse, y);
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) s[i][j] = exp2f(softmax_scale_log2 * s[i][j] - lse[i]);
  const int last_row = first_row + BLOCK_M - 1, next_key = first_key + BLOCK_N;
  if (first_key < last_row + at.window_lo ||
      next_key > min(first_row + at.window_hi + 1, at.kv_len))
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      const int row_pos =
          first_row + row_of(i, y) - first_key - x;  // relative to the thread's first key
      const int low = row_pos + at.window_lo,
                high = min(row_pos + at.window_hi, at.kv_len - 1 - first_key - x);
#pragma unroll
      for (int j = 0; j < TILE_N; ++j)
        if (j * THREADS_X < low || j * THREADS_X > high) s[i][j] = 0.0f;
    }
}

// delta, one number per row, by one warp per row; and zeros in dQ, to which blocks will add.
extern "C" __global__ void __launch_bounds__(THREADS) backward_preprocess(
    const float* __restrict__ O, const float* __restrict__ dO, float* __restrict__ delta,
    float* __restrict__ dQ,  // null: no block adds to it
    const BackwardParams params) {
  // ---- a warp for each row
  const AttentionParams& forward = params.forward;
  const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= forward.N) return;
  O += batch * forward.o.batch + row * forward.o.row + head * forward.o.head;
  dO += batch * params.d_o.batch + row * params.d_o.row + head * params.d_o.head;
  float sum = 0.0f;
  for (int c = lane; c < HEAD_DIM; c += 32) sum += dO[c] * O[c];
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  if (lane == 0) delta[((long long)batch * forward.heads + head) * forward.N + row] = sum;
  if (dQ == nullptr) return;
  dQ += batch * params.d_q.batch + row * params.d_q.row + head * params.d_q.head;
  for (int c = lane; c < HEAD_DIM; c += 32) dQ[c] = 0.0f;
}

// __launch_bounds__: one block per multiprocessor is enough, so the compiler may use 255 registers
// a thread.
extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    const float* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ delta,
    float* __restrict__ dQ,  // null: only dK and dV
    float* __restrict__ dK, float* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params HOOK_PARAMETERS) {
  // ---- prologue: the tile of keys, head and sequence of this block, and the rows that see them
  const AttentionParams& forward = params.forward;
  const Place at(Place::KEYS, cu_seqlens_q, cu_seqlens_k, forward);
  const int kv_head = at.head, first_key = at.tile * BLOCK_N;
  if (first_key >= at.kv_len)
    return;  // the whole block, before any barrier: its sequence is shorter than the longest
  const int last_key = min(first_key + BLOCK_N, at.kv_len) - 1;
  // A row sees a key if key - window_hi <= row <= key - window_lo.
  const int begin = max(first_key - at.window_hi, 0),
            end = min(last_key - at.window_lo + 1, at.q_len);
  K += at.key_offset(forward.k, kv_head);
  V += at.key_offset(forward.v, kv_head);

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on, as in 05.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.K, K, forward.k.row, first_key, at.kv_len);
  load_tile(smem.V, V, forward.v.row, first_key, at.kv_len);

  // ---- the heads that share these keys, and their rows: five products each
  float dk[TILE_K][TILE_D] = {}, dv[TILE_K][TILE_D] = {};
  const float scale = forward.softmax_scale, scale_log2 = scale_log2_of(scale);
  const int group = forward.heads / forward.kv_heads;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* q = Q + at.row_offset(forward.q, head);
    const float* d_o = dO + at.row_offset(params.d_o, head);
    const long long lse_offset = at.lse_offset(forward, head);
    const Hooks hooks = {HOOK_ARGUMENTS at.sequence, head, kv_head, at.q_len, at.kv_len};
    Tiles<BLOCK_M> tiles(hooks, at.tile, begin, end);
    // hook_*: nothing, until 11.
    for (int first_row = tiles.first(), next; first_row < end; first_row = next) {
      next = tiles.next(first_row);
      load_tile(smem.Q, q, forward.q.row, first_row, end);
      load_tile(smem.dO, d_o, params.d_o.row, first_row, end);
      load_lse_delta(smem, lse + lse_offset, delta + lse_offset, first_row, end);
      wait_for_copies();
      __syncthreads();  // without it, tiles could be read before other threads' parts are there
      const int q_idx = first_row + 4 * y + at.kv_len - at.q_len, kv_idx = first_key + x;
      HookGradient<TILE_M, TILE_N> grad;
      float s[TILE_M][TILE_N], dp[TILE_M][TILE_N];
      gemm_abt(s, smem.Q, smem.K, x, y);
      hook_scores<THREADS_Y, THREADS_X>(s, grad, hooks, scale, q_idx, kv_idx);
      weights(s, smem, scale_log2, at, first_row, first_key, x, y);
      hook_weights<THREADS_Y, THREADS_X>(s, hooks, q_idx, kv_idx, tiles.partial(first_row));
      store_tile(smem, s, x, y);
      __syncthreads();  // without it, P could be read before another thread has written its part
      gemm_atb(dv, smem.P, smem.dO, x, y);
      gemm_abt(dp, smem.dO, smem.V, x, y);
      scores_gradient(dp, smem, x, y);
      hook_gradients(dp, grad);
      __syncthreads();  // without it, dS could overwrite P while another thread reads it for dV
      store_tile(smem, dp, x, y);  // from here on smem.P is dS
      __syncthreads();  // without it, dS could be read before another thread has written its part
      gemm_atb(dk, smem.P, smem.Q, x, y);
      if (dQ != nullptr) {
        float dq[TILE_M][TILE_D] = {};
        gemm_ab(dq, smem.P, smem.K, x, y);
        float* target = dQ + at.sequence * params.d_q.batch + head * params.d_q.head;
#pragma unroll
        for (int i = 0; i < TILE_M; ++i) {
          const int r = first_row + row_of(i, y);
          if (r >= end) break;  // rows ascend with i
          store_row<true>(target + (at.q_first + r) * params.d_q.row, dq[i], scale, x);
        }
      }
      __syncthreads();  // without it, Q, dO and dS could be overwritten while in use
    }
  }

  // ---- epilogue: keys that no row sees get zeros
  dK += at.key_offset(params.d_k, kv_head, first_key);
  dV += at.key_offset(params.d_v, kv_head, first_key);
#pragma unroll
  for (int n = 0; n < TILE_K; ++n) {
    const int j = y + n * THREADS_Y;
    if (first_key + j >= at.kv_len) continue;
    store_row(dK + j * params.d_k.row, dk[n], scale, x);
    store_row(dV + j * params.d_v.row, dv[n], 1.0f, x);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dq(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    const float* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ delta,
    float* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const int* __restrict__ cu_seqlens_k, const BackwardParams params HOOK_PARAMETERS) {
  // ---- prologue: the tile of rows, head and sequence of this block, and the keys that they see
  const AttentionParams& forward = params.forward;
  const Place at(Place::ROWS, cu_seqlens_q, cu_seqlens_k, forward);
  const int head = at.head, kv_head = head / (forward.heads / forward.kv_heads);
  const int first_row = at.tile * BLOCK_M;
  if (first_row >= at.q_len) return;
  const int last_row = min(first_row + BLOCK_M, at.q_len) - 1;
  const int begin = max(first_row + at.window_lo, 0),
            end = min(last_row + at.window_hi + 1, at.kv_len);
  Q += at.row_offset(forward.q, head);
  K += at.key_offset(forward.k, kv_head);
  V += at.key_offset(forward.v, kv_head);
  dO += at.row_offset(params.d_o, head);
  dQ += at.row_offset(params.d_q, head);
  const long long lse_offset = at.lse_offset(forward, head);

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.Q, Q, forward.q.row, first_row, at.q_len);
  load_tile(smem.dO, dO, params.d_o.row, first_row, at.q_len);
  load_lse_delta(smem, lse + lse_offset, delta + lse_offset, first_row, at.q_len);
  const Hooks hooks = {HOOK_ARGUMENTS at.sequence, head, kv_head, at.q_len, at.kv_len};
  const float scale = forward.softmax_scale, scale_log2 = scale_log2_of(scale);

  // ---- the keys that these rows see: three products each
  float dq[TILE_M][TILE_D] = {};
  for (int first_key = begin; first_key < end; first_key += BLOCK_N) {
    load_tile(smem.K, K, forward.k.row, first_key, end);
    load_tile(smem.V, V, forward.v.row, first_key, end);
    wait_for_copies();
    __syncthreads();  // without it, tiles could be read before other threads' parts are there
    const int q_idx = first_row + 4 * y + at.kv_len - at.q_len, kv_idx = first_key + x;
    HookGradient<TILE_M, TILE_N> grad;
    float s[TILE_M][TILE_N], dp[TILE_M][TILE_N];
    gemm_abt(s, smem.Q, smem.K, x, y);
    hook_scores<THREADS_Y, THREADS_X>(s, grad, hooks, scale, q_idx, kv_idx);
    weights(s, smem, scale_log2, at, first_row, first_key, x, y);
    hook_weights<THREADS_Y, THREADS_X>(s, hooks, q_idx, kv_idx, true);
    store_tile(smem, s, x, y);
    gemm_abt(dp, smem.dO, smem.V, x, y);
    scores_gradient(dp, smem, x, y);
    hook_gradients(dp, grad);
    store_tile(smem, dp, x, y);
    __syncthreads();  // without it, dS could be read before another thread has written its part
    gemm_ab(dq, smem.P, smem.K, x, y);
    __syncthreads();  // without it, K, V and dS could be overwritten while in use
  }

  // ---- epilogue: a row that sees no key gets zeros
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const int r = first_row + row_of(i, y);
    if (r < at.q_len) store_row(dQ + r * params.d_q.row, dq[i], scale, x);
  }
}
