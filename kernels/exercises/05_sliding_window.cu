// Exercise 05: a causal sliding window. A row sees the key at its position and window_left keys
// before it.
//
// The last row is at the last key, whatever N and N_kv are: row i is at key i + N_kv - N. A row may
// be before the first key, and then sees nothing: its output is 0, its lse minus infinity.
//
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); lse, visited (N); float32, row-major

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)

// One thread per query row, one key at a time.
extern "C" __global__ void __launch_bounds__(BLOCK_M) sliding_window(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, float* __restrict__ lse, int* __restrict__ visited, int N, int N_kv,
    int window_left, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;

  // BEGIN hole: about 3 lines - the keys that the row sees are begin, ..., end - 1
  // DEFAULT: const int begin = 0;    // every row sees
  // DEFAULT: const int end = N_kv;   // every key
  const int row_pos = row + N_kv - N;
  const int begin = max(row_pos - window_left, 0);
  const int end = min(row_pos + 1, N_kv);
  // END hole

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM] = {};
  int keys = 0;
  for (int j = begin; j < end; ++j, ++keys) {
    float s = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c)
      s += Q[(size_t)row * HEAD_DIM + c] * K[(size_t)j * HEAD_DIM + c];
    s *= softmax_scale;
    const float m_new = fmaxf(m_i, s);
    const float rescale = expf(m_i - m_new), p = expf(s - m_new);
    m_i = m_new;
    l_i = l_i * rescale + p;
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] = acc[c] * rescale + p * V[(size_t)j * HEAD_DIM + c];
  }
  visited[row] = keys;

  const float inverse = l_i == 0.0f ? 0.0f : 1.0f / l_i;  // a row without keys gives 0, never NaN
  lse[row] = m_i + logf(l_i);  // log(0) is minus infinity

  for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] * inverse;
}
