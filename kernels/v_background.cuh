// V^T in the background of 16_fp8.cu: while consumers compute, a warp of each block transposes V, as
// 16_transpose.cu would before. Warps draw panels from a counter, in about the order in which they are
// needed. So whoever waits for a panel waits for a warp that runs and itself waits for nobody, whichever
// blocks are on the GPU at the same time.

#pragma once
#include "hopper_tiles.cuh"
#include "v_image.cuh"

#ifndef BACKGROUND
#define BACKGROUND 0  // 0: V_image is there before the launch
#endif
#ifndef BACKGROUND_PARAMETERS
#define BACKGROUND_PARAMETERS  // of the kernel, behind its own
#define BACKGROUND_ARGUMENTS   // the same, in the order of Background
#endif

#if BACKGROUND
#include "v_transpose.cuh"
// Of shared memory: V^T of a panel, keys of two.
constexpr unsigned BACKGROUND_BYTES = TRANSPOSE_BYTES + RAW_BYTES;

// Waits for nothing: what follows in this thread comes after what others did before add_release.
__device__ __forceinline__ int load_acquire(const int* count) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}

// Adds 1, after all that this thread and those it has met at a barrier have written.
__device__ __forceinline__ void add_release(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

// Between ordinary accesses to global memory, of this thread or seen by it, and bulk copies.
__device__ __forceinline__ void async_proxy_fence_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

struct Background {
  unsigned char* V_image;
  const unsigned char* V;
  int*
      counts;  // panels drawn, threads that left, panels written of each head, of each tile; then 3
  int heads;   // of V, of all sequences
  int together;  // heads whose tiles are needed at the same time

  __device__ __forceinline__ int tiles(const AttentionParams& params) const {
    return v_tiles_of_head(BLOCK_N, params.N_kv, 0);
  }
  __device__ __forceinline__ int* of_head(int head) const { return counts + 2 + head; }
  __device__ __forceinline__ int* of_tile(int tile) const { return counts + 2 + heads + tile; }

  // For one warp: transposes until no panel is left; the keys of the next one come meanwhile.
  __device__ __forceinline__ void run(unsigned char* smem, const AttentionParams& params) const {
    const int lane_id = threadIdx.x % 32;
    const int tiles_of_head = tiles(params), panels = tiles_of_head * PANELS_OF_TILE;
    const auto draw = [&] { return lane_id == 0 ? atomicAdd(counts, 1) : 0; };
    unsigned char* const image_smem = smem + 2 * RAW_BYTES;
    write_ones(image_smem, lane_id, 32);
    int drawn = __shfl_sync(0xffffffff, draw(), 0);
    int before = -1,
        head_before = 0;  // the panel whose keys are on their way, of all tiles, and its head
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
      const int next = draw();  // long before it is needed
      // Of heads together: from the last tile to the first, all heads of a tile, all panels of a head.
      const bool exists = drawn < heads * panels;
      const int first_head = drawn / (together * panels) * together;
      const int i = drawn - first_head * panels, here = min(together, heads - first_head);
      const int panel = i % PANELS_OF_TILE, tile = tiles_of_head - 1 - i / PANELS_OF_TILE / here;
      const int head = first_head + i / PANELS_OF_TILE % here;
      const int first_key = tile * BLOCK_N + panel * KEY_BYTES;
      if (exists)
        load_panel<32>(
            V + head / params.kv_heads * params.v.batch + head % params.kv_heads * params.v.head +
                (long long)first_key * params.v.row,
            params.v.row, params.N_kv - first_key, smem + turn * RAW_BYTES, lane_id);
      cp_async_commit();
      if (before >= 0) {
        cp_async_wait<1>();
        __syncwarp();  // hazard: keys of other lanes are not there yet
        transpose_panel<32>(
            smem + (turn ^ 1) * RAW_BYTES, image_smem, V_image + (long long)before * PANEL8_BYTES,
            lane_id, [] { __syncwarp(); });
        async_proxy_fence_global();  // hazard: bulk copies could read what was there before
        __syncwarp();                // hazard: other lanes could still write
        if (lane_id == 0) {
          add_release(of_tile(before / PANELS_OF_TILE));
          add_release(of_head(head_before));
        }
      }
      if (!exists) break;
      before = (head * tiles_of_head + tile) * PANELS_OF_TILE + panel;
      head_before = head;
      drawn = __shfl_sync(0xffffffff, next, 0);
    }
    if (lane_id == 0) leave(params);
  }

  // For the thread that copies tiles: whether all of a head's are written.
  __device__ __forceinline__ bool has_head(const Tile& tile, const AttentionParams& params) const {
    const int head = tile.sequence * params.kv_heads + tile.kv_head;
    return load_acquire(of_head(head)) == tiles(params) * PANELS_OF_TILE;
  }

  // Then, unless they are: waits until this one is.
  __device__ __forceinline__ void wait(
      const Tile& tile, int first, bool has_head, const AttentionParams& params) const {
    const int head = tile.sequence * params.kv_heads + tile.kv_head;
    const int* const count = of_tile(head * tiles(params) + first / BLOCK_N);
    while (!has_head && load_acquire(count) != PANELS_OF_TILE) __nanosleep(50);
    async_proxy_fence_global();  // hazard: the bulk copy could come before
  }

  // Of each block, the thread that copies tiles and one that transposes leave. The last of all leaves the
  // counts as they were: 0.
  __device__ __forceinline__ void leave(const AttentionParams& params) const {
    __threadfence();  // hazard: counts that this thread still reads could be cleared
    if (atomicAdd(counts + 1, 1) != 2 * static_cast<int>(gridDim.x) - 1) return;
    for (int i = 0; i < 2 + heads + heads * tiles(params); i += 4)
      *reinterpret_cast<int4*>(counts + i) = int4{0, 0, 0, 0};
  }
};
#else
constexpr unsigned BACKGROUND_BYTES = 0;

struct Background {
  unsigned char* V_image;

  __device__ __forceinline__ void run(unsigned char*, const AttentionParams&) const {}
  __device__ __forceinline__ bool has_head(const Tile&, const AttentionParams&) const {
    return true;
  }
  __device__ __forceinline__ void wait(const Tile&, int, bool, const AttentionParams&) const {}
  __device__ __forceinline__ void leave(const AttentionParams&) const {}
};
#endif
