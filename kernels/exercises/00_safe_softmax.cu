// Exercise 00: softmax along each row, right for scores of any size. One thread per row.
//
// exp(89) is infinite in float32, and infinite / infinite is NaN. Subtract the row's largest score
// first: the largest exponential is then exp(0) = 1, and the quotient stays what it was.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M
// Shapes   S, P (N, N_kv); float32, row-major; S holds the scores, P gets the weights

#ifndef BLOCK_M
#define BLOCK_M 64
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_M)
    safe_softmax(const float* S, float* P, int N, int N_kv) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;
  const float* s = S + (size_t)row * N_kv;  // my row of S: s[0] ... s[N_kv - 1]
  float* p = P + (size_t)row * N_kv;        // my row of P

  // BEGIN hole: about 2 lines - a float m_i, the largest of s[0] ... s[N_kv - 1]
  float m_i = s[0];
  for (int j = 1; j < N_kv; ++j) m_i = fmaxf(m_i, s[j]);
  // END hole

  float l_i = 0.0f;
  for (int j = 0; j < N_kv; ++j) {
    // BEGIN hole: about 1 line - subtract m_i
    // DEFAULT: p[j] = expf(s[j]);
    p[j] = expf(s[j] - m_i);
    // END hole
    l_i += p[j];
  }

  for (int j = 0; j < N_kv; ++j) p[j] /= l_i;
}
