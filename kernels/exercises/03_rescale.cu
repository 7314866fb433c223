// Exercise 03: attention in one pass. A tile that brings a larger maximum leaves l_i and acc
// relative to the old one.
//
// One thread per query row, BLOCK_N keys at a time, read from global memory to keep the kernel
// short.
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); float32, row-major
// Limit    each row reads each word of K once: no second pass

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)  // the float with these bits: minus infinity

extern "C" __global__ void __launch_bounds__(BLOCK_M) one_pass(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int N, int N_kv, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM] = {};
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    float s[BLOCK_N], m_new = m_i;  // m_new: the largest score up to the end of this tile
    for (int j = 0; j < BLOCK_N; ++j) {
      s[j] = NEG_INF;
      if (first + j >= N_kv) continue;
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c)
        dot += Q[(size_t)row * HEAD_DIM + c] * K[(size_t)(first + j) * HEAD_DIM + c];
      s[j] = softmax_scale * dot;
      m_new = fmaxf(m_new, s[j]);
    }

    // BEGIN hole: about 3 lines - rescale l_i and acc from the old maximum, m_i, to the new one
    const float rescale = expf(m_i - m_new);
    l_i *= rescale;
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] *= rescale;
    // END hole
    m_i = m_new;

    for (int j = 0; j < BLOCK_N && first + j < N_kv; ++j) {
      const float p = expf(s[j] - m_i);
      l_i += p;
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * V[(size_t)(first + j) * HEAD_DIM + c];
    }
  }
  for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] / l_i;
}
