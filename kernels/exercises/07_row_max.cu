// Exercise 07: the maximum of each row of S, held as the accumulators of mma.sync hold it.
//
// Launch   grid ceil(N / 16), block 32: lane 4 g + t has rows g and g + 8 of its warp's 16
// Shapes   S (N, N_kv), M (N,), L (blocks, 32, 2), the maxima of each lane's own elements: float32
// Limit    4 shuffles a warp, no shared memory

// The maximum over the four lanes of a row, in each of them.
__device__ float row_allreduce(float a) {
  // BEGIN hole: about 2 lines - __shfl_xor_sync(0xffffffff, a, mask): a of lane ^ mask
  // DEFAULT: return a;
  a = fmaxf(a, __shfl_xor_sync(0xffffffff, a, 1));
  return fmaxf(a, __shfl_xor_sync(0xffffffff, a, 2));
  // END hole
}

extern "C" __global__ void __launch_bounds__(32)
    row_max(const float* S, float* M, float* L, int N, int N_kv) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4, first_row = blockIdx.x * 16;
  float m[2] = {-3.402823466e38f, -3.402823466e38f};  // of rows g and g + 8: the lowest float
  // An accumulator has 16 rows and 8 keys, 4 of its elements in each lane.
  for (int first = 0; first < N_kv; first += 8)
    for (int e = 0; e < 4; ++e) {
      int row = first_row, key = first;
      // BEGIN hole: about 2 lines - the row and the key of element d[e]
      row += g + 8 * (e / 2);
      key += 2 * t + e % 2;
      // END hole
      if (row < N && key < N_kv) m[e / 2] = fmaxf(m[e / 2], S[(long long)row * N_kv + key]);
    }
  for (int i = 0; i < 2; ++i) {
    L[(blockIdx.x * 32 + lane) * 2 + i] = m[i];
    const float maximum = row_allreduce(m[i]);
    const int row = first_row + g + 8 * i;
    if (t == 3 && row < N) M[row] = maximum;
  }
}
