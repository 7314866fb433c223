// Exercise 03: attention over the first keys and over the rest, in two launches, then merged.
//
// online_softmax_part goes over keys first_key .. last_key - 1 and leaves m_i, l_i and acc; it does
// not divide. merge makes attention over all the keys out of two such triples. Where a part has no
// keys, m is -inf, and l and acc are 0.
//
// Shapes   Q, acc, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); m, l, lse (N); float32, row-major

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)

// One thread per query row: 03_online_softmax.cu with BLOCK_N = 1. Nothing to do here.
extern "C" __global__ void __launch_bounds__(BLOCK_M) online_softmax_part(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ acc_part, float* __restrict__ m_part, float* __restrict__ l_part, int N,
    int first_key, int last_key, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;

  float m_i = NEG_INF, l_i = 0.0f, acc[HEAD_DIM] = {};
  for (int j = first_key; j < last_key; ++j) {
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

  m_part[row] = m_i;
  l_part[row] = l_i;
  for (int c = 0; c < HEAD_DIM; ++c) acc_part[(size_t)row * HEAD_DIM + c] = acc[c];  // not divided
}

// One thread per element of O.
extern "C" __global__ void __launch_bounds__(BLOCK_M) merge(
    const float* __restrict__ acc_1, const float* __restrict__ m_1, const float* __restrict__ l_1,
    const float* __restrict__ acc_2, const float* __restrict__ m_2, const float* __restrict__ l_2,
    float* __restrict__ O, float* __restrict__ lse, int N) {
  const int i = blockIdx.x * BLOCK_M + threadIdx.x;
  if (i >= N * HEAD_DIM) return;
  const int row = i / HEAD_DIM;

  // BEGIN hole: about 5 lines - the maximum of both, each part's factor, the sum l, O[i]
  // DEFAULT: const float m = m_1[row];                    // as if both parts had the same maximum:
  // DEFAULT: const float l = l_1[row] + l_2[row];         // the sums are added as they are,
  // DEFAULT: O[i] = (acc_1[i] + acc_2[i]) / l;            // and the outputs too
  const float m = fmaxf(m_1[row], m_2[row]);
  const float rescale_1 = expf(m_1[row] - m);
  const float rescale_2 = expf(m_2[row] - m);
  const float l = l_1[row] * rescale_1 + l_2[row] * rescale_2;
  O[i] = (acc_1[i] * rescale_1 + acc_2[i] * rescale_2) / l;
  // END hole

  if (i % HEAD_DIM == 0) lse[row] = m + logf(l);  // the log-sum-exp of the row's scores
}
