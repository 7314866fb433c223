// 05 heads and masks: what a model needs of attention. The tiles of 04, but only those that somebody sees.
//
// Since 04: every tensor has strides, so (batch, seq, heads, HEAD_DIM) is read where it lies. Several heads of Q may share
// one of K and V (GQA). Sequences have lengths of their own. A row sees the keys from row + lowest to row + highest: tiles
// outside of that are skipped, tiles across a border are masked, tiles inside run as in 04.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block THREADS, sizeof(Shared) bytes
// Shapes   Q, O (batch, N, heads, HEAD_DIM); K, V (batch, N_kv, kv_heads, HEAD_DIM); lse (batch, heads, N); packed, with
//          cu_seqlens: no batch, N is all tokens; float32, the words of a row side by side, other strides in elements
// Asks for Q and O once; K and V: for each tile of rows, from the first key that one of them sees to the last

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
#define THREADS_X 8  // of them share a row
#endif
#ifndef VECTOR
#define VECTOR (HEAD_DIM % 4 == 0)  // rows start at multiples of 16 bytes, and move as float4
#endif
#ifndef ASYNC
#define ASYNC (VECTOR && __CUDA_ARCH__ >= 800)  // cp.async, which Turing lacks
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC knows no INFINITY
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define FAR (1 << 29)  // a window without a limit; sequences are shorter

#define THREADS_Y (THREADS / THREADS_X)
#define TILE_M (BLOCK_M / THREADS_Y)                     // rows of S and O per thread
#define TILE_N (BLOCK_N / THREADS_X)                     // columns of S per thread: x, x + THREADS_X, ...
#define D4 ((HEAD_DIM + 3) / 4)                          // float4 in a row; zeros fill the last one
#define TILE_D4 ((D4 + THREADS_X - 1) / THREADS_X)       // float4 of a row of O per thread: x, x + THREADS_X, ...
#define COPIES ((BLOCK_N * D4 + THREADS - 1) / THREADS)  // float4 of a tile of K or V per thread
static_assert(THREADS % 32 == 0 && THREADS_X >= 4 && 32 % (2 * THREADS_X) == 0, "two rows' threads must fit a warp");
static_assert(
    BLOCK_M % (4 * THREADS_Y) == 0 && BLOCK_N % THREADS_X == 0, "each thread needs the same tile, of 4 rows or 8");

// Q and P lie with the rows of S side by side: a thread reads four rows of one column as a float4. The padding puts what
// a quarter of a warp wants at once in 32 banks: of K 8 rows, an odd number of float4 apart; of P 4 columns, 2 float4 each.
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  float4 K[BLOCK_N][D4 | 1], V[BLOCK_N][TILE_D4 * THREADS_X];
};

__device__ __forceinline__ float max3(float a, float b, float c) { return fmaxf(fmaxf(a, b), c); }
__device__ __forceinline__ float word(const float4& a, int i) {
  return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

// Row i of a thread's tile, within the block: groups of four, as float4 has them.
__device__ __forceinline__ int row_of(int i, int y) { return i / 4 * (4 * THREADS_Y) + 4 * y + i % 4; }

// Words 4c .. 4c + 3 of a row; zeros past its end.
__device__ __forceinline__ float4 load4(const float* __restrict__ row, int c) {
#if VECTOR
  return reinterpret_cast<const float4*>(row)[c];
#else
  const int left = HEAD_DIM - 4 * c;
  row += 4 * c;
  return make_float4(row[0], left > 1 ? row[1] : 0.0f, left > 2 ? row[2] : 0.0f, left > 3 ? row[3] : 0.0f);
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

// The block copies rows first .. first + BLOCK_N - 1 of K or V. Rows from end on become zeros.
template <int WIDTH>
__device__ __forceinline__ void copy_tile(
    float4 (*tile)[WIDTH], const float* __restrict__ source, long long stride, int first, int end) {
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int e = i * THREADS + threadIdx.x, j = e / D4, c = e % D4;
    if (BLOCK_N * D4 % THREADS != 0 && e >= BLOCK_N * D4) break;
    const bool there = first + j < end;
    const float* row = source + (there ? first + j : 0) * stride;
#if ASYNC
    // The copy goes on by itself, through no register, until wait_for_copies(). Of a row past the end 0 bytes are read.
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j][c]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(row + 4 * c), "r"(there ? 16 : 0)
                 : "memory");
#else
    tile[j][c] = there ? load4(row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
  }
}

// This thread's own copies have arrived; a barrier makes that true of the others'.
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Column by column, tile += a b^T. Down one column and up the next, so that two neighbouring multiplications always share an
// operand: the registers have two banks, and three different operands take two turns.
template <int COLUMNS>
__device__ __forceinline__ void add_product(
    float (&tile)[TILE_M][COLUMNS], const float (&a)[TILE_M], const float (&b)[COLUMNS]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int n = 0; n < TILE_M; ++n) {
      const int i = j % 2 == 0 ? n : TILE_M - 1 - n;
      tile[i][j] += a[i] * b[j];
    }
}

// This thread's rows of one column of Q or P.
__device__ __forceinline__ void load_rows(float (&a)[TILE_M], const float* column, int y) {
#pragma unroll
  for (int i = 0; i < TILE_M; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(column + row_of(i, y));
    a[i] = four.x, a[i + 1] = four.y, a[i + 2] = four.z, a[i + 3] = four.w;
  }
}

// s = this thread's tile of Q K^T. Four columns of Q and of K: 16 float4 read for 256 multiplications, if the tile is 8 x 8.
__device__ __forceinline__ void tile_scores(float (&s)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
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
      add_product(s, q_column, k_column);
    }
  }
}

// acc += this thread's tile of P V.
__device__ __forceinline__ void add_values(float (&acc)[TILE_M][4 * TILE_D4], const Shared& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[4 * TILE_D4];
    load_rows(p_column, smem.P[j], y);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float4 v = smem.V[j][x + c * THREADS_X];
#pragma unroll
      for (int i = 0; i < 4; ++i) v_row[4 * c + i] = word(v, i);
    }
    add_product(acc, p_column, v_row);
  }
}

// The largest, or the sum, over the threads of a row: they differ in bit 0 of their lane and in bits 2 and up.
template <typename Op>
__device__ __forceinline__ float over_row(float a, Op op) {
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
#pragma unroll
  for (int bit = 4; bit <= THREADS_X; bit *= 2) a = op(a, __shfl_xor_sync(0xffffffff, a, bit));
  return a;
}

extern "C" __global__ void __launch_bounds__(THREADS) heads_and_masks(
    const float* __restrict__ Q,           // [batch, N, heads, HEAD_DIM], or [N, heads, HEAD_DIM] packed
    const float* __restrict__ K,           // [batch, N_kv, kv_heads, HEAD_DIM], or [N_kv, kv_heads, HEAD_DIM]
    const float* __restrict__ V,           // as K
    float* __restrict__ O,                 // as Q
    float* __restrict__ lse,               // [batch, heads, N], or [heads, N] packed; null where nobody asks
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each sequence begins in Q; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1], where it begins in K and V
    const AttentionParams params) {
  // ---- prologue: which tile is mine, which keys it sees; Q's rows and K's first tile into shared memory
  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  // Lanes 0 to 3 are a square of two rows by two columns, and so on: of float4, a warp is served in 2 turns if neighbours
  // want the same, and in 4 if not.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  // Blocks start in the order of this number. The last rows come first: under a causal mask they have the most to do.
  const unsigned number = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned pair = number % (gridDim.y * gridDim.z);
  const int first_row = (gridDim.x - 1 - number / (gridDim.y * gridDim.z)) * BLOCK_M;
  const int head = pair % gridDim.y, sequence = pair / gridDim.y, kv_head = head / (gridDim.y / params.kv_heads);

  const bool packed = cu_seqlens_q != nullptr;
  const long long q_first = packed ? cu_seqlens_q[sequence] : 0, k_first = packed ? cu_seqlens_k[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - (int)q_first : params.N;
  const int kv_len = packed ? cu_seqlens_k[sequence + 1] - (int)k_first : params.N_kv;
  if (first_row >= q_len) return;  // the whole block: its sequence is shorter than the longest
  Q += sequence * params.q.batch + (q_first + first_row) * params.q.row + head * params.q.head;
  O += sequence * params.o.batch + (q_first + first_row) * params.o.row + head * params.o.head;
  K += sequence * params.k.batch + k_first * params.k.row + kv_head * params.k.head;
  V += sequence * params.v.batch + k_first * params.v.row + kv_head * params.v.head;

  // Row i stands at key i + kv_len - q_len, so that the last row stands at the last key.
  const int lowest = params.window_left < 0 ? -FAR : kv_len - q_len - params.window_left;
  const int highest = params.window_right < 0 ? FAR : kv_len - q_len + params.window_right;
  const int last_row = min(first_row + BLOCK_M, q_len) - 1;
  const int begin = max(first_row + lowest, 0), end = min(last_row + highest + 1, kv_len);
  copy_tile(smem.K, K, params.k.row, begin, end);
  for (int e = threadIdx.x; e < BLOCK_M * D4; e += THREADS) {
    const int r = e % BLOCK_M, c = e / BLOCK_M;
    const float4 q = first_row + r < q_len ? load4(Q + r * params.q.row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < 4; ++i) smem.Q[4 * c + i][r] = params.softmax_scale * LOG2_E * word(q, i);
  }
  // V_smem may be wider than a row. Nobody copies to those columns and nobody stores their sums; zeros keep them harmless.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D4 * THREADS_X - D4); e += THREADS)
    smem.V[e % BLOCK_N][D4 + e / BLOCK_N] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float m_i[TILE_M], l_i[TILE_M];  // m_i as a power of 2; l_i over this thread's columns alone
  for (int i = 0; i < TILE_M; ++i) m_i[i] = NEG_INF, l_i[i] = 0.0f;
  wait_for_copies();
  __syncthreads();  // hazard: Q and K are read before another thread has written its part of them

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][4 * TILE_D4] = {};
  for (int first = begin; first < end; first += BLOCK_N) {
    copy_tile(smem.V, V, params.v.row, first, end);  // on its way while the scores are computed
    float s[TILE_M][TILE_N] = {};
    tile_scores(s, smem, x, y);
    // Not every row sees the whole tile? A key out of a row's sight scores -inf: exp2 gives it exactly no weight.
    if (first < last_row + lowest || first + BLOCK_N > min(first_row + highest + 1, end))
#pragma unroll
      for (int i = 0; i < TILE_M; ++i) {
        const int row = first_row + row_of(i, y) - first - x;  // counted from the thread's first key
        const int from = row + lowest, to = min(row + highest, end - 1 - first - x);
#pragma unroll
        for (int j = 0; j < TILE_N; ++j)
          if (j * THREADS_X < from || j * THREADS_X > to) s[i][j] = NEG_INF;
      }

#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      float m_new = m_i[i];
#pragma unroll
      for (int j = 0; j < TILE_N; j += 2) m_new = max3(m_new, s[i][j], s[i][(j + 1) % TILE_N]);
      m_new = over_row(m_new, [](float a, float b) { return fmaxf(a, b); });
      const float shift = m_new == NEG_INF ? 0.0f : m_new;  // nothing seen yet: -inf - -inf would be NaN
      const float rescale = exp2f(m_i[i] - shift);          // 0 while m_i is -inf; 1 if the maximum stays
      m_i[i] = m_new;
      l_i[i] *= rescale;
#pragma unroll
      for (int c = 0; c < 4 * TILE_D4; ++c) acc[i][c] *= rescale;
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) {
        s[i][j] = exp2f(s[i][j] - shift);
        l_i[i] += s[i][j];
      }
    }
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
#pragma unroll
      for (int i = 0; i < TILE_M; i += 4)
        *reinterpret_cast<float4*>(&smem.P[x + j * THREADS_X][row_of(i, y)]) =
            make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
    wait_for_copies();
    __syncthreads();  // hazard: P and V are read before another thread has written its part; K is replaced while in use
    copy_tile(smem.K, K, params.k.row, first + BLOCK_N, end);  // on its way while V is used; past the last tile it is zeros
    add_values(acc, smem, x, y);
    wait_for_copies();
    __syncthreads();  // hazard: K is read before another thread has written its part; P and V are replaced while in use
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float sum = over_row(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that saw nothing is 0
    const int r = row_of(i, y);
    if (lse && x == 0 && first_row + r < q_len) {
      const long long row = packed ? (long long)head * params.N + q_first : ((long long)sequence * gridDim.y + head) * params.N;
      lse[row + first_row + r] = LN_2 * (m_i[i] + log2f(sum));  // and its lse is -inf
    }
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float* a = acc[i] + 4 * c;
      const float4 o = make_float4(a[0] * inverse, a[1] * inverse, a[2] * inverse, a[3] * inverse);
      if (first_row + r < q_len && x + c * THREADS_X < D4) store4(O + r * params.o.row, x + c * THREADS_X, o);
    }
  }
}
