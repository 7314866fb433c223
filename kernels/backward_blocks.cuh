// What a block of the backward in half types has: its tile of keys and the tiles of rows that see them,
// or a tile of rows; and lse, delta and zeros for dQ_accum before the loop. Whoever includes this says
// before how large tiles are: BLOCK_M, BLOCK_N, HEAD_DIM, THREADS and DQ_COLUMNS, the columns of a row
// of dQ_accum. Notebook 08 explains delta.

#pragma once
#include "backward_params.cuh"
#include "half2.cuh"
#include "packed_tiles.cuh"
#include "softmax.cuh"

// Where a sequence's tiles of rows begin in the scratch arrays of a head, and how many tiles a head
// has.
struct RowTiles {
  int first, of_head;
};

__device__ __forceinline__ RowTiles
row_tiles(bool packed, int q_first, int sequence, const AttentionParams& forward) {
  const int tiles = (forward.N + BLOCK_M - 1) / BLOCK_M;
  if (!packed) return {sequence * tiles, (int)gridDim.z * tiles};
  const int sequences = SLOTS ? forward.sequences : (int)gridDim.z;
  return {q_first / BLOCK_M + sequence, forward.N / BLOCK_M + sequences};
}

// The number of a block, as they are numbered where blockIdx.x counts fastest.
__device__ __forceinline__ unsigned block_number() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// The tile of keys of a block of backward_mma.
struct KeyBlock {
  int tile, kv_head, sequence;
  int first_key, group;  // group: heads of Q that share these keys
  bool packed;           // sequences of different lengths, one after the other
  int q_first, k_first;  // where the sequence begins among the packed ones; else 0
  int q_len, kv_len;

  // by_tile: blocks with consecutive numbers have the same tile of different heads, the first keys
  // first. Under a causal mask these are seen by the most rows: longest-first order. `together`: of so
  // many heads, before those of the next ones; 0: of all. Otherwise a head's tiles are neighbours.
  template <typename Number>
  __device__ __forceinline__ KeyBlock(
      bool by_tile, const Number& number_of_block, const AttentionParams& forward,
      const int* cu_seqlens_q, const int* cu_seqlens_k, unsigned together = 0) {
    tile = blockIdx.x;
    kv_head = blockIdx.y;
    sequence = blockIdx.z;
    packed = cu_seqlens_q != nullptr;
    if (by_tile) {
      unsigned heads = gridDim.y * gridDim.z, number = number_of_block(), first_head = 0;
      if (together > 0) {
        first_head = number / (gridDim.x * together) * together;
        number -= first_head * gridDim.x;
        heads = min(heads - first_head, together);
      }
      tile = number / heads;
      kv_head = (first_head + number % heads) % gridDim.y;
      sequence = (first_head + number % heads) / gridDim.y;
    }
    hook_tile(tile, sequence, BLOCK_N, forward.sequences, cu_seqlens_k);
    first_key = tile * BLOCK_N;
    group = forward.heads / forward.kv_heads;
    q_first = packed ? cu_seqlens_q[sequence] : 0;
    k_first = packed ? cu_seqlens_k[sequence] : 0;
    q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
    kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
  }

  // The first row of the first head of the group in Q or dO, and the first key in K, V, dK or dV,
  // in elements.
  __device__ __forceinline__ long long of_rows(const Strides& q) const {
    return sequence * q.batch + q_first * q.row + kv_head * group * q.head;
  }
  __device__ __forceinline__ long long of_keys(const Strides& k) const {
    return sequence * k.batch + (k_first + first_key) * k.row + kv_head * k.head;
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
    first_slot = (long long)block.kv_head * block.group * tiles.of_head + tiles.first;
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

// lse_delta: for each tile of rows, the log-sum-exp in units of log2 and then delta = rowsum(dO O).
// dQ_accum becomes zero, and so does the tile's turn (TURNS).
template <bool TURNS = false, typename T>
__device__ __forceinline__ void prepare_rows(
    const RowBlock& block, const RowTiles& tiles, const T* O, const T* dO, const float* lse,
    float* lse_delta, float* dQ_accum, const BackwardParams& params, int* turns = nullptr) {
  const AttentionParams& forward = params.forward;
  const long long slot = block.slot(tiles);
  O += block.of_rows(forward.o);
  dO += block.of_rows(params.d_o);
  lse += ((long long)(block.packed ? 0 : block.sequence) * forward.heads + block.head) * forward.N +
         block.q_first + block.first_row;
  lse_delta += slot * 2 * BLOCK_M;
  dQ_accum += slot * BLOCK_M * DQ_COLUMNS;
  if (TURNS && threadIdx.x == 0) turns[slot] = 0;
  for (int i = threadIdx.x; i < BLOCK_M * DQ_COLUMNS / 4; i += THREADS)
    reinterpret_cast<float4*>(dQ_accum)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  constexpr int LANES = 8;  // of a row
#pragma unroll
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += THREADS / LANES) {
    const bool exists = block.first_row + row < block.q_len;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = threadIdx.x % LANES; exists && chunk < HEAD_DIM / 8; chunk += LANES) {
      const uint4 x = *reinterpret_cast<const uint4*>(O + row * forward.o.row + 8 * chunk);
      const uint4 y = *reinterpret_cast<const uint4*>(dO + row * params.d_o.row + 8 * chunk);
      const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack(T(), xs[i]), b = unpack(T(), ys[i]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % LANES == 0) {
      const float l = exists ? lse[row] : NEG_INF;
      // A row that sees no key: its weights are exp(-inf) = 0. From 2^25 on lse is rounded by so
      // many powers of 2 that weights could overflow float16: it is raised by more than that.
      const float l_log2 = l * LOG2_E, raised = fabsf(l_log2) < 0x1p25f ? 0.0f : 0x1p-21f;
      lse_delta[row] = l == NEG_INF ? -NEG_INF : l_log2 + raised * fabsf(l_log2);
      lse_delta[BLOCK_M + row] = sum;
    }
  }
}
