// Exercise 10: a ring of three stages. Thread 0 copies tiles of 16 rows by TMA; warps 1 and 2 add
// up their columns.
//
// Tile 0 goes to stage 0, tile 1 to stage 1, tile 2 to stage 2, tile 3 to stage 0 again, and so on.
// A wait names the parity of the phase that must have ended: 0 for an mbarrier's first, third, ...
// phase, 1 for the others. A wait for parity 1 of a new mbarrier ends at once.
//
// Launch   grid 1, block 96: thread 32 + i has column i
// Shapes   V (N, 64): float16, by a tensor map with boxes of 64 columns and 16 rows; O (64,):
//          float32
// Limit    three copies in flight
#include "hopper.cuh"

constexpr int ROWS = 16, STAGES = 3;  // rows of a tile: 2048 bytes, zeros for rows past the end

extern "C" __global__ void __launch_bounds__(96)
    sums(const __grid_constant__ TensorMap v_map, float* O, int N) {
  __shared__ __align__(1024) __half V_smem[STAGES][ROWS][64];
  __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
  const unsigned full = smem_address(barriers), empty = full + 8 * STAGES;
  // `full` of stage i is barriers[i], `empty` of stage i is barriers[STAGES + i].
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, 64);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised

  const int tiles = (N + ROWS - 1) / ROWS;
  if (threadIdx.x == 0)
    for (int tile = 0; tile < tiles; ++tile) {
      // BEGIN hole: about 2 lines - the tile's stage; which parity of its `empty` must have ended
      // DEFAULT: const int stage = 0, parity = 0;
      const int stage = tile % STAGES;
      const int parity = (tile / STAGES & 1) ^ 1;
      // END hole
      mbarrier_wait(empty + 8 * stage, parity);
      mbarrier_arrive_expect_tx(full + 8 * stage, ROWS * 128);
      tma_load(smem_address(V_smem[stage]), v_map, full + 8 * stage, 0, tile * ROWS, 0, 0);
    }
  if (threadIdx.x < 32) return;
  const int column = threadIdx.x - 32;
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    // BEGIN hole: about 2 lines - the tile's stage; which parity of its `full` must have ended
    // DEFAULT: const int stage = 0, parity = 0;
    const int stage = tile % STAGES;
    const int parity = tile / STAGES & 1;
    // END hole
    mbarrier_wait(full + 8 * stage, parity);
    for (int r = 0; r < ROWS; ++r)
      sum += __half2float(V_smem[stage][r][8 * (column / 8 ^ r % 8) + column % 8]);
    // BEGIN hole: about 1 line - give the stage back: `empty` expects 64 arrivals
    mbarrier_arrive(empty + 8 * stage);
    // END hole
  }
  O[column] = sum;
}
