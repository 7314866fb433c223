// Exercise 02: pass 1 of the tiled kernel, with one barrier a tile where 02_tiled.cu has two.
//
// The barrier before a load protects the tile that slow threads still read. It is not needed if the
// load goes to another tile. So use two tiles alternately (double buffering), and leave that
// barrier out. The result is LSE = log(sum of exp(score)) of each row.
//
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); LSE (N); float32, row-major

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)

extern "C" __global__ void __launch_bounds__(BLOCK_M) row_lse(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ LSE, int N,
    int N_kv, float softmax_scale) {
  // BEGIN hole: about 1 line - room for two tiles
  // DEFAULT: __shared__ float K_smem[1][BLOCK_N][HEAD_DIM];
  __shared__ float K_smem[2][BLOCK_N][HEAD_DIM];
  // END hole
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  float q[HEAD_DIM];
#pragma unroll
  for (int c = 0; c < HEAD_DIM; ++c) q[c] = row < N ? Q[(size_t)row * HEAD_DIM + c] : 0.0f;

  float m_i = NEG_INF, l_i = 0.0f;
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    // BEGIN hole: about 1 line - the tile of this iteration: 0, then 1, then 0 again
    // DEFAULT: float (*tile)[HEAD_DIM] = K_smem[0];
    float (*tile)[HEAD_DIM] = K_smem[first / BLOCK_N % 2];
    // END hole
    for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) {
      const int j = i / HEAD_DIM, c = i % HEAD_DIM;
      tile[j][c] = first + j < N_kv ? K[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
    }
    __syncthreads();  // hazard: the tile is read before another thread has written its part of it

    for (int j = 0; j < BLOCK_N && first + j < N_kv; ++j) {
      float s = 0.0f;
#pragma unroll
      for (int c = 0; c < HEAD_DIM; ++c) s += q[c] * tile[j][c];
      s *= softmax_scale;
      const float m_new = fmaxf(m_i, s);
      l_i *= expf(m_i - m_new);
      l_i += expf(s - m_new);
      m_i = m_new;
    }
  }

  if (row < N) LSE[row] = m_i + logf(l_i);
}
