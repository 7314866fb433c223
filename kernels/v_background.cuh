// V^T in the background of 16_fp8.cu: while consumers compute, a warp of each block transposes what
// 16_transpose.cu has not transposed before. Warps draw panels from a counter, in about the order in which they are
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
// Of shared memory: keys of two panels, V^T of one, mbarriers for the keys.
constexpr unsigned BACKGROUND_BYTES = 2 * RAW_BYTES + PANEL8_BYTES + Ring<2>::BYTES;

// Waits for nothing: what follows in this thread comes after what others did before add_release.
__device__ __forceinline__ int load_acquire(const int* count) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
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
  int transposed;  // how many of the first heads are there before the launch: 0 or a multiple of `together`

  __device__ __forceinline__ int tiles(const AttentionParams& params) const {
    return v_tiles_of_head(BLOCK_N, params.N_kv, 0);
  }
  __device__ __forceinline__ int* of_head(int head) const { return counts + 2 + head; }
  __device__ __forceinline__ int* of_tile(int tile) const { return counts + 2 + heads + tile; }

  // For one warp: transposes until no panel is left; the keys of the next one come meanwhile.
  __device__ __forceinline__ void run(unsigned char* smem, const AttentionParams& params) const {
    const int lane_id = threadIdx.x % 32;
    const int tiles_of_head = tiles(params), panels = tiles_of_head * PANELS_OF_TILE;
    const auto draw = [&] { return lane_id == 0 ? transposed * panels + atomicAdd(counts, 1) : 0; };
    unsigned char* const image_smem = smem + 2 * RAW_BYTES;
    const Ring<2> keys_ring(smem_address(image_smem) + PANEL8_BYTES);
    if (lane_id == 0) {
      keys_ring.init_full();
      mbarrier_init_fence();
    }
    write_ones(image_smem, lane_id, 32);
    int drawn = __shfl_sync(0xffffffff, draw(), 0);  // after it, the mbarriers are initialised
    PipelineState<2> coming, there;
    int before = -1,
        head_before = 0;  // the panel whose keys are coming, of all tiles, and its head
#pragma unroll 1
    while (true) {
      const int next = draw();  // long before it is needed
      // Of heads together: from the last tile to the first, all heads of a tile, all panels of a head.
      const bool exists = drawn < heads * panels;
      const int first_head = drawn / (together * panels) * together;
      const int i = drawn - first_head * panels, here = max(1, min(together, heads - first_head));
      const int panel = i % PANELS_OF_TILE, tile = tiles_of_head - 1 - i / PANELS_OF_TILE / here;
      const int head = first_head + i / PANELS_OF_TILE % here;
      if (exists) {
        const int first_key = tile * BLOCK_N + panel * KEY_BYTES;
        load_keys(
            smem + coming.index * RAW_BYTES, keys_ring, coming,
            V + head / params.kv_heads * params.v.batch + head % params.kv_heads * params.v.head +
                (long long)first_key * params.v.row,
            params.v.row, max(0, min(KEY_BYTES, params.N_kv - first_key)));
        coming.advance();
      }
      if (before >= 0) {
        keys_ring.wait_full(there);
        __syncwarp();  // hazard: zeros of other lanes are not there yet
        transpose_panel<32>(smem + there.index * RAW_BYTES, image_smem, lane_id);
        there.advance();
        async_proxy_fence();  // hazard: the bulk copy could read what was there before
        __syncwarp();         // hazard: rows of other lanes are not there yet
        if (lane_id == 0) {
          bulk_store(
              V_image + (long long)before * PANEL8_BYTES, smem_address(image_smem), PANEL8_BYTES);
          tma_store_commit();
          tma_store_wait();
          async_proxy_fence_global();
          __threadfence();  // hazard: others could see the counts before V^T
          atomicAdd(of_tile(before / PANELS_OF_TILE), 1);
          atomicAdd(of_head(head_before), 1);
        }
        __syncwarp();  // hazard: the next panel's rows could replace those that are copied
      }
      if (!exists) break;
      before = (head * tiles_of_head + tile) * PANELS_OF_TILE + panel;
      head_before = head;
      drawn = __shfl_sync(0xffffffff, next, 0);
    }
    if (lane_id == 0) leave(params);
  }

  // For one warp: starts to copy a panel's keys, each by one lane. Past the sequence are zeros.
  __device__ __forceinline__ static void load_keys(
      unsigned char* raw, const Ring<2>& ring, const PipelineState<2>& stage,
      const unsigned char* source, long long row_stride, int keys) {
    const int lane_id = threadIdx.x % 32;
    if (lane_id == 0) ring.expect(stage, keys * HEAD_DIM);
    __syncwarp();  // hazard: copies could end before their mbarrier expects them
    for (int row = lane_id; row < KEY_BYTES; row += 32)
      if (row < keys)
        bulk_load(
            smem_address(raw) + row * RAW_ROW, source + row * row_stride,
            ring.full + 8 * stage.index, HEAD_DIM);
      else
        for (int c = 0; c < CHUNKS; ++c)
          *reinterpret_cast<uint4*>(raw + row * RAW_ROW + 16 * c) = uint4{0, 0, 0, 0};
  }

  // For the thread that copies tiles: whether all of a head's are written.
  __device__ __forceinline__ bool has_head(const Tile& tile, const AttentionParams& params) const {
    const int head = tile.sequence * params.kv_heads + tile.kv_head;
    return head < transposed || load_acquire(of_head(head)) == tiles(params) * PANELS_OF_TILE;
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
    __threadfence();  // hazard: counts could be cleared before others have read them
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
