// Exercise 04: a register tile, and rows that eight threads share.
//
// 128 threads share 64 rows and 32 keys. Thread (x, y) has a tile of 4 x 4 scores: rows y, y + 16,
// y + 32, y + 48 against keys x, x + 8, x + 16, x + 24. The 8 threads of a row are neighbours:
// lanes that differ in their last 3 bits.
// The result is M, the largest score of each row, and LSE = log(sum of exp(score)).
// Limit    three shuffles for each maximum and for each sum
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); M, LSE (N); float32, row-major

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)
constexpr int BLOCK_M = 64;                     // rows per block
constexpr int BLOCK_N = 32;                     // keys per tile
constexpr int THREADS = 128;                    // per block
constexpr int THREADS_X = 8;                    // threads that share a row
constexpr int THREADS_Y = THREADS / THREADS_X;  // rows of threads
constexpr int TILE = 4;                         // rows and keys per thread

// The maximum over the eight threads of a row.
__device__ float row_max(float a) {
  // BEGIN hole: about 2 lines - three exchanges, with the lanes that differ in bit 0, bit 1, bit 2
  for (int bit = 1; bit < THREADS_X; bit *= 2) a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, bit));
  // END hole
  return a;
}

// The sum over them.
__device__ float row_sum(float a) {
  // BEGIN hole: about 2 lines - the same, with a sum
  for (int bit = 1; bit < THREADS_X; bit *= 2) a += __shfl_xor_sync(0xffffffff, a, bit);
  // END hole
  return a;
}

extern "C" __global__ void __launch_bounds__(THREADS) tile_lse(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ M,
    float* __restrict__ LSE, int N, int N_kv, float softmax_scale) {
  // Rows have an odd length: lanes reading one column of different rows use different banks.
  __shared__ float Q_smem[BLOCK_M][HEAD_DIM | 1], K_smem[BLOCK_N][HEAD_DIM | 1];
  const int x = threadIdx.x % THREADS_X, y = threadIdx.x / THREADS_X;
  const int first_row = blockIdx.x * BLOCK_M;
  for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM; i += THREADS) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    Q_smem[r][c] = first_row + r < N ? Q[(size_t)(first_row + r) * HEAD_DIM + c] : 0.0f;
  }

  float m_i[TILE], l_i[TILE];
  for (int i = 0; i < TILE; ++i) m_i[i] = NEG_INF, l_i[i] = 0.0f;
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the tile is overwritten while others still read the previous one
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += THREADS) {
      const int j = i / HEAD_DIM, c = i % HEAD_DIM;
      K_smem[j][c] = first + j < N_kv ? K[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
    }
    __syncthreads();  // hazard: the tile is read before another thread has written its part of it

    float s[TILE][TILE] = {};
    for (int c = 0; c < HEAD_DIM; ++c) {
      float q[TILE], k[TILE];
#pragma unroll
      for (int i = 0; i < TILE; ++i)
        q[i] = Q_smem[y + i * THREADS_Y][c], k[i] = K_smem[x + i * THREADS_X][c];
      // BEGIN hole: about 4 lines - 16 multiply-adds: every q with every k, all loops unrolled
#pragma unroll
      for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) s[i][j] += q[i] * k[j];
      // END hole
    }

#pragma unroll
    for (int i = 0; i < TILE; ++i) {
      float m_new = m_i[i];
#pragma unroll
      for (int j = 0; j < TILE; ++j) {
        s[i][j] = first + x + j * THREADS_X < N_kv ? softmax_scale * s[i][j] : NEG_INF;
        m_new = fmaxf(m_new, s[i][j]);
      }
      m_new = row_max(m_new);
      l_i[i] *= expf(m_i[i] - m_new);  // of this thread's keys only
      m_i[i] = m_new;
#pragma unroll
      for (int j = 0; j < TILE; ++j) l_i[i] += expf(s[i][j] - m_new);
    }
  }

#pragma unroll
  for (int i = 0; i < TILE; ++i) {
    const float sum = row_sum(l_i[i]);
    const int row = first_row + y + i * THREADS_Y;
    if (x == 0 && row < N) M[row] = m_i[i], LSE[row] = m_i[i] + logf(sum);
  }
}
