// A panel of V, KEY_BYTES keys of a tile, becomes rows of V^T as wgmma reads them from shared memory: in
// 16_transpose.cu by a block, in 16_fp8.cu by a warp.
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
constexpr unsigned RAW_BYTES = KEY_BYTES * HEAD_DIM;            // of a panel's keys, as they come
constexpr unsigned TRANSPOSE_BYTES = RAW_BYTES + PANEL8_BYTES;  // of shared memory

// Where chunk c of a row of V is in shared memory: eight lanes of ldmatrix read eight rows, so the chunks
// of a column are spread over the banks as far as a row has enough of them.
__device__ __forceinline__ int raw_at(int row, int c) {
  const int spread = CHUNKS % 8 == 0   ? row % 8
                     : CHUNKS % 4 == 0 ? row / 2 % 4
                     : CHUNKS % 2 == 0 ? row / 4 % 2
                                       : 0;
  return row * HEAD_DIM + (c ^ spread) * 16;
}

// Behind V's columns: a row of ones, and seven of zeros, the same for all panels.
__device__ __forceinline__ void write_ones(unsigned char* image_smem, int thread, int threads) {
  for (int i = thread; i < 8 * KEY_BYTES / 16; i += threads) {
    const unsigned one = i < KEY_BYTES / 16 ? 0x38383838 : 0;  // 1.0 in e4m3, four times
    reinterpret_cast<uint4*>(image_smem + HEAD_DIM * KEY_BYTES)[i] = {one, one, one, one};
  }
}

// Issues the copies of a panel's keys to `raw` in shared memory. The panel begins at `source`, and the
// sequence has `keys` keys from there on; past them are zeros.
template <int THREADS>
__device__ __forceinline__ void load_panel(
    const unsigned char* source, long long row_stride, int keys, unsigned char* raw, int thread) {
  constexpr int UNROLLED = THREADS == 32 ? 2 : 1;
#pragma unroll UNROLLED
  for (int i = thread; i < KEY_BYTES * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, c = i % CHUNKS;
    const bool exists = row < keys;
    cp_async(
        smem_address(raw + raw_at(row, c)), exists ? source + row * row_stride + 16 * c : source,
        exists ? 16 : 0);
  }
}

// A panel in `raw`, which all threads see, becomes `out` in global memory, by way of `image_smem`. `sync` is
// a barrier of the threads that do it together.
template <int THREADS, typename Sync>
__device__ __forceinline__ void transpose_panel(
    const unsigned char* raw, unsigned char* image_smem, unsigned char* out, int thread,
    const Sync& sync) {
  // ---- 16 columns of 32 keys at a time
  constexpr int UNROLLED =
      THREADS == 32 ? 4 : 1;  // one warp has to hide latency, a block has others
  const int lane_id = thread % 32;
#pragma unroll UNROLLED
  for (int i = thread / 32; i < CHUNKS * (KEY_BYTES / 32); i += THREADS / 32) {
    const int c = i % CHUNKS, key = i / CHUNKS * 32;
    unsigned pairs[4];
    ldmatrix_x4_trans(pairs, smem_address(raw + raw_at(key + lane_id, c)));
    const int row = 16 * c + lane_id / 16 * 8 + lane_id % 8;
    const int chunk = key / 16 + lane_id / 8 % 2;
    stmatrix_x4(
        smem_address(image_smem) + row * KEY_BYTES + (chunk ^ chunk_xor<KEY_BYTES>(row)) * 16,
        __byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[2], pairs[3], 0x6420),
        __byte_perm(pairs[0], pairs[1], 0x7531), __byte_perm(pairs[2], pairs[3], 0x7531));
  }
  sync();  // hazard: rows of other threads are not there yet

  // ---- the panel, as it is
#pragma unroll UNROLLED
  for (int i = thread; i < PANEL8_BYTES / 16; i += THREADS)
    reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(image_smem)[i];
}
