// Exercise 05: grouped-query attention, in any layout.
//
// heads is a multiple of kv_heads, and consecutive heads of Q share one head of K and V. O has the
// strides of Q, and V those of K, in elements. The elements of a row are contiguous.
//
// Shapes   Q, O: heads x N rows of HEAD_DIM; K, V: kv_heads x N_kv rows of HEAD_DIM; float32

#ifndef BLOCK_M
#define BLOCK_M 32
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)

// One thread per query row of one head, one key at a time. Grid: (tiles of rows, heads).
extern "C" __global__ void __launch_bounds__(BLOCK_M) group_of_heads(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int N, int N_kv, int heads, int kv_heads, int q_row_stride,
    int q_head_stride, int kv_row_stride, int kv_head_stride, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x, head = blockIdx.y;
  if (row >= N) return;

  // BEGIN hole: about 3 lines - where this row of Q begins, and where the head of K and V that it reads
  // DEFAULT: const size_t q_at = (size_t)row * q_row_stride;  // as if head were 0
  // DEFAULT: const size_t kv_at = 0;
  const int kv_head = head / (heads / kv_heads);
  const size_t q_at = (size_t)row * q_row_stride + (size_t)head * q_head_stride;
  const size_t kv_at = (size_t)kv_head * kv_head_stride;
  // END hole

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM] = {};
  for (int j = 0; j < N_kv; ++j) {
    const float *k = K + kv_at + (size_t)j * kv_row_stride,
                *v = V + kv_at + (size_t)j * kv_row_stride;
    float s = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c) s += Q[q_at + c] * k[c];
    s *= softmax_scale;
    const float m_new = fmaxf(m_i, s), rescale = expf(m_i - m_new), p = expf(s - m_new);
    m_i = m_new;
    l_i = l_i * rescale + p;
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] = acc[c] * rescale + p * v[c];
  }
  for (int c = 0; c < HEAD_DIM; ++c) O[q_at + c] = acc[c] / l_i;
}
