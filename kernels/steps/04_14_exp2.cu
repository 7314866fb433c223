// 04, step 14, exp2: S and m_i are in units of log2, so exp2f, one instruction under -ftz=true,
// replaces expf, nine. Q carries softmax_scale * log2(e). An outer product goes down one column of
// the tile and up the next, so that neighbouring FFMAs share an operand.
//
// Launch   grid (ceil(N / BLOCK_M), heads), block THREADS, sizeof(Shared) bytes of shared memory
// Shapes   Q, O (heads, N, HEAD_DIM); K, V (heads, N_kv, HEAD_DIM); float32, row-major; N, N_kv >=
//          1
// Traffic  Q: heads N HEAD_DIM words; K and V once each: heads ceil(N / BLOCK_M) N_kv HEAD_DIM
//          words; O: stored once

#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block
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
#define THREADS_X 8  // threads that share a row
#endif
#ifndef VECTOR
#define VECTOR (HEAD_DIM % 4 == 0)  // rows start at multiples of 16 bytes: float4 loads and stores
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr float LOG2_E = 1.4426950408889634f;

constexpr int THREADS_Y = THREADS / THREADS_X;
constexpr int TILE_M = BLOCK_M / THREADS_Y;  // rows of S and O per thread
constexpr int TILE_N = BLOCK_N / THREADS_X;  // columns of S per thread: x, x + THREADS_X, ...

constexpr int D4 = (HEAD_DIM + 3) / 4;                     // float4 per row, padded with zeros
constexpr int TILE_D4 = (D4 + THREADS_X - 1) / THREADS_X;  // float4 of O per thread and row
constexpr int TILE_D = 4 * TILE_D4;
static_assert(
    THREADS % 32 == 0 && THREADS_X >= 4 && 32 % (2 * THREADS_X) == 0,
    "two rows' threads must fit a warp");
static_assert(
    BLOCK_M % (4 * THREADS_Y) == 0 && BLOCK_N % THREADS_X == 0,
    "each thread needs the same tile, of 4 rows or 8");

// Q and P are stored transposed: a thread reads four rows of one column as a float4. The padding
// avoids bank conflicts within a quarter of a warp, which reads 8 rows of K (an odd number of
// float4 apart) or stores 4 columns of P.
struct __align__(16) Shared {
  float Q[4 * D4][BLOCK_M], P[BLOCK_N][BLOCK_M + 8];
  float4 K[BLOCK_N][D4 | 1], V[BLOCK_N][TILE_D4 * THREADS_X];
};

__device__ __forceinline__ float word(const float4& a, int i) {
  return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

// The row of the block that is row i of a thread's tile. Rows come in groups of four, because one
// float4 holds four.
__device__ __forceinline__ int row_of(int i, int y) {
  return i / 4 * (4 * THREADS_Y) + 4 * y + i % 4;
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

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros past the end.
template <int WIDTH>
__device__ __forceinline__ void load_tile(
    float4 (*tile)[WIDTH], const float* __restrict__ source, int first, int N_kv) {
  for (int e = threadIdx.x; e < BLOCK_N * D4; e += THREADS) {
    const int j = e / D4, c = e % D4;
    const float* row = source + (size_t)(first + j) * HEAD_DIM;
    tile[j][c] = first + j < N_kv ? load4(row, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// tile += a b^T, column by column in serpentine order: down one column and up the next, so that
// consecutive FFMAs share an operand, which the compiler then marks .reuse: it is not read from the
// register file a second time.
template <int COLUMNS>
__device__ __forceinline__ void outer_product(
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
    a[i] = four.x;
    a[i + 1] = four.y;
    a[i + 2] = four.z;
    a[i + 3] = four.w;
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

// The maximum or the sum over the threads of a row, which differ in bit 0 of their lane and in bits
// 2 and up.
template <typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
#pragma unroll
  for (int bit = 4; bit <= THREADS_X; bit *= 2) a = op(a, __shfl_xor_sync(0xffffffff, a, bit));
  return a;
}

// One row: finds the new maximum, rescales all sums so far to it, and replaces s, a row of S, by
// the row of P.
__device__ __forceinline__ void online_softmax_row(
    float (&s)[TILE_N], float& m_i, float& l_i, float (&acc)[TILE_D]) {
  float m_new = m_i;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) m_new = fmaxf(m_new, s[j]);
  m_new = row_allreduce(m_new, [](float a, float b) { return fmaxf(a, b); });
  const float rescale = exp2f(m_i - m_new);  // 0 at the first tile; 1 if the maximum stays
  m_i = m_new;
  l_i *= rescale;
#pragma unroll
  for (int c = 0; c < TILE_D; ++c) acc[c] *= rescale;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) {
    s[j] = exp2f(s[j] - m_new);
    l_i += s[j];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) register_tiles(
    const float* __restrict__ Q,  // [heads, N, HEAD_DIM]
    const float* __restrict__ K,  // [heads, N_kv, HEAD_DIM]
    const float* __restrict__ V,  // [heads, N_kv, HEAD_DIM]
    float* __restrict__ O,        // [heads, N, HEAD_DIM]
    int N, int N_kv, float softmax_scale) {
  // ---- prologue: the row of this thread; Q's rows into shared memory
  extern __shared__ float4 dynamic_smem[];
  Shared& smem = *reinterpret_cast<Shared*>(dynamic_smem);
  const int first_row = blockIdx.x * BLOCK_M;
  // Lanes 0 to 3 are a square of two rows by two columns, and so on: a warp's float4 load takes 2
  // wavefronts if neighbouring lanes read the same address, and 4 if not.
  const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;
  const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;
  Q += ((size_t)blockIdx.y * N + first_row) * HEAD_DIM;
  O += ((size_t)blockIdx.y * N + first_row) * HEAD_DIM;
  K += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  V += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  // No barrier follows these stores: the second one of the loop below comes before the first read.
  // S and m_i are in units of log2, here and in all later kernels: exp(x) = exp2(x * log2(e)).
  const float softmax_scale_log2 = softmax_scale * LOG2_E;
  for (int e = threadIdx.x; e < BLOCK_M * D4; e += THREADS) {
    const int r = e % BLOCK_M, c = e / BLOCK_M;
    const float4 q =
        first_row + r < N ? load4(Q + r * HEAD_DIM, c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < 4; ++i) smem.Q[4 * c + i][r] = softmax_scale_log2 * word(q, i);
  }
  // smem.V may be wider than a row: zeros there keep the sums finite that nothing stores.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D4 * THREADS_X - D4); e += THREADS)
    smem.V[e % BLOCK_N][D4 + e / BLOCK_N] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float m_i[TILE_M], l_i[TILE_M];  // l_i: of this thread's columns only, until the epilogue
  for (int i = 0; i < TILE_M; ++i) {
    m_i[i] = NEG_INF;
    l_i[i] = 0.0f;
  }

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[TILE_M][TILE_D] = {};
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the previous tile could be overwritten while in use
    load_tile(smem.K, K, first, N_kv);
    load_tile(smem.V, V, first, N_kv);
    __syncthreads();  // hazard: the tile could be read before other threads have written their part
    float s[TILE_M][TILE_N] = {};
    gemm_qk(s, smem, x, y);
    // A key past the end scores -inf, so that its weight is exactly 0.
    if (first + BLOCK_N > N_kv)
#pragma unroll
      for (int j = 0; j < TILE_N; ++j)
#pragma unroll
        for (int i = 0; i < TILE_M; ++i)
          if (first + x + j * THREADS_X >= N_kv) s[i][j] = NEG_INF;

#pragma unroll
    for (int i = 0; i < TILE_M; ++i) online_softmax_row(s[i], m_i[i], l_i[i], acc[i]);
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
#pragma unroll
      for (int i = 0; i < TILE_M; i += 4)
        *reinterpret_cast<float4*>(&smem.P[x + j * THREADS_X][row_of(i, y)]) =
            make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
    __syncthreads();  // hazard: P could be read before other threads have written their part
    gemm_pv(acc, smem, x, y);
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float inverse = 1.0f / row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const int r = row_of(i, y);
#pragma unroll
    for (int c = 0; c < TILE_D4; ++c) {
      const float* a = acc[i] + 4 * c;
      const float4 o = make_float4(a[0] * inverse, a[1] * inverse, a[2] * inverse, a[3] * inverse);
      if (first_row + r < N && x + c * THREADS_X < D4)
        store4(O + r * HEAD_DIM, x + c * THREADS_X, o);
    }
  }
}
