// The tiles of 10: their sizes, and which rows and keys a tile has. A block finds its tile in the
// grid (10_00 to 10_09) or takes one after the other from a table that 10_order.cu writes (10_10
// on). The prologue is that of 05_heads_and_masks.cu; 10_hopper.ipynb explains the table.

#pragma once
#include "attention_params.cuh"
#include "hopper.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per tile: 64 for each warpgroup that computes
#endif
#ifndef BLOCK_N
#define BLOCK_N 128  // B_c, keys per tile
#endif

constexpr int CONSUMERS = BLOCK_M / 64;                     // warpgroups that compute
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // TMA fills columns up with zeros
constexpr int PANELS = (HEAD_DIM + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
constexpr unsigned PANEL_BYTES = 64 * 128;               // 64 rows of 64 columns
constexpr unsigned Q_BYTES = PANELS * PANEL_BYTES;       // of Q of one consumer
constexpr unsigned TILE_BYTES = PANELS * BLOCK_N * 128;  // of a tile of K or V
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "16-byte chunks; O must fit the registers");
static_assert(BLOCK_M % 64 == 0 && CONSUMERS >= 2 && CONSUMERS <= 3, "64 rows per consumer");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "what wgmma takes; a step of P V has 16 keys");

// A tile of rows. Keys begin .. end - 1 are all that some row of the tile sees; where end <=
// begin, its rows see no key.
struct Tile {
  int sequence, head, kv_head, q_len;
  int row, rows;        // its first row in Q and O; how many its sequence has from there on
  int first_pos;        // the first row's position among the keys
  int k_first, kv_len;  // the first key of its sequence in K and V; how many there are
  int begin, end;
};

// Sets the tile's rows: those from first_row of its sequence on.
__device__ __forceinline__ int set_rows(
    Tile& tile, int first_row, const int* cu_seqlens_q, const int* cu_seqlens_k,
    const AttentionParams& params) {
  const int sequence = tile.sequence;
  const bool packed = cu_seqlens_q != nullptr;
  const int q_first = packed ? cu_seqlens_q[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : params.N;
  tile.k_first = packed ? cu_seqlens_k[sequence] : 0;
  tile.kv_len = packed ? cu_seqlens_k[sequence + 1] - tile.k_first : params.N_kv;
  tile.row = q_first + first_row;
  tile.rows = q_len - first_row;
  tile.q_len = q_len;
  return q_len;
}

// Sets the keys that these rows see.
__device__ __forceinline__ void set_keys(
    Tile& tile, int first_row, int q_len, const AttentionParams& params) {
  // Row i is at key i + kv_len - q_len, so that the last row is at the last key.
  tile.first_pos = first_row + tile.kv_len - q_len;
  tile.begin = max(tile.first_pos - params.window_left, 0);
#if BIAS_BYTES
  tile.begin = tile.begin / 2 * 2;  // a bias is loaded in pairs
#endif
  tile.end = min(tile.first_pos + min(BLOCK_M, tile.rows) + params.window_right, tile.kv_len);
}

// This block's tile in a grid of (tiles, heads, sequences); false where it has no rows.
__device__ __forceinline__ bool tile_of_block(
    Tile& tile, const int* cu_seqlens_q, const int* cu_seqlens_k, const AttentionParams& params) {
  int row_tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  if (params.window_right < UNLIMITED) {  // causal masks: longest tiles first, as in 05
    const unsigned heads = gridDim.y * gridDim.z;
    const unsigned block = row_tile + gridDim.x * (head + gridDim.y * sequence);
    row_tile = gridDim.x - 1 - block / heads;
    head = block % heads % gridDim.y;
    sequence = block % heads / gridDim.y;
  }
  tile.sequence = sequence;
  tile.head = head;
  tile.kv_head = head / (params.heads / params.kv_heads);
  const int q_len = set_rows(tile, row_tile * BLOCK_M, cu_seqlens_q, cu_seqlens_k, params);
  set_keys(tile, row_tile * BLOCK_M, q_len, params);
  return tile.rows > 0;
}

// The next tile of this block; false if none is left. schedule: [rounds][blocks] of
// (sequence, head, head of K and V, first row), written by 10_order.cu: longest tiles first, so that
// all blocks have similar amounts of work. `item` is loaded one round ahead.
__device__ __forceinline__ bool next_tile(
    Tile& tile, int4& item, int& round, int rounds, const int4* schedule, const int* cu_seqlens_q,
    const int* cu_seqlens_k, const AttentionParams& params) {
  while (round < rounds) {
    const int first_row = item.w;
    tile.sequence = item.x;
    tile.head = item.y;
    tile.kv_head = item.z;
    if (++round < rounds) item = schedule[round * gridDim.x + blockIdx.x];
    if (first_row < 0) continue;
    const int q_len = set_rows(tile, first_row, cu_seqlens_q, cu_seqlens_k, params);
    if (tile.rows <= 0) continue;  // a sequence that is shorter than the longest
    set_keys(tile, first_row, q_len, params);
    return true;
  }
  return false;
}

// The first key of the last key tile. A tile of rows starts there and goes down to `begin`. Rows
// that see no key get one key tile, all masked: their sum is 0.
__device__ __forceinline__ int last_tile_begin(const Tile& tile) {
  return tile.begin + (max(tile.end - tile.begin, 1) - 1) / BLOCK_N * BLOCK_N;
}
