// Exercise 01: the scores, one thread per query row. S[row][j] = softmax_scale * (row `row` of Q) .
// (row j of K).
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); S (N, N_kv); float32, row-major
// Limit    each thread stores each of its scores once; the sum grows in a register, not in S

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_M)
    scores(const float* Q, const float* K, float* S, int N, int N_kv, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;
  const float* q = Q + (size_t)row * HEAD_DIM;
  for (int j = 0; j < N_kv; ++j) {
    const float* k = K + (size_t)j * HEAD_DIM;
    // BEGIN hole: about 3 lines - the dot product of q and k, and the score to its place in S
    float dot = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * k[c];
    S[(size_t)row * N_kv + j] = softmax_scale * dot;
    // END hole
  }
}
