// Exercise 07: find the bug. The mean of V's rows, tile by tile, while the next tile is copied.
//
// On the CPU engine the output is right; on a GPU it is so most of the time. The X-ray names the
// read, and the copy that it does not wait for.
//
// Launch   grid 1, block 64: thread i has column i
// Shapes   V (N, 64), O (64,): float32
// Limit    one barrier a tile; the next tile is in flight while this one is summed
#include "ptx.cuh"

constexpr int ROWS = 16;  // of a tile

// The block copies rows first .. first + ROWS - 1; rows past the end become zeros.
__device__ void load_tile(float (*tile)[64], const float* V, int first, int N) {
  for (int i = threadIdx.x; i < ROWS * 16; i += 64) {
    const int r = i / 16, c = 4 * (i % 16);
    const bool in_bounds = first + r < N;
    const float* chunk = V + (in_bounds ? (first + r) * 64 + c : 0);
    cp_async(smem_address(&tile[r][c]), chunk, in_bounds ? 16 : 0);
  }
  cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(64) mean(const float* V, float* O, int N) {
  __shared__ __align__(16) float V_smem[2][ROWS][64];
  float sum = 0.0f;
  load_tile(V_smem[0], V, 0, N);
  for (int first = 0, stage = 0; first < N; first += ROWS, stage ^= 1) {
    // BEGIN hole: about 3 lines - the right order (a tile past the end is zeros: no if needed)
    // DEFAULT: load_tile(V_smem[stage ^ 1], V, first + ROWS, N);
    // DEFAULT: cp_async_wait<1>();  // of two groups in flight, this tile is the older one
    // DEFAULT: __syncthreads();
    cp_async_wait<0>();
    __syncthreads();
    load_tile(V_smem[stage ^ 1], V, first + ROWS, N);
    // END hole
    for (int r = 0; r < ROWS; ++r) sum += V_smem[stage][r][threadIdx.x];
  }
  cp_async_wait<0>();
  O[threadIdx.x] = sum / N;
}
