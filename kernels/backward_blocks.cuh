// What a block of the backward in half types has: its tile of keys and the tiles of rows that see them,
// or a tile of rows.

#pragma once
#include "backward_hooks.cuh"
#include "backward_params.cuh"
#include "packed_tiles.cuh"

#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 128  // B_c, keys per block
#endif

#ifndef PERSISTENT
#define PERSISTENT 0  // 1: see hopper_backward_persistent.cuh
#endif
#ifndef GROUP_SPLITS
#define GROUP_SPLITS 1  // so many blocks share the heads of a group: see 08_sum_splits.cu
#endif
#ifndef CONTINUES
#define CONTINUES 0  // 1, for 17: a launch has some rows of a rank; forward.sequences: tiles of all
#endif

// The type of a block's dK and dV. Of these arrays AttentionParams has the heads, as kv_heads: GROUP_SPLITS
// for each of K and V.
#if GROUP_SPLITS > 1
template <typename T>
using KeyOut = float;
#else
template <typename T>
using KeyOut = Out<T>;
#endif

// How many sequences that are not packed a launch has.
__device__ __forceinline__ int sequences_of(const AttentionParams& forward) {
  return PERSISTENT && !CONTINUES ? forward.sequences : (int)gridDim.z;
}

// Where a sequence's tiles of rows begin in the scratch arrays of a head, and how many tiles a head
// has.
struct RowTiles {
  int first, of_head;
};

__device__ __forceinline__ RowTiles
row_tiles(bool packed, int q_first, int sequence, const AttentionParams& forward) {
  const int tiles = CONTINUES ? forward.sequences : (forward.N + BLOCK_M - 1) / BLOCK_M;
  if (!packed) return {sequence * tiles, sequences_of(forward) * tiles};
  const int sequences = SLOTS ? forward.sequences : (int)gridDim.z;
  return {q_first / BLOCK_M + sequence, forward.N / BLOCK_M + sequences};
}

// The number of a block, as they are numbered where blockIdx.x counts fastest.
__device__ __forceinline__ unsigned block_number() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// The tile of keys of a block of backward_mma.
struct KeyBlock {
  int tile, dkv_head, sequence;  // dkv_head: of dK and dV
  int first_key, group;          // group: heads of Q that share these keys, in this block
  bool packed;                   // sequences of different lengths, one after the other
  bool last_first = false;       // of its head's tiles, the last has the first block
  int q_first, k_first;          // where the sequence begins among the packed ones; else 0
  int q_len, kv_len;

  // by_tile: blocks with consecutive numbers have the same tile of different heads, the first keys
  // first. Under a causal mask these are seen by the most rows: longest-first order. `together`: of so
  // many heads, before those of the next ones; 0: of all. Otherwise a head's tiles are neighbours.
  // last_keys_first: the last keys come first, but for the last `together` heads: so the grid ends with
  // short blocks.
  template <typename Number>
  __device__ __forceinline__ KeyBlock(
      bool by_tile, const Number& number_of_block, const AttentionParams& forward,
      const int* cu_seqlens_q, const int* cu_seqlens_k, unsigned together = 0,
      bool last_keys_first = false) {
    tile = blockIdx.x;
    dkv_head = blockIdx.y;
    sequence = blockIdx.z;
    packed = cu_seqlens_q != nullptr;
    if (by_tile) set_tile(gridDim, number_of_block, together, last_keys_first);
    hook_tile(tile, sequence, BLOCK_N, forward.sequences, cu_seqlens_k);
    first_key = tile * BLOCK_N;
    group = forward.heads / forward.kv_heads;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    k_first = packed ? cu_seqlens_k[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
    kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
  }

  // The block with this number of grid (tiles, kv_heads, sequences), whose sequences are not packed.
  __device__ __forceinline__
  KeyBlock(unsigned number, dim3 grid, const AttentionParams& forward, unsigned together)
      : packed(false), q_first(0), k_first(0), q_len(forward.N), kv_len(forward.N_kv) {
    set_tile(grid, [&] { return number; }, together);
    first_key = tile * BLOCK_N;
    group = forward.heads / forward.kv_heads;
  }

 private:
  // by_tile: see above.
  template <typename Grid, typename Number>
  __device__ __forceinline__ void set_tile(
      const Grid& grid, const Number& number_of_block, unsigned together,
      bool last_keys_first = false) {
    unsigned heads = grid.y * grid.z, number = number_of_block(), first_head = 0;
    if (together > 0) {
      first_head = number / (grid.x * together) * together;
      number -= first_head * grid.x;
      heads = min(heads - first_head, together);
    }
    tile = number / heads;
    last_first = last_keys_first && first_head + heads < grid.y * grid.z;
    if (last_first) tile = grid.x - 1 - tile;
    dkv_head = (first_head + number % heads) % grid.y;
    sequence = (first_head + number % heads) / grid.y;
  }

 public:
  __device__ __forceinline__ int first_head() const { return dkv_head * group; }  // of Q
  __device__ __forceinline__ int kv_head() const { return dkv_head / GROUP_SPLITS; }
  // In elements: the first row of the first head of the group, in Q or dO; the first key, in dK or dV, and
  // in K or V.
  __device__ __forceinline__ long long of_rows(const Strides& q) const {
    return sequence * q.batch + q_first * q.row + first_head() * q.head;
  }
  __device__ __forceinline__ long long of_keys(const Strides& d_k) const {
    return sequence * d_k.batch + (k_first + first_key) * d_k.row + dkv_head * d_k.head;
  }
  __device__ __forceinline__ long long of_shared_keys(const Strides& k) const {
    return sequence * k.batch + (k_first + first_key) * k.row + kv_head() * k.head;
  }
};

// The tiles of rows that see a key of a block. Row i sees keys i + window_lo .. i + window_hi.
struct RowRange {
  int window_lo, window_hi;
  int first_tile, last_tile;
  RowTiles tiles;
  // Of the sequence's first tile of rows of the group's first head, in the scratch arrays.
  long long first_slot;

  __device__ __forceinline__ RowRange(const KeyBlock& block, const AttentionParams& forward) {
    window_lo = block.kv_len - block.q_len - forward.window_left;
    window_hi = block.kv_len - block.q_len + forward.window_right;
    const int last_key = min(block.first_key + BLOCK_N, block.kv_len) - 1;
    first_tile = max(block.first_key - window_hi, 0) / BLOCK_M;
    last_tile = (min(last_key - window_lo, block.q_len - 1) + BLOCK_M) / BLOCK_M - 1;
    tiles = row_tiles(block.packed, block.q_first, block.sequence, forward);
    first_slot = (long long)block.dkv_head * block.group * tiles.of_head + tiles.first;
  }
  __device__ __forceinline__ bool empty() const { return first_tile > last_tile; }
};

// A tile of rows of a block that has some (see RowRange), in the order in which it goes through them: all
// heads of the group, and of each the tiles from the last to the first; with a block mask, those of its
// lists.
struct MBlock {
  KeyBlock block;
  RowRange rows;
  GroupHooks hooks_of;
  int head = 0, m_block;  // of the group; of the sequence
  RowLists lists;

  __device__ __forceinline__ MBlock(const KeyBlock& block, const RowRange& rows, const Hooks& hooks)
      : block(block), rows(rows), hooks_of{hooks}, m_block(rows.last_tile) {
    lists.begin(hooks_of, 0, block.tile, m_block);
  }
  __device__ __forceinline__ bool exists() const { return head < block.group; }
  __device__ __forceinline__ void advance() {
    int next = m_block > rows.first_tile ? m_block - 1 : rows.last_tile;
    int next_head = m_block > rows.first_tile ? head : head + 1;
    lists.advance(hooks_of, head, block.tile, block.group, next_head, next);
    m_block = next;
    head = next_head;
  }
  // The number of the tile in the scratch arrays, from the sequence's first one of the first head on.
  __device__ __forceinline__ int slot() const { return head * rows.tiles.of_head + m_block; }

  __device__ __forceinline__ Hooks hooks() const { return hooks_of(head); }
  // Whether hook_weights has something to do: mask_mod hides a key, or there are rows past the end.
  __device__ __forceinline__ bool partial() const {
    return lists.is_partial() || (SCORE_GRAD && (m_block + 1) * BLOCK_M > block.q_len);
  }
};

// The tile of rows of a block: grid (tiles of the longest sequence, heads, sequences), or
// with SLOTS that of packed_tiles.cuh.
struct RowBlock {
  int tile, head, sequence, first_row;
  bool packed;
  int q_first, q_len;

  __device__ __forceinline__ RowBlock(const AttentionParams& forward, const int* cu_seqlens_q) {
    tile = blockIdx.x;
    head = blockIdx.y;
    sequence = blockIdx.z;
    hook_tile(tile, sequence, BLOCK_M, forward.sequences, cu_seqlens_q);
    first_row = tile * BLOCK_M;
    packed = cu_seqlens_q != nullptr;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
  }

  // The number of the tile in the scratch arrays.
  __device__ __forceinline__ long long slot(const RowTiles& tiles) const {
    return (long long)head * tiles.of_head + tiles.first + (unsigned)tile;
  }
  // The first row in Q, O, dO or dQ, in elements.
  __device__ __forceinline__ long long of_rows(const Strides& q) const {
    return sequence * q.batch + (q_first + first_row) * q.row + head * q.head;
  }
};
