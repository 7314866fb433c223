// Exercise 13: find what is missing. Each block has its part of every tile of dQ. Four warps write
// a tile to shared memory, and one thread of a fifth adds it to global memory by one instruction.
//
// Two lines are missing. The X-ray names what each of them would prevent.
//
// Launch   grid: blocks, block 160; dQ is 0 before
// Shapes   parts (blocks, tiles, 512), dQ (tiles, 512): float32
// Limit    one addition for each block and tile
#include "hopper.cuh"

constexpr int FULL = 1, EMPTY = 2;  // named barriers of all 160 threads

extern "C" __global__ void __launch_bounds__(160)
    add_tiles(const float* __restrict__ parts, float* __restrict__ dQ, int tiles) {
  __shared__ __align__(128) float4 tile[128];
  for (int i = 0; i < tiles; ++i) {
    if (threadIdx.x < 128) {
      if (i > 0) named_barrier_sync(EMPTY, 160);  // hazard: the last tile is still being added
      tile[threadIdx.x] =
          reinterpret_cast<const float4*>(parts)[(blockIdx.x * tiles + i) * 128 + threadIdx.x];
      // BEGIN hole: about 1 line - before the fifth warp is told that the tile is there
      async_proxy_fence();
      // END hole
      named_barrier_arrive(FULL, 160);
    } else {
      named_barrier_sync(FULL, 160);  // hazard: the tile is not there yet
      if (threadIdx.x == 128) {
        bulk_add(dQ + 512 * i, smem_address(tile), 2048);
        tma_store_commit();
        // BEGIN hole: about 1 line - before the tile is given back
        tma_store_wait_read<0>();
        // END hole
      }
      __syncwarp();
      if (i + 1 < tiles) named_barrier_arrive(EMPTY, 160);
    }
  }
}
