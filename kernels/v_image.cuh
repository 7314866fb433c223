// Where the tiles of V^T are that 16_transpose.cu writes and 16_fp8.cu reads; what descales are.

#pragma once

#ifndef DESCALE_ROWS
#define DESCALE_ROWS 0  // 0: a descale for each head; or for each so many rows of a head
#endif

// How many tiles of BLOCK_N keys a head has. Where sequences are packed, each begins a tile, and keys
// and tiles are those of all.
__device__ __forceinline__ int v_tiles_of_head(int block_n, int keys, int sequences) {
  return sequences > 0 ? keys / block_n + sequences : (keys + block_n - 1) / block_n;
}

// Which tile is the first of a head of a sequence whose first key is `first`, in K and V.
__device__ __forceinline__ long long first_v_tile(
    int block_n, int head, int heads, int sequence, int first, int keys, int sequences) {
  const long long of_head = v_tiles_of_head(block_n, keys, sequences);
  if (sequences > 0) return head * of_head + first / block_n + sequence;
  return ((long long)sequence * heads + head) * of_head;
}

__device__ __forceinline__ float descale_of(const float* descales, int head) {
  return descales ? descales[head] : 1.0f;
}

// That of a row of a head, which has so many rows, where DESCALE_ROWS have one.
__device__ __forceinline__ float descale_of(const float* descales, int head, int row, int rows) {
#if DESCALE_ROWS
  const int blocks = (rows + DESCALE_ROWS - 1) / DESCALE_ROWS;
  return descale_of(descales, head * blocks + min(row / DESCALE_ROWS, blocks - 1));
#else
  return descale_of(descales, head);
#endif
}
