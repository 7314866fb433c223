// Exercise 11: scores with a soft cap, as Gemma 2 has them: s becomes softcap * tanh(s / softcap).
//
// The capped scores stay between -softcap and softcap. softcap = 0 means no cap, as in
// FlashAttention. The mask is causal: row i is at key i + N_kv - N and sees the keys up to its own.
// Everything from the score on is in powers of 2.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M: a thread for each row
// Shapes   Q, O (N, HEAD_DIM), K, V (N_kv, HEAD_DIM); float32, row-major

#ifndef HEAD_DIM
#define HEAD_DIM 16
#endif
#ifndef BLOCK_M
#define BLOCK_M 32
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#define NEG_INF __int_as_float(0xff800000)
#define M_INIT -3.402823466e38f  // finite, so that a row that has seen no key does not become NaN
#define LOG2_E 1.4426950408889634f

// What exp2f takes for a pair of a row and a key. dot: their dot product. seen: whether the row
// sees the key.
__device__ float score(float dot, float softmax_scale, float softcap, bool seen) {
  // BEGIN hole: about 3 lines - the scaled score, capped, hidden where it is not seen, times LOG2_E
  // DEFAULT: return seen ? dot * softmax_scale * LOG2_E : NEG_INF;  // no cap
  float s = dot * softmax_scale;
  if (softcap > 0.0f) s = softcap * tanhf(s / softcap);
  return seen ? s * LOG2_E : NEG_INF;
  // END hole
}

extern "C" __global__ void __launch_bounds__(BLOCK_M) softcap_attention(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int N, int N_kv, float softmax_scale, float softcap) {
  __shared__ float K_smem[BLOCK_N][HEAD_DIM], V_smem[BLOCK_N][HEAD_DIM];
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  float q[HEAD_DIM], acc[HEAD_DIM], m_i = M_INIT, l_i = 0.0f;
  for (int c = 0; c < HEAD_DIM; ++c) q[c] = row < N ? Q[row * HEAD_DIM + c] : 0.0f, acc[c] = 0.0f;

  for (int first = 0; first < N_kv; first += BLOCK_N) {
    for (int e = threadIdx.x; e < BLOCK_N * HEAD_DIM; e += BLOCK_M) {
      const int j = e / HEAD_DIM, c = e % HEAD_DIM;
      K_smem[j][c] = first + j < N_kv ? K[(first + j) * HEAD_DIM + c] : 0.0f;
      V_smem[j][c] = first + j < N_kv ? V[(first + j) * HEAD_DIM + c] : 0.0f;
    }
    __syncthreads();  // hazard: a tile is read before all of it is there
    for (int j = 0; j < BLOCK_N; ++j) {
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * K_smem[j][c];
      const float s =
          score(dot, softmax_scale, softcap, first + j <= row + N_kv - N && first + j < N_kv);
      const float m_new = fmaxf(m_i, s), rescale = exp2f(m_i - m_new), p = exp2f(s - m_new);
      m_i = m_new;
      l_i = l_i * rescale + p;
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] = acc[c] * rescale + p * V_smem[j][c];
    }
    __syncthreads();  // hazard: a tile is replaced that others still read
  }
  for (int c = 0; row < N && c < HEAD_DIM; ++c)
    O[row * HEAD_DIM + c] = l_i == 0.0f ? 0.0f : acc[c] / l_i;
}
