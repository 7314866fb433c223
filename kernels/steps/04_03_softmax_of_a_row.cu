// 04, step 3, the softmax of a row: the recurrence is a function of one row, whichever thread
// computes it. It makes room for the next step, and is not meant to be faster.
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
#define BLOCK_N 16  // B_c, keys per tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#ifndef THREADS
#define THREADS BLOCK_M  // per block
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr int THREADS_Y = THREADS;
constexpr int TILE_N = BLOCK_N, TILE_D = HEAD_DIM;
constexpr int Q_STRIDE = HEAD_DIM | 1;  // odd: 32 lanes, each in its own row, use 32 banks
static_assert(
    BLOCK_M == THREADS && HEAD_DIM <= 128, "each thread has one row; acc must fit the registers");

struct __align__(16) Shared {
  float K[BLOCK_N][HEAD_DIM], V[BLOCK_N][HEAD_DIM];
  float Q[BLOCK_M][Q_STRIDE];
};

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros past the end.
__device__ __forceinline__ void load_tile(
    float (*tile)[HEAD_DIM], const float* __restrict__ source, int first, int N_kv) {
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += THREADS) {
    const int j = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[j][c] = first + j < N_kv ? source[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  }
}

// s = this thread's tile of Q K^T. Each word of q is read once for all keys of the tile.
__device__ __forceinline__ void gemm_qk(float (&s)[BLOCK_N], const float* q, const Shared& smem) {
#pragma unroll 4
  for (int c = 0; c < HEAD_DIM; ++c) {
    const float q_c = q[c];
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) s[j] += q_c * smem.K[j][c];
  }
}

// acc += this thread's tile of P V.
__device__ __forceinline__ void gemm_pv(
    float (&acc)[HEAD_DIM], const float (&p)[BLOCK_N], const Shared& smem) {
#pragma unroll
  for (int j = 0; j < BLOCK_N; ++j)
#pragma unroll
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p[j] * smem.V[j][c];
}

// One row: finds the new maximum, rescales all sums so far to it, and replaces s, a row of S, by
// the row of P.
__device__ __forceinline__ void online_softmax_row(
    float (&s)[TILE_N], float& m_i, float& l_i, float (&acc)[TILE_D]) {
  float m_new = m_i;
#pragma unroll
  for (int j = 0; j < TILE_N; ++j) m_new = fmaxf(m_new, s[j]);
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
  const int row = first_row + threadIdx.x;  // past N, a thread still loads and waits
  const float* q = smem.Q[threadIdx.x];
  Q += (size_t)blockIdx.y * N * HEAD_DIM;
  O += (size_t)blockIdx.y * N * HEAD_DIM;
  K += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  V += (size_t)blockIdx.y * N_kv * HEAD_DIM;
  // No barrier follows these stores: the second one of the loop below comes before the first read.
  for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM; i += THREADS) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    smem.Q[r][c] = first_row + r < N ? Q[(size_t)(first_row + r) * HEAD_DIM + c] : 0.0f;
  }
  float m_i = NEG_INF, l_i = 0.0f;

  // ---- one pass: scores, the new maximum, everything so far rescaled to it, then this tile added
  float acc[HEAD_DIM] = {};
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the previous tile could be overwritten while in use
    load_tile(smem.K, K, first, N_kv);
    load_tile(smem.V, V, first, N_kv);
    __syncthreads();  // hazard: the tile could be read before other threads have written their part
    float s[BLOCK_N] = {};
    gemm_qk(s, q, smem);
    // A key past the end scores -inf, so that its weight is exactly 0.
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) s[j] = first + j < N_kv ? softmax_scale * s[j] : NEG_INF;

    online_softmax_row(s, m_i, l_i, acc);
    gemm_pv(acc, s, smem);
  }

  // ---- epilogue: divide once
  if (row < N)
    for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] / l_i;
}
