// Exercise 13: dK = dS^T Q for 64 keys, by one warpgroup. wgmma takes dS^T from registers, and Q
// from the tile that S^T = K Q^T reads too: 64 rows of 128 columns, in two panels of 64 columns.
//
// A product takes 16 rows of Q and all of its 128 columns. wgmma_descriptor(address, leading) has
// the distance in bytes from a panel to the next as its second argument, and what is added to a
// descriptor counts 16 bytes.
//
// Launch   grid 1, block 128
// Shapes   Q (N, 128): float16, by a tensor map with boxes of 64 columns and 64 rows;
//          dS (N, 64): float16; dK (64, 128): float32
// Limit    4 products for each tile of 64 rows
#include "hopper.cuh"

// dS^T as the left operand: the thread's elements of its warp's 16 keys and of 16 rows from `row`.
__device__ void load_operand(unsigned (&a)[4], const __half* dS, int row, int N) {
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 4; ++i) {
    const int r = row + 2 * (lane % 4) + i / 2 * 8, k = key + i % 2 * 8;
    const __half zero = __float2half(0.0f);
    const __half2 pair =
        __halves2half2(r < N ? dS[r * 64 + k] : zero, r + 1 < N ? dS[(r + 1) * 64 + k] : zero);
    a[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
}

extern "C" __global__ void __launch_bounds__(128) gradient(
    const __grid_constant__ TensorMap q_map, const __half* __restrict__ dS, float* __restrict__ dK,
    int N) {
  __shared__ __align__(1024) __half Q_smem[2][64][64];  // a panel: 64 rows of 128 bytes
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned full = smem_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised

  // BEGIN hole: about 1 line - the descriptor of Q as a right operand with two panels
  // DEFAULT: const unsigned long long q = wgmma_descriptor(smem_address(Q_smem));
  const unsigned long long q = wgmma_descriptor(smem_address(Q_smem), 64 * 128);
  // END hole
  float d[64] = {};
  for (int row = 0, phase = 0; row < N; row += 64, phase ^= 1) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(full, 2 * 64 * 128);
      for (int panel = 0; panel < 2; ++panel)
        tma_load(smem_address(Q_smem[panel]), q_map, full, 64 * panel, row, 0, 0);
    }
    unsigned a[4][4];
    for (int i = 0; i < 4; ++i) load_operand(a[i], dS, row + 16 * i, N);
    mbarrier_wait(full, phase);
    wgmma_registers(d);
    wgmma_fence();
    for (int i = 0; i < 4; ++i) {
      // BEGIN hole: about 1 line - what to add to the descriptor for the 16 rows from 16 i on
      // DEFAULT: const int step = 2 * i;
      const int step = i * 16 * 128 / 16;
      // END hole
      wgmma_rs(__half(), d, a[i], q + step, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_registers(d);
    __syncthreads();  // hazard: the next copy could replace rows that others still read
  }

  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 64; ++i)
    dK[(key + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
}
