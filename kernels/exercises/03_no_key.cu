// Exercise 03: rows that see no key. Row i sees key i + N_kv - N and the `left` keys before it, as
// far as they exist.
//
// A row may see no key in its first tiles, and where N > N_kv the first rows see no key at all:
// their O is 0, their lse (log-sum-exp, m_i + log(l_i)) is minus infinity, and no NaN appears on
// the way.
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); lse (N); float32, row-major

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

extern "C" __global__ void __launch_bounds__(BLOCK_M) windowed(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, float* __restrict__ lse, int N, int N_kv, int left,
    float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;
  const int last = row + N_kv - N;  // the last key that this row sees; negative where it sees none

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM] = {};
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    float s[BLOCK_N], m_new = m_i;
    for (int j = 0; j < BLOCK_N; ++j) {
      const int key = first + j;
      s[j] = NEG_INF;  // a key that the row does not see
      if (key >= N_kv || key > last || key < last - left) continue;
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c)
        dot += Q[(size_t)row * HEAD_DIM + c] * K[(size_t)key * HEAD_DIM + c];
      s[j] = softmax_scale * dot;
      m_new = fmaxf(m_new, s[j]);
    }

    // BEGIN hole: about 1 line - what to subtract; m_new is -inf until a key is seen
    // DEFAULT: const float m = m_new;
    const float m = m_new == NEG_INF ? 0.0f : m_new;
    // END hole
    const float rescale = expf(m_i - m);
    m_i = m_new;
    l_i *= rescale;
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] *= rescale;

    for (int j = 0; j < BLOCK_N && first + j < N_kv; ++j) {
      const float p = expf(s[j] - m);
      l_i += p;
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * V[(size_t)(first + j) * HEAD_DIM + c];
    }
  }

  // BEGIN hole: about 1 line - the factor of acc; l_i is 0 where the row saw no key
  // DEFAULT: const float inverse = 1.0f / l_i;
  const float inverse = l_i > 0.0f ? 1.0f / l_i : 0.0f;
  // END hole
  for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] * inverse;
  lse[row] = m_i + logf(l_i);  // log(0) is minus infinity
}
