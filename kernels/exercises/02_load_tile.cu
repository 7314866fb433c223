// Exercise 02: the copy of one tile. The rest of the kernel adds up each row's scores, SUM[i] = sum
// over j of q_i . k_j, and reads all BLOCK_N rows of the tile: rows past the end of K must be
// zeros, which add nothing.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); SUM (N); float32, row-major
// Limit    every word of K is requested once per block, by coalesced loads

#ifndef BLOCK_M
#define BLOCK_M 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

// The block copies rows first .. first + BLOCK_N - 1 of source. Rows past N_kv - 1 become zeros.
__device__ void load_tile(
    float (*tile)[HEAD_DIM], const float* __restrict__ source, int first, int N_kv) {
  // BEGIN hole: about 4 lines - copy BLOCK_N * HEAD_DIM words, shared out among BLOCK_M threads
  for (int i = threadIdx.x; i < BLOCK_N * HEAD_DIM; i += BLOCK_M) {
    const int j = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[j][c] = first + j < N_kv ? source[(size_t)(first + j) * HEAD_DIM + c] : 0.0f;
  }
  // END hole
}

extern "C" __global__ void __launch_bounds__(BLOCK_M) sum_of_scores(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ SUM, int N,
    int N_kv) {
  __shared__ float K_smem[BLOCK_N][HEAD_DIM];
  const int row = blockIdx.x * BLOCK_M + threadIdx.x;
  float sum = 0.0f;
  for (int first = 0; first < N_kv; first += BLOCK_N) {
    __syncthreads();  // hazard: the previous tile could be overwritten while in use
    load_tile(K_smem, K, first, N_kv);
    __syncthreads();  // hazard: the tile could be read before it is complete
    for (int c = 0; c < HEAD_DIM; ++c) {
      const float q = row < N ? Q[(size_t)row * HEAD_DIM + c] : 0.0f;
      for (int j = 0; j < BLOCK_N; ++j) sum += q * K_smem[j][c];
    }
  }
  if (row < N) SUM[row] = sum;
}
