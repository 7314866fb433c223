// dQ's semaphores: with DETERMINISTIC=1, the blocks that add to a tile of dQ do so in the order of their
// keys, so that its bits are the same in every run. A semaphore is an int in global memory that counts the
// blocks that have added (FlashAttention's dq_semaphore). Explained in notebook 08b.

#pragma once
#include "backward_blocks.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0  // 1: blocks add to a tile of dQ in the order of their keys
#endif

// ---- PTX: a load, an addition, and the order of the memory accesses around them

__device__ __forceinline__ int load_relaxed(const int* semaphore) {
  int count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(semaphore) : "memory");
  return count;
}

// The same, and what follows in this thread comes after what the blocks before did before their
// add_release.
__device__ __forceinline__ int load_acquire(const int* semaphore) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(semaphore) : "memory");
  return count;
}

// What follows in this thread comes after what the blocks before did before their add_release.
__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds 1, after all that this thread and those it has met at a barrier have written.
__device__ __forceinline__ void add_release(int* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Whether the last keys have the first blocks, where a mask hides keys after a row (see KeyBlock): a block then
// begins with rows that no other block adds to before it, so that none waits. Not in the order of a
// block mask's lists.
#if DETERMINISTIC && !MASK_MOD
constexpr bool LAST_KEYS_FIRST = true;
#else
constexpr bool LAST_KEYS_FIRST = false;
#endif

// How many blocks add to a tile of rows before this one: those of keys before its own that one of the rows
// sees, or of keys after them.
__device__ __forceinline__ int blocks_before(
    const KeyBlock& block, const RowRange& rows, int m_block) {
  const int first_row = m_block * BLOCK_M, last_row = first_row + BLOCK_M - 1;
  return block.last_first ? min(last_row + rows.window_hi, block.kv_len - 1) / BLOCK_N - block.tile
                          : block.tile - max(first_row + rows.window_lo, 0) / BLOCK_N;
}

// Waits until all blocks before this one that see some of a tile's rows have added to it.
__device__ __forceinline__ void wait_for_blocks(const int* semaphore, int blocks_before) {
  while (DETERMINISTIC && load_acquire(semaphore) != blocks_before) __nanosleep(20);
}

// ---- which block is next

// The next number of a counter that starts at 0, for all threads of a block; one of them calls
// counter() for its address. Blocks draw as they start, so one that waits for those before it waits
// for running blocks only.
template <typename Counter>
__device__ __forceinline__ unsigned draw_number(const Counter& counter) {
  __shared__ unsigned drawn;
  if (threadIdx.x == 0) drawn = atomicAdd(counter(), 1);
  __syncthreads();  // without it, the number could be read before it is drawn
  return drawn;
}

// The number of a block, for KeyBlock: deterministic, it is drawn. The counter is behind the semaphores.
struct BlockNumber {
  int* dq_semaphore;
  bool packed;
  const AttentionParams& forward;

  __device__ __forceinline__ unsigned operator()() const {
    if (!DETERMINISTIC) return block_number();
    return draw_number([&] { return counter(); });
  }
  // Cleared with the semaphores. With CONTINUES each launch of a rank has another one of those.
  __device__ __forceinline__ int* counter() const {
    if (CONTINUES) return dq_semaphore;
    return dq_semaphore + forward.heads * row_tiles(packed, 0, 0, forward).of_head;
  }
};

// Before the loop: no block has added to the tile of rows of this one, and none has a number.
__device__ __forceinline__ void clear_semaphores(
    int* dq_semaphore, const RowBlock& block, const RowTiles& tiles,
    const AttentionParams& forward) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x + block.head + block.sequence == 0)
    dq_semaphore[forward.heads * tiles.of_head] = 0;
  if (block.first_row < block.q_len) dq_semaphore[block.slot(tiles)] = 0;
}

// A tile of rows of a head, to whose dQ this block is to add.
struct DqTile {
  int slot = -1;  // from the sequence's first tile of rows of the group's first head; -1: no tile
  int m_block = 0;

  __device__ __forceinline__ bool exists() const { return slot >= 0; }
};

// A block adds to a tile of dQ when all blocks before it that see some of its rows have added to it.
// Two neighbouring tiles share a semaphore. The block goes through the tiles from the last to the first:
// it waits at the last of the two, and passes the semaphore on after the first. Calls are for all
// threads; without DETERMINISTIC they do nothing.
struct DqSemaphore {
  static constexpr int TILES = 2;  // that share a semaphore
  int* const dq_semaphore;         // of the sequence's first tile of the group's first head
  int key_tile, window_lo, first_tile, last_tile;
  int count = -1;  // as it was last read

  __device__ __forceinline__
  DqSemaphore(int* dq_semaphore, const KeyBlock& block, const RowRange& rows)
      : dq_semaphore(dq_semaphore + rows.first_slot),
        key_tile(block.tile),
        window_lo(rows.window_lo),
        first_tile(rows.first_tile),
        last_tile(rows.last_tile) {}

  __device__ __forceinline__ int* of(const DqTile& tile) const {
    return dq_semaphore + tile.slot - tile.m_block % TILES;
  }
  __device__ __forceinline__ bool waits_at(const DqTile& tile) const {
    return DETERMINISTIC && threadIdx.x == 0 && tile.exists() &&
           (tile.m_block == last_tile || tile.m_block % TILES == TILES - 1);
  }

  // Reads the semaphore long before the block needs it, so that there may be no wait.
  __device__ __forceinline__ void peek(const DqTile& tile) {
    if (waits_at(tile)) count = load_relaxed(of(tile));
  }
  __device__ __forceinline__ void wait(const DqTile& tile) {
    if (!waits_at(tile)) return;
    const int first_row = (tile.m_block - tile.m_block % TILES) * BLOCK_M;
    const int blocks_before = key_tile - max(first_row + window_lo, 0) / BLOCK_N;
    while (count != blocks_before) {
      __nanosleep(20);
      count = load_relaxed(of(tile));
    }
    fence_acquire();  // without it, this block could add before the additions of the one before
  }
  // Behind a barrier that all threads have reached after their additions.
  __device__ __forceinline__ void pass(const DqTile& tile) const {
    if (DETERMINISTIC && threadIdx.x == 0 && tile.exists() &&
        (tile.m_block == first_tile || tile.m_block % TILES == 0))
      add_release(of(tile));
  }
};
