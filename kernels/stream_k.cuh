// Stream-K: equal shares of work for all blocks, wherever the problem has its borders (Osama et al.,
// 2023, for matrix products; FlashMLA decodes so). Here a unit is one sequence and one head of K and
// V. The key tiles of all units lie one after the other, and each block takes an equal stretch of
// them, across the ends of units. First used in steps/14_05_equal_stretches.cu, explained in 14's
// notebook.

#pragma once
#include "decode_tile.cuh"

// The pieces of a block's stretch, one after the other: a piece is what lies in one unit.
struct StreamK {
  const DecodeParams& params;
  const Rows& rows;
  const int* cache_seqlens;
  const bool appends;
  int sequence = 0, kv_head = 0;  // the unit
  Keys keys;
  int first = 0, end = 0;  // the piece: these tiles of the unit
  int left = 0;            // tiles of the stretch behind it
  int unit_begin = 0;      // the unit's first tile, among those of all units
  int share;               // tiles of a stretch
  int step = 1;            // units from one piece to the next

  __device__ __forceinline__ StreamK(
      const DecodeParams& params, const Rows& rows, const int* cache_seqlens, bool appends,
      int block, int blocks)
      : params(params), rows(rows), cache_seqlens(cache_seqlens), appends(appends), keys(of(0)) {
    const int kv_heads = params.attention.kv_heads;
    const int sequences = params.attention.sequences, lane_id = threadIdx.x % 32;
    const int units = sequences * kv_heads;
    // Every warp finds the stretch by itself, 32 sequences at a time: the sum of all tiles, then
    // the sequence in which the stretch begins.
    int total = 0, least = 1 << 30, most = 0;
    for (int i = lane_id; i < sequences && !params.num_splits; i += 32) {
      const int tiles = of(i).tiles;
      total += tiles * kv_heads;
      least = min(least, tiles);
      most = max(most, tiles);
    }
    for (int i = 16; i > 0; i /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, i);
      least = min(least, __shfl_xor_sync(0xffffffff, least, i));
      most = max(most, __shfl_xor_sync(0xffffffff, most, i));
    }
    // Units that are all as long, as those of one sequence are, are cut in as many parts of their
    // own, or not at all: a few blocks more may be idle, but none has parts of two units.
    const bool same = least == most;
    int splits = params.num_splits;
    if (same && units <= blocks) splits = max(min(blocks / units, most / params.min_tiles), 1);
    if (splits) {  // a block for each part of each unit
      const int unit = block / splits, part = block % splits;
      if (unit >= units) return;
      find(unit);
      share = (keys.tiles + splits - 1) / splits;
      unit_begin = (block - part) * share;
      first = part * share;
      end = min(first + share, keys.tiles);
      return;
    }
    if (same && !CACHE_E4M3) {  // whole units, at any time all heads of a sequence: neighbours
      step = blocks;
      find(block);
      share = end = keys.tiles;
      unit_begin = block * share;
      left = (units - 1 - block) / step * share;
      return;
    }
    share = same ? most * ((units + blocks - 1) / blocks) : (total + blocks - 1) / blocks;
    share = max(share, params.min_tiles);
    const int begin = block * share;
    left = min(share, total - begin);
    if (left <= 0) return;
    for (int sum = 0;; sequence += 32) {
      const int i = sequence + lane_id, own = i < sequences ? of(i).tiles * kv_heads : 0;
      int upto = own;  // the tiles up to this lane's sequence
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffff, upto, d);
        upto += lane_id >= d ? other : 0;
      }
      const unsigned behind = __ballot_sync(0xffffffff, sum + upto > begin);
      if (behind) {
        const int lane = __ffs(behind) - 1;
        sequence += lane;
        unit_begin = sum + __shfl_sync(0xffffffff, upto - own, lane);
        break;
      }
      sum += __shfl_sync(0xffffffff, upto, 31);
    }
    keys = of(sequence);
    kv_head = (begin - unit_begin) / keys.tiles;
    unit_begin += kv_head * keys.tiles;
    first = begin - unit_begin;
    end = min(first + left, keys.tiles);
    left -= end - first;
  }

  __device__ __forceinline__ Keys of(int sequence) const {
    return Keys(params, rows, cache_seqlens, appends, sequence);
  }
  __device__ __forceinline__ void find(int unit) {
    sequence = unit / params.attention.kv_heads;
    kv_head = unit % params.attention.kv_heads;
    keys = of(sequence);
  }
  __device__ __forceinline__ bool empty() const { return first >= end; }
  // The next piece: the beginning of the next unit. False at the end of the stretch.
  __device__ __forceinline__ bool advance() {
    if (left <= 0) return false;
    unit_begin += step * keys.tiles;
    find(sequence * params.attention.kv_heads + kv_head + step);
    first = 0;
    end = min(left, keys.tiles);
    left -= end;
    return true;
  }
  // The blocks that have parts of the unit: the first, and how many.
  __device__ __forceinline__ int first_block() const { return unit_begin / share; }
  __device__ __forceinline__ int parts() const {
    return (unit_begin + keys.tiles - 1) / share - first_block() + 1;
  }
};
