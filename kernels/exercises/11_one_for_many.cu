// Exercise 11: the gradient of a bias that all batches and rows share: a number for each head and
// key.
//
//   dBias[head][key] = sum of dS[batch][head][row][key] over all batches and rows
//
// Each number has to be the sum in the same order in every run, so that its bits are the same: no
// atomics. A block has BLOCK_N keys of one head. Its GROUPS warps share the rows; a lane has a key.
//
// Launch   grid (ceil(N_kv / BLOCK_N), heads), block THREADS
// Shapes   dS (batches, heads, N, N_kv), dBias (heads, N_kv); float32, row-major

#ifndef BLOCK_N
#define BLOCK_N 32
#endif
#ifndef GROUPS
#define GROUPS 4
#endif
constexpr int THREADS = BLOCK_N * GROUPS;

extern "C" __global__ void __launch_bounds__(THREADS) bias_gradient(
    const float* __restrict__ dS, float* __restrict__ dBias, int batches, int N, int N_kv) {
  __shared__ float sums[GROUPS][BLOCK_N];
  const int x = threadIdx.x % BLOCK_N, y = threadIdx.x / BLOCK_N;
  const int key = blockIdx.x * BLOCK_N + x, head = blockIdx.y, heads = gridDim.y;
  // BEGIN hole: about 9 lines - add up this warp's rows in a register, then the warps' sums
  // DEFAULT: sums[y][x] = 0.0f;
  // DEFAULT: if (y == 0 && key < N_kv) dBias[head * N_kv + key] = sums[y][x];
  float sum = 0.0f;
  for (int batch = 0; batch < batches; ++batch)
    for (int row = y; row < N; row += GROUPS)
      if (key < N_kv) sum += dS[((batch * heads + head) * N + row) * N_kv + key];
  sums[y][x] = sum;
  __syncthreads();  // hazard: a sum could be read before its warp has written it
  if (y > 0 || key >= N_kv) return;
  for (int i = 1; i < GROUPS; ++i) sum += sums[i][x];
  dBias[head * N_kv + key] = sum;
  // END hole
}
