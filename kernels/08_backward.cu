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
//          shared memory; with SLOTS, the grids of packed_tiles.cuh
// Shapes   as 05; dO, dQ as Q, dK, dV as K; lse and delta, one number per row, (batch, heads, N) or
//          (heads, tokens)
// Traffic  backward: K, V, dK, dV once; Q, dO and the additions to dQ: for each tile of keys, the
//          rows that see it
//          backward_dq: Q, dO, dQ once; K and V: for each tile of rows, the keys that it sees

#include "backward_params.cuh"
#include "hooks.cuh"  // nothing, until the library adds something (11)

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
#ifndef VECTOR
#define VECTOR     \
  (HEAD_DIM % 4 == \
   0)  // global memory is read and written as float4: rows start at multiples of 16 bytes
#endif
#ifndef ASYNC
#define ASYNC (VECTOR && __CUDA_ARCH__ >= 800)  // tiles are copied by cp.async, which Turing lacks
#endif
#ifndef VECTOR_ATOMICS
#define VECTOR_ATOMICS \
  (VECTOR && __CUDA_ARCH__ >= 900)  // one instruction adds four floats to dQ; from Hopper on
#endif
#ifndef ROWS_UNROLL
#define ROWS_UNROLL (HEAD_DIM <= 64 ? 1 : 2)  // of the sums over rows: steps of four rows at a time
#endif
#ifndef KEYS_UNROLL
#define KEYS_UNROLL 8  // of the sum over keys
#endif
constexpr int UNROLL_ROWS = ROWS_UNROLL,
              UNROLL_KEYS = KEYS_UNROLL;  // nvcc does not expand macros in a #pragma
constexpr int THREADS_Y = THREADS / THREADS_X;
constexpr int TILE_M =
    BLOCK_M / THREADS_Y;  // rows of S and dQ per thread, in groups of four: see row_of()
constexpr int TILE_N = BLOCK_N / THREADS_X;  // columns of S per thread: x, x + THREADS_X, ...
constexpr int TILE_K = BLOCK_N / THREADS_Y;  // rows of dK and dV per thread: y, y + THREADS_Y, ...

constexpr int D4 = (HEAD_DIM + 3) / 4;  // float4 per row; the last one is filled with zeros
constexpr int TILE_D4 =
    (D4 + THREADS_X - 1) / THREADS_X;  // float4 of a row of dQ, dK or dV per thread
constexpr int TILE_D = 4 * TILE_D4;
static_assert(
    THREADS % 32 == 0 && THREADS_X % 2 == 0 && THREADS_Y % 2 == 0, "four lanes are a square");
static_assert(
    BLOCK_M % (4 * THREADS_Y) == 0 && BLOCK_N % THREADS_X == 0 && BLOCK_N % THREADS_Y == 0,
    "each thread needs the same tiles");

// An odd number of float4 per row: threads that read one column of neighbouring rows use different
// banks. P is stored transposed, as in 05. dS takes its place.
struct __align__(16) Shared {
  float4 Q[BLOCK_M][D4 | 1], dO[BLOCK_M][D4 | 1], K[BLOCK_N][D4 | 1], V[BLOCK_N][D4 | 1];
  float P[BLOCK_N][BLOCK_M + 8];
  float lse[BLOCK_M], delta[BLOCK_M];  // lse in units of log2
};

__device__ __forceinline__ float word(const float4& a, int i) {
  return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

// The row within the block that is row i of a thread's tile: groups of four, which one float4 of P
// holds.
__device__ __forceinline__ int row_of(int i, int y) {
  return i / 4 * (4 * THREADS_Y) + 4 * y + i % 4;
}

// The float4 of a row that is number c of a thread. Past the row's end: the last one, whose sums
// are not stored.
__device__ __forceinline__ int column_of(int c, int x) {
  return D4 % THREADS_X == 0 ? x + c * THREADS_X : min(x + c * THREADS_X, D4 - 1);
}

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

// The whole block copies rows first .. first + ROWS - 1 of Q, dO, K or V. Rows from end on become
// zeros.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_tile(
    float4 (&tile)[ROWS][WIDTH], const float* __restrict__ source, long long stride, int first,
    int end) {
#pragma unroll
  for (int i = 0; i < (ROWS * D4 + THREADS - 1) / THREADS; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / D4, c = e % D4;
    if (ROWS * D4 % THREADS != 0 && e >= ROWS * D4) break;
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

// Waits for this thread's own copies; the other threads' need a barrier as well.
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// lse and delta of rows first .. first + BLOCK_M - 1. Rows from end on add nothing: their Q, dO and
// delta are zeros, and so is P with a score_mod, whose scores could make it infinite.
__device__ __forceinline__ void load_row_sums(
    Shared& smem, const float* __restrict__ lse, const float* __restrict__ delta, int first,
    int end) {
  for (int r = threadIdx.x; r < BLOCK_M; r += THREADS) {
    smem.lse[r] = first + r < end ? LOG2_E * lse[first + r] : SCORE_MOD ? NEG_INF : 0.0f;
    if (SCORE_MOD && smem.lse[r] == NEG_INF) smem.lse[r] = 1e38f;
    smem.delta[r] = first + r < end ? delta[first + r] : 0.0f;
  }
}

// This thread's rows of lse, delta or one column of P.
__device__ __forceinline__ void load_rows(float (&a)[TILE_M], const float* column, int y) {
#pragma unroll
  for (int i = 0; i < TILE_M; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(column + row_of(i, y));
    a[i] = four.x;
    a[i + 1] = four.y;
    a[i + 2] = four.z;
    a[i + 3] = four.w;
  }
}

// s = this thread's tile of a b^T: Q K^T or dO V^T. With 8 x 8 products, 16 float4 serve 256 FFMAs.
__device__ __forceinline__ void gemm_rows_keys(
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

// acc += this thread's tile of P^T b, for its keys: P^T dO or dS^T Q. The sum is over the rows,
// four at a time.
__device__ __forceinline__ void gemm_keys(
    float (&acc)[TILE_K][TILE_D], const Shared& smem, const float4 (&b)[BLOCK_M][D4 | 1], int x,
    int y) {
#pragma unroll UNROLL_ROWS
  for (int r = 0; r < BLOCK_M; r += 4) {
    float4 p[TILE_K];
#pragma unroll
    for (int n = 0; n < TILE_K; ++n)
      p[n] = *reinterpret_cast<const float4*>(&smem.P[y + n * THREADS_Y][r]);
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

// acc += this thread's tile of dS K, for its rows. The sum is over the keys.
__device__ __forceinline__ void gemm_rows(
    float (&acc)[TILE_M][TILE_D], const Shared& smem, int x, int y) {
#pragma unroll UNROLL_KEYS
  for (int j = 0; j < BLOCK_N; ++j) {
    float ds[TILE_M];
    load_rows(ds, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float4 key = smem.K[j][column_of(c, x)];
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

// dS = P * (dP - delta) for this thread's tile, whose P this thread has stored itself, times the
// derivative of a score_mod, which may be infinite where P is 0: past the ends, where it is hidden.
__device__ __forceinline__ void scores_gradient(
    float (&dp)[TILE_M][TILE_N], const Shared& smem, const float (&grad)[TILE_M][TILE_N], int x,
    int y) {
  float delta[TILE_M];
  load_rows(delta, smem.delta, y);
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) {
    float p[TILE_M];
    load_rows(p, smem.P[x + j * THREADS_X], y);
#pragma unroll
    for (int i = 0; i < TILE_M; ++i)
      dp[i][j] = p[i] * (dp[i][j] - delta[i]) * (SCORE_GRAD && p[i] != 0.0f ? grad[i][j] : 1.0f);
  }
}

// Where a sequence begins and how long it is, and which keys a row sees: row i sees keys i +
// window_lo .. i + window_hi.
struct Sequence {
  int q_first, k_first, q_len, kv_len, window_lo, window_hi;
  bool packed;
};

__device__ __forceinline__ Sequence sequence_of(
    int number, const int* __restrict__ cu_seqlens_q, const int* __restrict__ cu_seqlens_k,
    const AttentionParams& forward) {
  Sequence seq;
  seq.packed = cu_seqlens_q != nullptr;
  seq.q_first = seq.packed ? cu_seqlens_q[number] : 0;
  seq.k_first = seq.packed ? cu_seqlens_k[number] : 0;
  seq.q_len = seq.packed ? cu_seqlens_q[number + 1] - seq.q_first : forward.N;
  seq.kv_len = seq.packed ? cu_seqlens_k[number + 1] - seq.k_first : forward.N_kv;
  seq.window_lo = seq.kv_len - seq.q_len - forward.window_left;
  seq.window_hi = seq.kv_len - seq.q_len + forward.window_right;
  return seq;
}

// s was this thread's tile of Q K^T and becomes P. No maximum and no sum: lse has both. Where the
// row does not see the key, P is 0, also if its lse is -inf because it sees none.
__device__ __forceinline__ void weights(
    float (&s)[TILE_M][TILE_N], float (&grad)[TILE_M][TILE_N], const Shared& smem,
    float softmax_scale, const Sequence& seq, const Hooks& hooks, int first_row, int first_key,
    bool partial, int x, int y) {
  const auto q_idx = [&](int i) { return first_row + row_of(i, y) + seq.kv_len - seq.q_len; };
  const auto kv_idx = [&](int j) { return first_key + x + j * THREADS_X; };
  modify<TILE_M, TILE_N>(
      hooks, softmax_scale, 1.0f, [&](int i, int j) -> float& { return s[i][j]; }, q_idx, kv_idx,
      false, [&](int i, int j) { return &grad[i][j]; });
  const float softmax_scale_log2 = scale_log2_of(softmax_scale);
  float lse[TILE_M];
  load_rows(lse, smem.lse, y);
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) {
      s[i][j] = exp2f(softmax_scale_log2 * s[i][j] - lse[i]);
      if (MASK_MOD && partial && is_hidden(hooks, q_idx(i), kv_idx(j))) s[i][j] = 0.0f;
    }
  const int last_row = first_row + BLOCK_M - 1, next_key = first_key + BLOCK_N;
  if (first_key < last_row + seq.window_lo ||
      next_key > min(first_row + seq.window_hi + 1, seq.kv_len))
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      const int row_pos =
          first_row + row_of(i, y) - first_key - x;  // relative to the thread's first key
      const int low = row_pos + seq.window_lo,
                high = min(row_pos + seq.window_hi, seq.kv_len - 1 - first_key - x);
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
  // Causal masks: the first keys are seen by the most rows, so their tiles, of all heads, start
  // first.
  const AttentionParams& forward = params.forward;
  int tile = blockIdx.x, kv_head = blockIdx.y, sequence = blockIdx.z;
  if (forward.window_right < UNLIMITED) {
    const unsigned heads = gridDim.y * gridDim.z,
                   block = tile + gridDim.x * (kv_head + gridDim.y * sequence);
    tile = block / heads;
    kv_head = block % heads % gridDim.y;
    sequence = block % heads / gridDim.y;
  }
  hook_tile(tile, sequence, BLOCK_N, forward.sequences, cu_seqlens_k);
  const Sequence seq = sequence_of(sequence, cu_seqlens_q, cu_seqlens_k, forward);
  const int first_key = tile * BLOCK_N;
  if (first_key >= seq.kv_len)
    return;  // the whole block, before any barrier: its sequence is shorter than the longest
  const int last_key = min(first_key + BLOCK_N, seq.kv_len) - 1;
  const int begin = max(first_key - seq.window_hi, 0),
            end = min(last_key - seq.window_lo + 1, seq.q_len);
  K += sequence * forward.k.batch + seq.k_first * forward.k.row + kv_head * forward.k.head;
  V += sequence * forward.v.batch + seq.k_first * forward.v.row + kv_head * forward.v.head;

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on, as in 05.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.K, K, forward.k.row, first_key, seq.kv_len);
  load_tile(smem.V, V, forward.v.row, first_key, seq.kv_len);

  // ---- the heads that share these keys, and their rows: five products each
  float dk[TILE_K][TILE_D] = {}, dv[TILE_K][TILE_D] = {};
  const int group = forward.heads / forward.kv_heads;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* q =
        Q + sequence * forward.q.batch + seq.q_first * forward.q.row + head * forward.q.head;
    const float* d_o =
        dO + sequence * params.d_o.batch + seq.q_first * params.d_o.row + head * params.d_o.head;
    const long long sums =
        ((long long)(seq.packed ? 0 : sequence) * forward.heads + head) * forward.N + seq.q_first;
    const Hooks hooks = {HOOK_ARGUMENTS sequence, head, kv_head, seq.q_len, seq.kv_len};
    Tiles<BLOCK_M> rows(hooks, tile, begin, end);
    for (int first_row = rows.first(), next; first_row < end; first_row = next) {
      next = rows.next(first_row);
      load_tile(smem.Q, q, forward.q.row, first_row, end);
      load_tile(smem.dO, d_o, params.d_o.row, first_row, end);
      load_row_sums(smem, lse + sums, delta + sums, first_row, end);
      wait_for_copies();
      __syncthreads();  // without it, tiles could be read before other threads' parts are there
      float s[TILE_M][TILE_N], grad[TILE_M][TILE_N];
      gemm_rows_keys(s, smem.Q, smem.K, x, y);
      weights(
          s, grad, smem, forward.softmax_scale, seq, hooks, first_row, first_key,
          rows.partial(first_row), x, y);
      store_tile(smem, s, x, y);
      __syncthreads();  // without it, P could be read before another thread has written its part
      gemm_keys(dv, smem, smem.dO, x, y);
      gemm_rows_keys(s, smem.dO, smem.V, x, y);
      scores_gradient(s, smem, grad, x, y);
      __syncthreads();  // without it, dS could overwrite P while another thread reads it for dV
      store_tile(smem, s, x, y);
      __syncthreads();  // without it, dS could be read before another thread has written its part
      gemm_keys(dk, smem, smem.Q, x, y);
      if (dQ != nullptr) {
        float dq[TILE_M][TILE_D] = {};
        gemm_rows(dq, smem, x, y);
        float* target = dQ + sequence * params.d_q.batch + head * params.d_q.head;
#pragma unroll
        for (int i = 0; i < TILE_M; ++i) {
          const int r = first_row + row_of(i, y);
          if (r >= end) break;  // rows ascend with i
#pragma unroll
          for (int c = 0; c < TILE_D4; ++c) {
            const float *a = dq[i] + 4 * c, scale = forward.softmax_scale;
            if (x + c * THREADS_X >= D4) continue;
            atomic_add4(
                target + (seq.q_first + r) * params.d_q.row, x + c * THREADS_X,
                make_float4(scale * a[0], scale * a[1], scale * a[2], scale * a[3]));
          }
        }
      }
      __syncthreads();  // without it, Q, dO and dS could be overwritten while in use
    }
  }

  // ---- epilogue: keys that no row sees get zeros
  dK += sequence * params.d_k.batch + (seq.k_first + first_key) * params.d_k.row +
        kv_head * params.d_k.head;
  dV += sequence * params.d_v.batch + (seq.k_first + first_key) * params.d_v.row +
        kv_head * params.d_v.head;
#pragma unroll
  for (int n = 0; n < TILE_K; ++n) {
    const int j = y + n * THREADS_Y;
    if (first_key + j >= seq.kv_len) continue;
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float *a = dk[n] + 4 * c, *b = dv[n] + 4 * c, scale = forward.softmax_scale;
      if (x + c * THREADS_X >= D4) continue;
      store4(
          dK + j * params.d_k.row, x + c * THREADS_X,
          make_float4(scale * a[0], scale * a[1], scale * a[2], scale * a[3]));
      store4(dV + j * params.d_v.row, x + c * THREADS_X, make_float4(b[0], b[1], b[2], b[3]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_dq(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    const float* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ delta,
    float* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const int* __restrict__ cu_seqlens_k, const BackwardParams params HOOK_PARAMETERS) {
  // ---- prologue: the tile of rows, head and sequence of this block, and the keys that they see
  const AttentionParams& forward = params.forward;
  int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  if (forward.window_right < UNLIMITED) {
    const unsigned heads = gridDim.y * gridDim.z,
                   block = tile + gridDim.x * (head + gridDim.y * sequence);
    tile = gridDim.x - 1 - block / heads;
    head = block % heads % gridDim.y;
    sequence = block % heads / gridDim.y;
  }
  hook_tile(tile, sequence, BLOCK_M, forward.sequences, cu_seqlens_q);
  const Sequence seq = sequence_of(sequence, cu_seqlens_q, cu_seqlens_k, forward);
  const int first_row = tile * BLOCK_M, kv_head = head / (forward.heads / forward.kv_heads);
  if (first_row >= seq.q_len) return;
  const int last_row = min(first_row + BLOCK_M, seq.q_len) - 1;
  const int begin = max(first_row + seq.window_lo, 0),
            end = min(last_row + seq.window_hi + 1, seq.kv_len);
  Q += sequence * forward.q.batch + seq.q_first * forward.q.row + head * forward.q.head;
  K += sequence * forward.k.batch + seq.k_first * forward.k.row + kv_head * forward.k.head;
  V += sequence * forward.v.batch + seq.k_first * forward.v.row + kv_head * forward.v.head;
  dO += sequence * params.d_o.batch + seq.q_first * params.d_o.row + head * params.d_o.head;
  dQ += sequence * params.d_q.batch + seq.q_first * params.d_q.row + head * params.d_q.head;
  const long long sums =
      ((long long)(seq.packed ? 0 : sequence) * forward.heads + head) * forward.N + seq.q_first;

  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  load_tile(smem.Q, Q, forward.q.row, first_row, seq.q_len);
  load_tile(smem.dO, dO, params.d_o.row, first_row, seq.q_len);
  load_row_sums(smem, lse + sums, delta + sums, first_row, seq.q_len);
  const Hooks hooks = {HOOK_ARGUMENTS sequence, head, kv_head, seq.q_len, seq.kv_len};

  // ---- the keys that these rows see: three products each
  float dq[TILE_M][TILE_D] = {};
  for (int first_key = begin; first_key < end; first_key += BLOCK_N) {
    load_tile(smem.K, K, forward.k.row, first_key, end);
    load_tile(smem.V, V, forward.v.row, first_key, end);
    wait_for_copies();
    __syncthreads();  // without it, tiles could be read before other threads' parts are there
    float s[TILE_M][TILE_N], grad[TILE_M][TILE_N];
    gemm_rows_keys(s, smem.Q, smem.K, x, y);
    weights(s, grad, smem, forward.softmax_scale, seq, hooks, first_row, first_key, true, x, y);
    store_tile(smem, s, x, y);
    gemm_rows_keys(s, smem.dO, smem.V, x, y);
    scores_gradient(s, smem, grad, x, y);
    store_tile(smem, s, x, y);
    __syncthreads();  // without it, dS could be read before another thread has written its part
    gemm_rows(dq, smem, x, y);
    __syncthreads();  // without it, K, V and dS could be overwritten while in use
  }

  // ---- epilogue: a row that sees no key gets zeros
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const int r = first_row + row_of(i, y);
    if (r >= seq.q_len) continue;
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float *a = dq[i] + 4 * c, scale = forward.softmax_scale;
      if (x + c * THREADS_X >= D4) continue;
      store4(
          dQ + r * params.d_q.row, x + c * THREADS_X,
          make_float4(scale * a[0], scale * a[1], scale * a[2], scale * a[3]));
    }
  }
}
