// 01 naive: one thread per query row, its scores kept in an N x N_kv scratch in global memory.
//
// It follows the definition: S = softmax_scale * Q K^T, P = softmax(S) along each row, O = P V.
// Every thread reads all of K and V for itself, and S takes N x N_kv words: later stages remove
// both.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M; no shared memory
// Shapes   Q, O (N, HEAD_DIM); K, V (N_kv, HEAD_DIM); S (N, N_kv); float32, row-major; N, N_kv >= 1
// Traffic  Q, K, V: N N_kv HEAD_DIM words requested each; S: N N_kv words stored twice and loaded
//          twice; O: stored once

#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per block: one per thread
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
static_assert(
    BLOCK_M <= 1024 && HEAD_DIM <= 128,
    "a block has at most 1024 threads; acc must fit in registers");

extern "C" __global__ void __launch_bounds__(BLOCK_M) naive(
    const float* __restrict__ Q,  // [N, HEAD_DIM]
    const float* __restrict__ K,  // [N_kv, HEAD_DIM]
    const float* __restrict__ V,  // [N_kv, HEAD_DIM]
    float* __restrict__ S,        // [N, N_kv] scratch: first scores, then exp(score - m_i)
    float* __restrict__ O,        // [N, HEAD_DIM]
    int N, int N_kv, float softmax_scale) {
  // ---- prologue: the row of this thread
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;  // in the last block, threads past the end have no row
  const float* q = Q + (size_t)row * HEAD_DIM;
  float* s = S + (size_t)row * N_kv;

  // ---- scores, and their maximum
  float m_i = NEG_INF;
  for (int j = 0; j < N_kv; ++j) {
    const float* k = K + (size_t)j * HEAD_DIM;
    float dot = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * k[c];
    s[j] = softmax_scale * dot;
    m_i = fmaxf(m_i, s[j]);
  }

  // ---- softmax: m_i is subtracted because exp(89) is infinite in float32
  float l_i = 0.0f;
  for (int j = 0; j < N_kv; ++j) {
    s[j] = expf(s[j] - m_i);
    l_i += s[j];
  }

  // ---- output: a sum of the rows of V, weighted by this row's s
  float acc[HEAD_DIM] = {};
  for (int j = 0; j < N_kv; ++j) {
    const float* v = V + (size_t)j * HEAD_DIM;
    const float p = s[j];
    for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * v[c];
  }

  // ---- epilogue: divide once
  for (int c = 0; c < HEAD_DIM; ++c) O[(size_t)row * HEAD_DIM + c] = acc[c] / l_i;
}
