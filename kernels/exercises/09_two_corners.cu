// Exercise 09: a causal mask in either corner of N x N_kv scores.
//
// top_left = 1, as PyTorch's is_causal has it: row i sees keys 0 .. i.
// top_left = 0, as FlashAttention has it: the last row sees the last key, and each row before it
// one key less.
//
// Launch   grid ceil(N / 64), block 64: a thread has one row. A row that sees no key gives 0.
// Shapes   Q, O (N, HEAD_DIM), K, V (N_kv, HEAD_DIM): float32
// Limit    a row reads the keys that it sees, and no other

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

extern "C" __global__ void __launch_bounds__(64) attention(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int N, int N_kv, int top_left, float softmax_scale) {
  const int row = blockIdx.x * 64 + threadIdx.x;
  if (row >= N) return;
  // BEGIN hole: about 2 lines - the row sees keys 0 .. end - 1; rows may see none, or all
  // DEFAULT: const int end = min(row + 1, N_kv);
  const int shift = top_left ? 0 : N_kv - N;
  const int end = max(0, min(row + 1 + shift, N_kv));
  // END hole
  float m_i = -3.4e38f, l_i = 0.0f, acc[HEAD_DIM] = {};
  for (int j = 0; j < end; ++j) {
    float s = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c)
      s += Q[(size_t)row * HEAD_DIM + c] * K[(size_t)j * HEAD_DIM + c];
    const float m_new = fmaxf(m_i, softmax_scale * s);
    const float rescale = expf(m_i - m_new), p = expf(softmax_scale * s - m_new);
    m_i = m_new;
    l_i = l_i * rescale + p;
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] = acc[c] * rescale + p * V[(size_t)j * HEAD_DIM + c];
  }
  for (int c = 0; c < HEAD_DIM; ++c)
    O[(size_t)row * HEAD_DIM + c] = l_i > 0.0f ? acc[c] / l_i : 0.0f;
}
