// Exercise 01: the mean score of each row, by a thread that loads ahead: while it multiplies by one
// word of k, the load of the next word is under way.
//
// Every output is right at every size that is tried. Yet the kernel reads memory that is not its
// own. Let the X-ray name the array, the element and the line, find out for which j and c it
// happens, and mend that line.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); MEAN (N); float32, row-major

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_M) row_mean(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ MEAN, int N,
    int N_kv, float softmax_scale) {
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  if (row >= N) return;
  const float* q = Q + (size_t)row * HEAD_DIM;

  float sum = 0.0f;
  for (int j = 0; j < N_kv; ++j) {
    const float* k = K + (size_t)j * HEAD_DIM;
    float dot = 0.0f, word = k[0];
    // BEGIN hole: about 5 lines - all of this is right but for one line
    // DEFAULT: for (int c = 0; c < HEAD_DIM; ++c) {
    // DEFAULT:   const float next = k[c + 1];
    // DEFAULT:   dot += q[c] * word;
    // DEFAULT:   word = next;
    // DEFAULT: }
    for (int c = 0; c < HEAD_DIM; ++c) {
      const float next = c + 1 < HEAD_DIM ? k[c + 1] : 0.0f;
      dot += q[c] * word;
      word = next;
    }
    // END hole
    sum += softmax_scale * dot;
  }
  MEAN[row] = sum / N_kv;
}
