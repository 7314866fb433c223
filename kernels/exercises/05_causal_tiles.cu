// Exercise 05: the tiles of keys that a block needs under a causal mask.
//
// Row i is at key i + N_kv - N, so that the last row is at the last key, and sees the keys up to
// its own. A block has BLOCK_M rows and loops over tiles of BLOCK_N keys. A row may be before the
// first key: its lse is minus infinity.
//
// Shapes   Q (N, HEAD_DIM), K (N_kv, HEAD_DIM), lse (N); float32, row-major
// Limit    a block reads no key of K that none of its rows sees

#ifndef BLOCK_M
#define BLOCK_M 32
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)
#define M_INIT -3.402823466e38f  // finite, so that a row that has seen no key does not become NaN

// One thread per query row.
extern "C" __global__ void __launch_bounds__(BLOCK_M) causal_tiles(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ lse, int N,
    int N_kv, float softmax_scale) {
  __shared__ float K_smem[BLOCK_N][HEAD_DIM];
  const int first_row = blockIdx.x * BLOCK_M, row = first_row + threadIdx.x;

  // BEGIN hole: about 2 lines - the block reads the keys 0 .. end - 1
  // DEFAULT: const int end = N_kv;  // every key
  const int last_pos = first_row + BLOCK_M - 1 + N_kv - N;
  const int end = min(last_pos + 1, N_kv);
  // END hole

  float m_i = M_INIT, l_i = 0.0f;
  for (int first = 0; first < end; first += BLOCK_N) {
    for (int e = threadIdx.x; e < BLOCK_N * HEAD_DIM; e += BLOCK_M) {
      const int j = e / HEAD_DIM, c = e % HEAD_DIM;
      K_smem[j][c] = first + j < end ? K[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
    }
    __syncthreads();
    for (int j = 0; row < N && j < BLOCK_N; ++j) {
      float s = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c) s += Q[(size_t)row * HEAD_DIM + c] * K_smem[j][c];
      s *= softmax_scale;
      // BEGIN hole: about 1 line - a key that this row does not see scores minus infinity
      // DEFAULT: if (first + j >= end) s = NEG_INF;  // only keys that do not exist
      if (first + j > row + N_kv - N) s = NEG_INF;
      // END hole
      const float m_new = fmaxf(m_i, s);
      l_i = l_i * expf(m_i - m_new) + expf(s - m_new);
      m_i = m_new;
    }
    __syncthreads();
  }
  if (row < N) lse[row] = m_i + logf(l_i);
}
