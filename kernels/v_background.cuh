// V^T in the background of 16_fp8.cu: while the consumers compute, a warp of each block transposes V, as
// 16_transpose.cu would before. A panel of a tile is what a warp transposes at a time. Warps draw panels
// from a counter, in about the order in which tiles are needed, so that whoever waits for one waits for
// a warp that runs.

#pragma once
#include "fp8_tiles.cuh"
#include "v_image.cuh"
#include "v_transpose.cuh"  // a panel

// Waits for nothing: what follows in this thread comes after what other blocks did before add_release.
__device__ __forceinline__ int load_acquire(const int* count) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}

// Adds 1, after all that this thread and those it has met at a barrier have written.
__device__ __forceinline__ void add_release(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

// Between a thread's own accesses to global memory and the bulk copies of others, or of its own.
__device__ __forceinline__ void async_proxy_fence_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

constexpr unsigned BACKGROUND_BYTES = TRANSPOSE_BYTES;  // of shared memory

// Which panels there are, and how many of each tile are there already.
struct Background {
  const unsigned char* V;
  unsigned char* V_image;
  int*
      counts;  // how many panels are drawn, then how many of each tile of V_image are written; from 0
  int kv_heads;  // of all sequences; 0: V_image is there already
  int together;  // heads of K and V whose tiles are needed at the same time

  // For one warp: transposes until no panel is left.
  __device__ __forceinline__ void run(unsigned char* smem, const AttentionParams& params) const {
    if (kv_heads == 0) return;
    const int lane_id = threadIdx.x % 32;
    const int tiles = v_tiles_of_head(BLOCK_N, params.N_kv, 0), panels = tiles * PANELS_OF_TILE;
    const auto draw = [&] { return lane_id == 0 ? atomicAdd(counts, 1) : 0; };
    write_ones(smem, lane_id, 32);
    int drawn = __shfl_sync(0xffffffff, draw(), 0);
#pragma unroll 1
    while (drawn < kv_heads * panels) {
      const int next = draw();  // long before it is needed
      // Of heads together: from the last tile to the first, all heads of a tile, all panels of a head.
      const int first_head = drawn / (together * panels) * together;
      const int i = drawn - first_head * panels, here = min(together, kv_heads - first_head);
      const int panel = i % PANELS_OF_TILE, tile = tiles - 1 - i / PANELS_OF_TILE / here;
      const int head = first_head + i / PANELS_OF_TILE % here;
      const int first_key = tile * BLOCK_N + panel * KEY_BYTES;
      const unsigned char* const source = V + head / params.kv_heads * params.v.batch +
                                          head % params.kv_heads * params.v.head +
                                          (long long)first_key * params.v.row;
      const long long v_tile = (long long)head * tiles + tile;
      transpose_panel<32>(
          source, params.v.row, params.N_kv - first_key, smem,
          V_image + v_tile * V8_BYTES + panel * PANEL8_BYTES, lane_id, [] { __syncwarp(); });
      async_proxy_fence_global();  // hazard: bulk copies could read what was there before
      __syncwarp();                // hazard: other lanes could still write
      if (lane_id == 0) add_release(counts + 1 + v_tile);
      drawn = __shfl_sync(0xffffffff, next, 0);
    }
  }

  // For the thread that copies tiles: waits until all panels of this one are written.
  __device__ __forceinline__ void wait(
      const Tile& tile, int first, const AttentionParams& params) const {
    if (kv_heads == 0) return;
    const long long v_tile =
        first_v_tile(BLOCK_N, tile.kv_head, params.kv_heads, tile.sequence, 0, params.N_kv, 0) +
        first / BLOCK_N;
    while (load_acquire(counts + 1 + v_tile) != PANELS_OF_TILE) __nanosleep(100);
    async_proxy_fence_global();  // hazard: the bulk copy could come before
  }
};
