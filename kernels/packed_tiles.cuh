// Packed sequences of very different lengths: where a grid with as many tiles for each sequence as
// the longest has would be mostly empty, a block for each tile, and few more. Compiled with SLOTS=1,
// kernels from 05 on, but 10, are launched so: grid (slots, heads, 1), with slots = tokens / block
// rounded down + sequences, for tiles of `block` rows (of the backward: keys).

#pragma once

#ifndef SLOTS
#define SLOTS 0  // 1: the grid is one of slots
#endif

// Turns a slot, in `tile`, into a sequence and its tile. Slots 0 .. sequences - 1 have the first
// tile of each sequence. The tiles after the first follow, in the order of the sequences: those of
// sequence i have the slots from sequences + cu_seqlens[i] / block on, as many as it needs or one
// more, wherever it begins. Under a causal mask the last slots start first: first tiles, which see
// the fewest keys, then fill the gaps at the end, wherever in the batch a long sequence is.
// Every warp finds i in cu_seqlens: each round of 32 loads leaves 1/32 of the sequences.
__device__ __forceinline__ void find_tile(
    int& tile, int& sequence, int block, int sequences, const int* __restrict__ cu_seqlens) {
  sequence = tile;
  tile -= sequences;
  if (tile < 0) {
    tile = 0;
    return;
  }
  const int end = (tile + 1) * block;  // sequence i is the last one that begins before it
  sequence = 0;
  for (int left = sequences; left > 1;) {  // it is one of so many, from `sequence` on
    const int step = (left + 31) / 32, lane = threadIdx.x % 32 * step;
    const bool before = lane < left && cu_seqlens[sequence + lane] < end;
    const int skipped = (__popc(__ballot_sync(0xffffffff, before)) - 1) * step;
    sequence += skipped;
    left = min(step, left - skipped);
  }
  tile += 1 - cu_seqlens[sequence] / block;
}

// The same where the grid is one of slots; else `tile` is one already.
__device__ __forceinline__ void hook_tile(
    int& tile, int& sequence, int block, int sequences, const int* __restrict__ cu_seqlens) {
  if (SLOTS) find_tile(tile, sequence, block, sequences, cu_seqlens);
}
