// Exercise 08: the whole backward, small. A thread has one key, with its dK and dV in registers. It
// goes over all rows, and all threads add to their dQ. P and dS are never stored.
//
// Launch   grid ceil(N_kv / 64), block 64; dQ is 0 before
// Shapes   Q, dO, dQ (N, 16), K, V, dK, dV (N_kv, 16), lse, D (N,): float32; D = rowsum(dO * O)
// Limit    one atomic addition for each key and element of dQ; Q and dO are read once by each key

constexpr int d = 16;

extern "C" __global__ void __launch_bounds__(64) gradients(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    const float* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ D,
    float* __restrict__ dQ, float* __restrict__ dK, float* __restrict__ dV, int N, int N_kv,
    float softmax_scale) {
  const int key = blockIdx.x * 64 + threadIdx.x;
  if (key >= N_kv) return;
  float k[d], v[d], dk[d] = {}, dv[d] = {};
  for (int c = 0; c < d; ++c) k[c] = K[key * d + c], v[c] = V[key * d + c];
  for (int row = 0; row < N; ++row) {
    float q[d], d_o[d], s = 0.0f, dp = 0.0f;
    for (int c = 0; c < d; ++c) q[c] = Q[row * d + c], d_o[c] = dO[row * d + c];
    for (int c = 0; c < d; ++c) s += q[c] * k[c];
    // BEGIN hole: about 3 lines - dp, of dO V^T; p, the weight; ds, the gradient of the scaled score
    // DEFAULT: const float p = 1.0f, ds = 1.0f;
    for (int c = 0; c < d; ++c) dp += d_o[c] * v[c];
    const float p = expf(softmax_scale * s - lse[row]);
    const float ds = p * (dp - D[row]);
    // END hole
    for (int c = 0; c < d; ++c) {
      // BEGIN hole: about 3 lines - what this row adds to dv[c] and dk[c], and this key to dQ
      // DEFAULT: dv[c] += p, dk[c] += ds;
      dv[c] += p * d_o[c];
      dk[c] += softmax_scale * ds * q[c];
      atomicAdd(&dQ[row * d + c], softmax_scale * ds * k[c]);
      // END hole
    }
  }
  for (int c = 0; c < d; ++c) dK[key * d + c] = dk[c], dV[key * d + c] = dv[c];
}
