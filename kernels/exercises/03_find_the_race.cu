// Exercise 03: find the race. Two neighbouring threads share a row: the even one computes the
// weights of a tile, and each of the two adds up half of the columns of acc.
//
// One barrier is missing. On the CPU engine every number comes out right all the same: the X-ray
// shows where.
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); float32, row-major; HEAD_DIM is even
// Limit    at most 3 __syncthreads() per tile

#ifndef BLOCK_M
#define BLOCK_M 32  // rows per block, two threads each
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)  // the float with these bits: minus infinity

extern "C" __global__ void __launch_bounds__(2 * BLOCK_M) two_per_row(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int N, int N_kv, float softmax_scale) {
  __shared__ float K_smem[BLOCK_N][HEAD_DIM], V_smem[BLOCK_N][HEAD_DIM];
  __shared__ float P_smem[BLOCK_N][BLOCK_M], rescale_smem[BLOCK_M], l_smem[BLOCK_M];
  const int r = threadIdx.x / 2, half = threadIdx.x % 2, row = blockIdx.x * BLOCK_M + r;
  // Threads past the last row compute it again and do not store it: they must reach the barriers.
  const float* q = Q + (size_t)min(row, N - 1) * HEAD_DIM;

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM / 2] = {};
  // BEGIN hole: about 1 line - somewhere in this loop, a barrier
  // DEFAULT: for (int first = 0; first < N_kv; first += BLOCK_N) {
  // DEFAULT:   __syncthreads();
  // DEFAULT:   for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += 2 * BLOCK_M) {
  // DEFAULT:     const int j = i / HEAD_DIM, c = i % HEAD_DIM;
  // DEFAULT:     K_smem[j][c] = first + j < N_kv ? K[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  // DEFAULT:     V_smem[j][c] = first + j < N_kv ? V[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  // DEFAULT:   }
  // DEFAULT:   __syncthreads();
  // DEFAULT:   if (half == 0) {
  // DEFAULT:     float s[BLOCK_N], m_new = m_i;
  // DEFAULT:     for (int j = 0; j < BLOCK_N; ++j) {
  // DEFAULT:       float dot = 0.0f;
  // DEFAULT:       for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * K_smem[j][c];
  // DEFAULT:       s[j] = first + j < N_kv ? softmax_scale * dot : NEG_INF;
  // DEFAULT:       m_new = fmaxf(m_new, s[j]);
  // DEFAULT:     }
  // DEFAULT:     rescale_smem[r] = expf(m_i - m_new);
  // DEFAULT:     l_i *= rescale_smem[r];
  // DEFAULT:     m_i = m_new;
  // DEFAULT:     for (int j = 0; j < BLOCK_N; ++j) {
  // DEFAULT:       P_smem[j][r] = expf(s[j] - m_i);
  // DEFAULT:       l_i += P_smem[j][r];
  // DEFAULT:     }
  // DEFAULT:     l_smem[r] = l_i;
  // DEFAULT:   }
  // DEFAULT:   for (int c = 0; c < HEAD_DIM / 2; ++c) {
  // DEFAULT:     acc[c] *= rescale_smem[r];
  // DEFAULT:     for (int j = 0; j < BLOCK_N; ++j)
  // DEFAULT:       acc[c] += P_smem[j][r] * V_smem[j][half * (HEAD_DIM / 2) + c];
  // DEFAULT:   }
  // DEFAULT: }
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += 2 * BLOCK_M) {
      const int j = i / HEAD_DIM, c = i % HEAD_DIM;
      K_smem[j][c] = first + j < N_kv ? K[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
      V_smem[j][c] = first + j < N_kv ? V[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
    }
    __syncthreads();
    if (half == 0) {
      float s[BLOCK_N], m_new = m_i;
      for (int j = 0; j < BLOCK_N; ++j) {
        float dot = 0.0f;
        for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * K_smem[j][c];
        s[j] = first + j < N_kv ? softmax_scale * dot : NEG_INF;
        m_new = fmaxf(m_new, s[j]);
      }
      rescale_smem[r] = expf(m_i - m_new);
      l_i *= rescale_smem[r];
      m_i = m_new;
      for (int j = 0; j < BLOCK_N; ++j) {
        P_smem[j][r] = expf(s[j] - m_i);
        l_i += P_smem[j][r];
      }
      l_smem[r] = l_i;
    }
    __syncthreads();
    for (int c = 0; c < HEAD_DIM / 2; ++c) {
      acc[c] *= rescale_smem[r];
      for (int j = 0; j < BLOCK_N; ++j)
        acc[c] += P_smem[j][r] * V_smem[j][half * (HEAD_DIM / 2) + c];
    }
  }
  // END hole
  if (row >= N) return;
  for (int c = 0; c < HEAD_DIM / 2; ++c)
    O[(size_t)row * HEAD_DIM + half * (HEAD_DIM / 2) + c] = acc[c] / l_smem[r];
}
