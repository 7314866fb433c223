// Exercise 04: the heart of a register tile, an outer product. 64 threads compute 64 x 64 scores,
// 8 x 8 each.
//
// Both tiles are in shared memory, transposed: Q_smem[c][r] and K_smem[c][j]. Thread (x, y) has
// the rows at(i, y) and the keys at(j, x), two groups of four neighbours each: thread (3, 5) has
// the keys 12-15 and 44-47, and the rows 20-23 and 52-55. One column c after the other.
// Limit    4 requests of shared memory per column and warp: 16 words for 64 multiply-adds, 4 words
//          to a request
// Shapes   Q (N, HEAD_DIM); K (N_kv, HEAD_DIM); S (N, N_kv), not scaled; float32, row-major

#ifndef HEAD_DIM
#define HEAD_DIM 8
#endif
constexpr int BLOCK = 64;  // rows and keys per block
constexpr int TILE = 8;    // rows and keys per thread
constexpr int THREADS = 64;

// Row i of a thread's 8, or key i: a float4 holds four; the groups of 8 threads are neighbours.
__device__ __forceinline__ int at(int i, int lane) { return i / 4 * 32 + 4 * lane + i % 4; }

extern "C" __global__ void __launch_bounds__(THREADS) outer_products(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ S, int N,
    int N_kv) {
  __shared__ __align__(16) float Q_smem[HEAD_DIM][BLOCK], K_smem[HEAD_DIM][BLOCK];
  const int x = threadIdx.x % 8, y = threadIdx.x / 8;
  const int first_row = blockIdx.x * BLOCK, first_key = blockIdx.y * BLOCK;
  for (int c = 0; c < HEAD_DIM; ++c) {
    const int row = first_row + threadIdx.x, key = first_key + threadIdx.x;
    Q_smem[c][threadIdx.x] = row < N ? Q[(size_t)row * HEAD_DIM + c] : 0.0f;
    K_smem[c][threadIdx.x] = key < N_kv ? K[(size_t)key * HEAD_DIM + c] : 0.0f;
  }
  __syncthreads();  // hazard: the tiles are read before another thread has written its part of them

  float s[TILE][TILE] = {};
  for (int c = 0; c < HEAD_DIM; ++c) {
    // BEGIN hole: about 8 lines - 8 words of Q and 8 of K into registers, as float4; 64 multiply-adds
    float q[TILE], k[TILE];
#pragma unroll
    for (int i = 0; i < TILE; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&Q_smem[c][at(i, y)]);
      const float4 b = *reinterpret_cast<const float4*>(&K_smem[c][at(i, x)]);
      q[i] = a.x, q[i + 1] = a.y, q[i + 2] = a.z, q[i + 3] = a.w;
      k[i] = b.x, k[i + 1] = b.y, k[i + 2] = b.z, k[i + 3] = b.w;
    }
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
      for (int j = 0; j < TILE; ++j) s[i][j] += q[i] * k[j];
    // END hole
  }

#pragma unroll
  for (int i = 0; i < TILE; ++i)
#pragma unroll
    for (int j = 0; j < TILE; ++j) {
      const int row = first_row + at(i, y), key = first_key + at(j, x);
      if (row < N && key < N_kv) S[(size_t)row * N_kv + key] = s[i][j];
    }
}
