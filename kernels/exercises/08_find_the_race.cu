// Exercise 08: find the race. dQ = dS K: a block has 64 keys and adds their share to each row.
//
// On the CPU engine the numbers are mostly right, because blocks begin at different rows and hardly
// ever meet. The X-ray names two blocks that can.
//
// Launch   grid ceil(N_kv / 64), block 64: a thread has a column; dQ is 0 before
// Shapes   dS (N, N_kv), K (N_kv, 64), dQ (N, 64): float32
// Limit    one atomic addition for each block and element of dQ

extern "C" __global__ void __launch_bounds__(64) sum_of_keys(
    const float* __restrict__ dS, const float* __restrict__ K, float* __restrict__ dQ, int N,
    int N_kv) {
  const int first = blockIdx.x * 64, end = min(first + 64, N_kv), c = threadIdx.x;
  for (int i = 0; i < N; ++i) {
    const int row = (i + blockIdx.x * N / gridDim.x) % N;
    // BEGIN hole: about 3 lines - the same sum, without the race
    // DEFAULT: for (int j = first; j < end; ++j) dQ[row * 64 + c] += dS[row * N_kv + j] * K[j * 64 + c];
    float sum = 0.0f;
    for (int j = first; j < end; ++j) sum += dS[row * N_kv + j] * K[j * 64 + c];
    atomicAdd(&dQ[row * 64 + c], sum);
    // END hole
  }
}
