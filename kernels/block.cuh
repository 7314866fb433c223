// The tile of rows, head and sequence that a block computes, and the window of keys that these rows
// see. Written out in 05_heads_and_masks.cu and explained in its notebook.

#pragma once
#include "attention_params.cuh"
#include "packed_tiles.cuh"
#include "softmax.cuh"

// The tile, head and sequence of this block. Grid: (tiles of the longest sequence, heads, sequences),
// or with SLOTS that of packed_tiles.cuh.
struct Block {
  int head, kv_head, sequence;
  int first_row;         // of the tile, in its sequence
  int q_first, k_first;  // where a packed sequence begins in Q and K; else 0
  int q_len, kv_len;     // rows and keys of the sequence
  bool packed;

  __device__ __forceinline__ Block(
      int block_m, const AttentionParams& params, const int* cu_seqlens_q,
      const int* cu_seqlens_k) {
    int tile = blockIdx.x;
    head = blockIdx.y;
    sequence = blockIdx.z;
    // Causal masks: longest-first (LPT) order. The last rows see the most keys, so their tiles, of
    // all heads, start first and light ones fill the gaps at the end. Otherwise a head's tiles are
    // neighbours and find K and V in the L2 cache.
    if (params.window_right < UNLIMITED) {
      const unsigned heads = gridDim.y * gridDim.z;
      const unsigned block = tile + gridDim.x * (head + gridDim.y * sequence);
      tile = gridDim.x - 1 - block / heads;
      head = block % heads % gridDim.y;
      sequence = block % heads / gridDim.y;
    }
    hook_tile(tile, sequence, block_m, params.sequences, cu_seqlens_q);
    kv_head = head / (params.heads / params.kv_heads);
    first_row = tile * block_m;
    packed = cu_seqlens_q != nullptr;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    k_first = packed ? cu_seqlens_k[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : params.N;
    kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv;
  }

  // Where the tile's first row is in Q or O, and the sequence's first key in K or V, in elements.
  __device__ __forceinline__ long long rows_offset(const Strides& q) const {
    return sequence * q.batch + (q_first + first_row) * q.row + head * q.head;
  }
  __device__ __forceinline__ long long keys_offset(const Strides& k) const {
    return sequence * k.batch + k_first * k.row + kv_head * k.head;
  }

  // The log-sum-exp of row r of the tile, from its maximum in units of log2 and its sum.
  __device__ __forceinline__ void store_lse(
      float* lse, const AttentionParams& params, int r, float m_i, float sum) const {
    const long long head_row =
        ((long long)(packed ? 0 : sequence) * params.heads + head) * params.N + q_first;
    lse[head_row + first_row + r] = LN_2 * (m_i + log2f(sum));
  }
};

// The keys that rows of a tile see. Row i is at key i + kv_len - q_len: the last at the last.
struct Window {
  int lo, hi;               // row i sees keys i + lo .. i + hi
  int last_row;             // of the tile
  int first_pos, last_pos;  // the keys at which the first and the last row are
  int begin, end;           // keys begin .. end - 1 are all that some row of the tile sees

  __device__ __forceinline__
  Window(int block_m, const Block& block, const AttentionParams& params) {
    lo = block.kv_len - block.q_len - params.window_left;
    hi = block.kv_len - block.q_len + params.window_right;
    last_row = min(block.first_row + block_m, block.q_len) - 1;
    first_pos = block.first_row + block.kv_len - block.q_len;
    last_pos = last_row + block.kv_len - block.q_len;
    begin = max(first_pos - params.window_left, 0);
    end = min(last_pos + params.window_right + 1, block.kv_len);
  }
};
