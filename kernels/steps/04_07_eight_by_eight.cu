// 04, step 7, eight by eight: THREADS_X threads share a row, and each has 8 x 8 scores. A word of Q, K
// or P serves 8 multiplications; P passes through shared memory. Slower, as rows of K share a bank.
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
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr int THREADS_Y = THREADS / THREADS_X;
constexpr int TILE_M = BLOCK_M / THREADS_Y;  // rows of S and O per thread: y, y + THREADS_Y, ...
constexpr int TILE_N = BLOCK_N / THREADS_X;  // columns of S per thread: x, x + THREADS_X, ...
constexpr int TILE_D = (HEAD_DIM + THREADS_X - 1) / THREADS_X;  // columns of O per thread
constexpr int Q_STRIDE = HEAD_DIM | 1;  // odd: 32 lanes, each in its own row, use 32 banks
static_assert(
    32 % THREADS_X == 0 && BLOCK_M % THREADS_Y == 0 && BLOCK_N % THREADS_X == 0,
    "all have the same tile");

struct __align__(16) Shared {
  float K[BLOCK_N][TILE_D * THREADS_X], V[BLOCK_N][TILE_D * THREADS_X];
  float Q[BLOCK_M][Q_STRIDE], P[BLOCK_N][BLOCK_M];
};

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros past the end.
__device__ __forceinline__ void load_tile(
    float (*tile)[TILE_D * THREADS_X], const float* __restrict__ source, int first, int N_kv) {
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += THREADS) {
    const int j = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[j][c] = first + j < N_kv ? source[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  }
}

// tile += a b^T
template <int COLUMNS>
__device__ __forceinline__ void outer_product(
    float (&tile)[TILE_M][COLUMNS], const float (&a)[TILE_M], const float (&b)[COLUMNS]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) tile[i][j] += a[i] * b[j];
}

// s = this thread's tile of Q K^T.
__device__ __forceinline__ void gemm_qk(
    float (&s)[TILE_M][TILE_N], const Shared& smem, int x, int y) {
#pragma unroll 4
  for (int c = 0; c < HEAD_DIM; ++c) {
    float q_column[TILE_M], k_column[TILE_N];
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) q_column[i] = smem.Q[y + i * THREADS_Y][c];
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) k_column[j] = smem.K[x + j * THREADS_X][c];
    outer_product(s, q_column, k_column);
  }
}

// acc += this thread's tile of P V.
__device__ __forceinline__ void gemm_pv(
    float (&acc)[TILE_M][TILE_D], const Shared& smem, int x, int y) {
#pragma unroll 16
  for (int j = 0; j < BLOCK_N; ++j) {
    float p_column[TILE_M], v_row[TILE_D];
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) p_column[i] = smem.P[j][y + i * THREADS_Y];
#pragma unroll
    for (int c = 0; c < TILE_D; ++c) v_row[c] = smem.V[j][x + c * THREADS_X];
    outer_product(acc, p_column, v_row);
  }
}

// The maximum or the sum over the threads of a row, which differ in the last bits of their lane.
template <typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
#pragma unroll
  for (int bit = 1; bit < THREADS_X; bit *= 2) a = op(a, __shfl_xor_sync(0xffffffff, a, bit));
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
  const float rescale = expf(m_i - m_new);  // 0 at the first tile; 1 if the maximum stays
  m_i = m_new;
  l_i *= rescale;
#pragma unroll
  for (int c = 0; c < TILE_D; ++c) acc[c] *= rescale;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) {
    s[j] = expf(s[j] - m_new);
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
  const int x = threadIdx.x % THREADS_X, y = threadIdx.x / THREADS_X;
  Q += (size_t)blockIdx.y * N * HEAD_DIM;
  O += (size_t)blockIdx.y * N * HEAD_DIM;
  K += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  V += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  // No barrier follows these stores: the second one of the loop below comes before the first read.
  for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM; i += THREADS) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    smem.Q[r][c] = first_row + r < N ? Q[(size_t)(first_row + r) * HEAD_DIM + c] : 0.0f;
  }
  // smem.V may be wider than a row: zeros there keep the sums finite that nothing stores.
  for (int e = threadIdx.x; e < BLOCK_N * (TILE_D * THREADS_X - HEAD_DIM); e += THREADS)
    smem.V[e % BLOCK_N][HEAD_DIM + e / BLOCK_N] = 0.0f;
  float m_i[TILE_M], l_i[TILE_M];
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
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
#pragma unroll
      for (int i = 0; i < TILE_M; ++i)
        s[i][j] = first + x + j * THREADS_X < N_kv ? softmax_scale * s[i][j] : NEG_INF;

#pragma unroll
    for (int i = 0; i < TILE_M; ++i) online_softmax_row(s[i], m_i[i], l_i[i], acc[i]);
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
#pragma unroll
      for (int i = 0; i < TILE_M; ++i) smem.P[x + j * THREADS_X][y + i * THREADS_Y] = s[i][j];
    __syncthreads();  // hazard: P could be read before other threads have written their part
    gemm_pv(acc, smem, x, y);
  }

  // ---- epilogue: divide once
#pragma unroll
  for (int i = 0; i < TILE_M; ++i) {
    const float inverse = 1.0f / row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const int row = first_row + y + i * THREADS_Y;
#pragma unroll
    for (int c = 0; c < TILE_D; ++c)
      if (row < N && x + c * THREADS_X < HEAD_DIM)
        O[(size_t)row * HEAD_DIM + x + c * THREADS_X] = acc[i][c] * inverse;
  }
}
