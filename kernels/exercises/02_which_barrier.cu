// Exercise 02: one block per row of Q, one thread per key of a tile. Thread 0 finds the maximum,
// all threads use it. LSE[i] = log(sum over j of exp(score)) of row i.
//
// The loop has the two barriers that it needs, but one of them is in the wrong place. Every output
// is right on the CPU engine, which runs thread 0 first. Find the race with the X-ray, and move
// that barrier.
//
// Launch   grid N, block THREADS
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); LSE (N); float32, row-major
// Limit    two barriers per tile

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define THREADS 64
#define NEG_INF __int_as_float(0xff800000)

extern "C" __global__ void __launch_bounds__(THREADS) block_lse(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ LSE, int N_kv,
    float softmax_scale) {
  __shared__ float scores[THREADS], sums[THREADS], maximum;
  const float* q = Q + (size_t)blockIdx.x * HEAD_DIM;
  float m_i = NEG_INF, l_i = 0.0f;

  for (int first = 0; first < N_kv; first += THREADS) {
    const int j = first + threadIdx.x;
    float s = 0.0f;
    for (int c = 0; c < HEAD_DIM && j < N_kv; ++c) s += q[c] * K[(size_t)j * HEAD_DIM + c];
    s = j < N_kv ? softmax_scale * s : NEG_INF;
    // BEGIN hole: about 11 lines - one of the two barriers is in the wrong place
    // DEFAULT: scores[threadIdx.x] = s;
    // DEFAULT: __syncthreads();
    // DEFAULT: if (threadIdx.x == 0) {
    // DEFAULT:   float m = m_i;
    // DEFAULT:   for (int k = 0; k < THREADS; ++k) m = fmaxf(m, scores[k]);
    // DEFAULT:   maximum = m;
    // DEFAULT: }
    // DEFAULT: const float m_new = maximum;
    // DEFAULT: l_i = l_i * expf(m_i - m_new) + expf(s - m_new);
    // DEFAULT: m_i = m_new;
    // DEFAULT: __syncthreads();
    scores[threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
      float m = m_i;
      for (int k = 0; k < THREADS; ++k) m = fmaxf(m, scores[k]);
      maximum = m;
    }
    __syncthreads();
    const float m_new = maximum;
    l_i = l_i * expf(m_i - m_new) + expf(s - m_new);
    m_i = m_new;
    // END hole
  }

  sums[threadIdx.x] = l_i;
  __syncthreads();  // hazard: thread 0 reads a sum before its thread has written it
  if (threadIdx.x == 0) {
    float l = 0.0f;
    for (int k = 0; k < THREADS; ++k) l += sums[k];
    LSE[blockIdx.x] = m_i + logf(l);
  }
}
