// A panel of V, KEY_BYTES keys of a tile, becomes rows of V^T as wgmma reads them from shared memory: in
// 16_transpose.cu by a block, in 16_background.cu by a warp.
//
// ldmatrix.trans transposes 2-byte elements. Of a byte matrix it moves pairs: lane 4 g + t gets, of keys
// 2 t and 2 t + 1, columns 2 g and 2 g + 1. A byte permutation takes the columns apart. So the lane has
// column 2 g of four keys, 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, in one register: a row of V^T, and in the
// very order of keys in which P is in registers (fp8.cuh). Row r < 8 of each 16 of V^T is column 2 r of
// V, row 8 + r is column 2 r + 1: so eight lanes store eight rows by one stmatrix, without conflicts.

#pragma once
#include "fp8_tiles.cuh"
#include "ptx.cuh"

constexpr int CHUNKS = HEAD_DIM / 16;  // of 16 columns
constexpr int PANELS_OF_TILE = BLOCK_N / KEY_BYTES;
constexpr unsigned PANEL8_BYTES = V_ROWS * KEY_BYTES;
// Bytes of a key in shared memory: an odd number of chunks, so that the eight rows which ldmatrix reads
// at a time are in different banks.
constexpr int RAW_ROW = HEAD_DIM + (CHUNKS % 2 == 0 ? 16 : 0);
constexpr unsigned RAW_BYTES = KEY_BYTES * RAW_ROW;             // of a panel's keys, as they come
constexpr unsigned TRANSPOSE_BYTES = RAW_BYTES + PANEL8_BYTES;  // of shared memory

// Behind V's columns: a row of ones, and seven of zeros, the same for all panels.
__device__ __forceinline__ void write_ones(unsigned char* image_smem, int thread, int threads) {
  for (int i = thread; i < 8 * KEY_BYTES / 16; i += threads) {
    const unsigned one = i < KEY_BYTES / 16 ? 0x38383838 : 0;  // 1.0 in e4m3, four times
    reinterpret_cast<uint4*>(image_smem + HEAD_DIM * KEY_BYTES)[i] = {one, one, one, one};
  }
}

// A panel in `raw`, which all threads see, becomes `image_smem`, 16 columns of 32 keys at a time.
template <int THREADS>
__device__ __forceinline__ void transpose_panel(
    const unsigned char* raw, unsigned char* image_smem, int thread) {
  constexpr int UNROLLED =
      THREADS == 32 ? 4 : 1;  // one warp has to hide latency, a block has others
  const int lane_id = thread % 32;
#pragma unroll UNROLLED
  for (int i = thread / 32; i < CHUNKS * (KEY_BYTES / 32); i += THREADS / 32) {
    const int c = i % CHUNKS, key = i / CHUNKS * 32;
    unsigned pairs[4];
    ldmatrix_x4_trans(pairs, smem_address(raw + (key + lane_id) * RAW_ROW + 16 * c));
    const int row = 16 * c + lane_id / 16 * 8 + lane_id % 8;
    const int chunk = key / 16 + lane_id / 8 % 2;
    stmatrix_x4(
        smem_address(image_smem) + row * KEY_BYTES + (chunk ^ chunk_xor<KEY_BYTES>(row)) * 16,
        __byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[2], pairs[3], 0x6420),
        __byte_perm(pairs[0], pairs[1], 0x7531), __byte_perm(pairs[2], pairs[3], 0x7531));
  }
}
