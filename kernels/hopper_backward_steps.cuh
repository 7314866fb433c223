// The steps of a block of 13, and the scores that each begins with. Whoever includes this says before how
// large tiles are, as backward_blocks.cuh has it, and STAGES, the tiles of Q and dO.

#pragma once
#include "backward_blocks.cuh"
#include "backward_hooks.cuh"  // nothing, until the library adds something (11)
#include "tile_io.cuh"

using Scores = float[BLOCK_M / 2];  // S^T or dP^T: element 4 n + 2 i + e is key g + 8 i of the
                                    // warp's 16, row 8 n + 2 t + e

// Of each head the functions of scores, which may leave tiles out: none.
struct NoFunctions {
  __device__ __forceinline__ Hooks operator()(int) const { return {}; }
};

// The steps of a block: all heads of the group, and their tiles of rows from the last to the first.
template <typename HooksOf = NoFunctions>
struct Steps {
  const RowRange& rows;
  const HooksOf hooks_of;
  const int key_tile, group;
  RowLists lists;
  int head = 0, row_tile, count = 0;

  __device__ __forceinline__
  Steps(const RowRange& rows, const KeyBlock& block, const HooksOf& hooks_of = HooksOf())
      : rows(rows), hooks_of(hooks_of), key_tile(block.tile), group(block.group) {
    row_tile = rows.last_tile;
    lists.begin(hooks_of, 0, key_tile, row_tile);
  }
  __device__ __forceinline__ bool more() const {
    return rows.first_tile <= rows.last_tile && head < group;
  }
  __device__ __forceinline__ void advance() {
    int next_tile = row_tile > rows.first_tile ? row_tile - 1 : rows.last_tile;
    int next_head = row_tile > rows.first_tile ? head : head + 1;
    lists.advance(hooks_of, head, key_tile, group, next_head, next_tile);
    row_tile = next_tile;
    head = next_head;
    ++count;
  }
  __device__ __forceinline__ int stage() const { return count % STAGES; }
  __device__ __forceinline__ unsigned parity() const { return count / STAGES & 1; }
  __device__ __forceinline__ int slot() const { return head * rows.tiles.of_head + row_tile; }
};

// Starts S^T = K Q^T or dP^T = V dO^T for the warpgroup's 64 keys. The next 16 columns are 32 bytes
// further, the next 64 one panel.
template <typename T>
__device__ __forceinline__ void start_scores(
    Scores& S, unsigned long long keys, unsigned long long rows) {
  wgmma_registers(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(
        T(), S, keys + (i / 4 * BLOCK_N * 128 + i % 4 * 32) / 16,
        rows + (i / 4 * BLOCK_M * 128 + i % 4 * 32) / 16, i > 0);
  wgmma_commit();
}
