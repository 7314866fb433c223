// Exercise 01: the naive kernel, with coalesced stores to the scratch.
//
// Consecutive lanes hold consecutive rows, and all lanes store the score of key j in the same
// instruction. If S is (N, N_kv), those 32 words are N_kv apart. If it is (N_kv, N), the transpose,
// they are neighbours: a coalesced store.
//
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); S (N_kv, N); float32, row-major
// Limit    at most 5 sectors per request of S; the index is right where it does not fit in an int

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)

// The index of the score of (row, j) in the scratch.
__device__ __forceinline__ size_t at(int row, int j, int N, int N_kv) {
  // BEGIN hole: about 1 line - the index of S[j][row], an array of N_kv rows and N columns
  // DEFAULT: return (size_t)row * N_kv + j;  // this is S[row][j], as in 01_naive.cu
  return (size_t)j * N + row;
  // END hole
}

extern "C" __global__ void __launch_bounds__(BLOCK_M) naive_coalesced(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ S, float* __restrict__ O, int N, int N_kv, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;
  const float* q = Q + (size_t)row * HEAD_DIM;

  float m_i = NEG_INF;
  for (int j = 0; j < N_kv; ++j) {
    const float* k = K + (size_t)j * HEAD_DIM;
    float dot = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * k[c];
    S[at(row, j, N, N_kv)] = softmax_scale * dot;
    m_i = fmaxf(m_i, softmax_scale * dot);
  }

  float l_i = 0.0f;
  for (int j = 0; j < N_kv; ++j) {
    const float p = expf(S[at(row, j, N, N_kv)] - m_i);
    S[at(row, j, N, N_kv)] = p;
    l_i += p;
  }

  float acc[HEAD_DIM] = {};
  for (int j = 0; j < N_kv; ++j) {
    const float* v = V + (size_t)j * HEAD_DIM;
    const float p = S[at(row, j, N, N_kv)];
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * v[c];
  }

  for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] / l_i;
}
