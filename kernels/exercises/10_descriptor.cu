// Exercise 10: S = Q K^T by one warpgroup, for tiles of 64 rows and 64 keys. Tell wgmma where its
// operands are.
//
// A descriptor has 64 bits, an int has 32: shift 5ull, not 5. Addresses and distances in it count
// 16 bytes.
//   from bit  0   the address of the tile
//   from bit 16   the leading byte offset, not used here
//   from bit 32   the stride byte offset: the distance of the next eight rows
//   from bit 62   1 for the 128-byte swizzle
//
// Launch   grid (ceil(N_kv / 64), ceil(N / 64)), block 128
// Shapes   Q (N, 64), K (N_kv, 64): float16, by tensor maps with boxes of 64 columns and 64 rows;
//          S (N, N_kv): float32
// Limit    4 products of the warpgroup for each tile; no call of wgmma_descriptor
#include "hopper.cuh"

// The operand at a shared address, a multiple of 1024: rows of 64 columns, 128 bytes each.
__device__ unsigned long long descriptor(unsigned address) {
  // BEGIN hole: about 2 lines - the fields, each at its bit
  // DEFAULT: return address;
  const unsigned long long eight_rows = 8 * 128 / 16, swizzle_128b = 1;
  return swizzle_128b << 62 | eight_rows << 32 | address / 16;
  // END hole
}

extern "C" __global__ void __launch_bounds__(128) scores(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, float* S,
    int N, int N_kv) {
  __shared__ __align__(1024) __half Q_smem[64][64], K_smem[64][64];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned full = smem_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(full, 2 * 64 * 128);
    tma_load(smem_address(Q_smem), q_map, full, 0, 64 * blockIdx.y, 0, 0);
    tma_load(smem_address(K_smem), k_map, full, 0, 64 * blockIdx.x, 0, 0);
  }
  mbarrier_wait(full, 0);

  const unsigned long long q = descriptor(smem_address(Q_smem)),
                           k = descriptor(smem_address(K_smem));
  float d[32] = {};
  wgmma_registers(d);
  wgmma_fence();
  for (int i = 0; i < 4; ++i) {  // 16 columns of Q and K each
    // BEGIN hole: about 1 line - what to add to a descriptor for the 16 columns from 16 i on
    // DEFAULT: const int step = 0;
    const int step = i * 16 * 2 / 16;
    // END hole
    wgmma_ss(__half(), d, q + step, k + step, i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(d);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4,
            row = 64 * blockIdx.y + threadIdx.x / 32 * 16 + g;
  for (int i = 0; i < 32; ++i) {
    const int key = 64 * blockIdx.x + i / 4 * 8 + 2 * t + i % 2;
    if (row + i / 2 % 2 * 8 < N && key < N_kv) S[(row + i / 2 % 2 * 8) * N_kv + key] = d[i];
  }
}
