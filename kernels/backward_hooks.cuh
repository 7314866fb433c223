// What hooks.cuh is to the backward: the tiles of rows that a block goes through.

#pragma once
#include "hooks.cuh"

// The tiles of rows that a block of the backward needs, of all heads of its group: where there is a
// block mask, its lists take the place of the next tile and head in a range, which the block knows.
struct RowLists {
#if MASK_MOD
  const int* entry;
  int left, partial = 1;
#endif

  __device__ __forceinline__ bool is_partial() const {
#if MASK_MOD
    return partial;
#else
    return false;
#endif
  }
  // The first tile of the list of a head, from the last row on.
  template <typename HooksOf>
  __device__ __forceinline__ void begin(
      const HooksOf& hooks_of, int head, int tile, int& row_tile) {
#if MASK_MOD
    if (hooks_of(head).block_mask == nullptr) return;
    entry = hooks_of(head).entries(tile);
    left = *entry;
    entry += left;
    row_tile = *entry / 2;
    partial = *entry % 2;
#endif
  }
  template <typename HooksOf>
  __device__ __forceinline__ void advance(
      const HooksOf& hooks_of, int head, int tile, int group, int& next_head, int& next_tile) {
#if MASK_MOD
    if (hooks_of(head).block_mask == nullptr) return;
    next_head = --left > 0 ? head : head + 1;
    if (left > 0) {
      next_tile = *--entry / 2;
      partial = *entry % 2;
    } else if (next_head < group) {
      begin(hooks_of, next_head, tile, next_tile);
    }
#endif
  }
};
