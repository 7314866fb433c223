// 02 tiled: K and V pass through shared memory in tiles of BLOCK_N keys; two passes, no scratch.
//
// Since 01: a block loads each tile once for all of its rows, where each thread loaded it for
// itself; and the N x N_kv scratch is gone: pass 1 finds each row's maximum and sum, pass 2
// computes the scores again and adds up the output.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M; 4 (BLOCK_M Q_STRIDE + 2 BLOCK_N HEAD_DIM) bytes
//          of shared memory
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); float32, row-major; any N, N_kv >= 1
// Traffic  Q: N HEAD_DIM words; K twice, V once: ceil(N / BLOCK_M) N_kv HEAD_DIM words each time;
//          O: stored once

#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block: one per thread
#endif
#ifndef BLOCK_N
#define BLOCK_N 16  // B_c, keys per tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr int Q_STRIDE = HEAD_DIM | 1;      // odd: 32 lanes, each in its own row, use 32 banks
static_assert(
    BLOCK_M <= 1024 && HEAD_DIM <= 128,
    "a block has at most 1024 threads; acc must fit the registers");
static_assert(
    4 * (BLOCK_M * Q_STRIDE + 2 * BLOCK_N * HEAD_DIM) <= 48 * 1024,
    "Q_smem, K_smem and V_smem do not fit 48 KB: choose a smaller BLOCK_M or BLOCK_N");

// The block copies rows first .. first + BLOCK_N - 1 of K or V; zeros past the end.
__device__ __forceinline__ void load_tile(
    float (*tile)[HEAD_DIM], const float* __restrict__ source, int first, int N_kv) {
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) {
    const int j = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[j][c] = first + j < N_kv ? source[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  }
}

// The scores of this thread's row and the BLOCK_N keys of the tile. Each word of q is read once and
// serves all of them.
__device__ __forceinline__ void row_scores(
    float (&s)[BLOCK_N], const float* q, const float (*K_smem)[HEAD_DIM], int first, int N_kv,
    float softmax_scale) {
#pragma unroll
  for (int j = 0; j < BLOCK_N; ++j) s[j] = 0.0f;
#pragma unroll 4
  for (int c = 0; c < HEAD_DIM; ++c) {
    const float q_c = q[c];
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) s[j] += q_c * K_smem[j][c];
  }
  // A key past the end scores -inf, so that its weight is exactly 0.
#pragma unroll
  for (int j = 0; j < BLOCK_N; ++j) s[j] = first + j < N_kv ? softmax_scale * s[j] : NEG_INF;
}

extern "C" __global__ void __launch_bounds__(BLOCK_M) tiled(
    const float* __restrict__ Q,  // [N, HEAD_DIM]
    const float* __restrict__ K,  // [N_kv, HEAD_DIM]
    const float* __restrict__ V,  // [N_kv, HEAD_DIM]
    float* __restrict__ O,        // [N, HEAD_DIM]
    int N, int N_kv, float softmax_scale) {
  // ---- prologue: the row of this thread; Q's rows into shared memory
  __shared__ float Q_smem[BLOCK_M][Q_STRIDE];
  __shared__ __align__(16) float K_smem[BLOCK_N][HEAD_DIM];
  __shared__ __align__(16) float V_smem[BLOCK_N][HEAD_DIM];
  const int first_row = blockIdx.x * BLOCK_M;
  const int row = first_row + threadIdx.x;  // past N, a thread still loads and waits
  const float* q = Q_smem[threadIdx.x];
  // No barrier follows these stores: the second one of the loop below comes before the first read.
  for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM; i += BLOCK_M) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    Q_smem[r][c] = first_row + r < N ? Q[(size_t)(first_row + r) * HEAD_DIM + c] : 0.0f;
  }
  float m_i = NEG_INF, l_i = 0.0f;

  // ---- pass 1: the row's maximum and sum, which larger maxima shrink (Milakov, Gimelshein, 2018)
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the previous tile could be overwritten while in use
    load_tile(K_smem, K, first, N_kv);
    __syncthreads();  // hazard: the tile could be read before other threads have written their part
    float s[BLOCK_N];
    row_scores(s, q, K_smem, first, N_kv, softmax_scale);

    float m_new = m_i;
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) m_new = fmaxf(m_new, s[j]);
    l_i *= expf(m_i - m_new);
    m_i = m_new;
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) l_i += expf(s[j] - m_i);
  }

  // ---- pass 2: the same scores again, now with the final maximum, and the output
  float acc[HEAD_DIM] = {};
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the previous tile could be overwritten while in use
    load_tile(K_smem, K, first, N_kv);
    load_tile(V_smem, V, first, N_kv);
    __syncthreads();  // hazard: the tile could be read before other threads have written their part
    float s[BLOCK_N];
    row_scores(s, q, K_smem, first, N_kv, softmax_scale);

#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) {
      const float p = expf(s[j] - m_i);
#pragma unroll
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * V_smem[j][c];
    }
  }

  // ---- epilogue: divide once
  if (row < N)
    for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] / l_i;
}
