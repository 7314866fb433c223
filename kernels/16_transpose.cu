// 16 transpose: V, [keys, HEAD_DIM] in e4m3, becomes V^T in tiles of BLOCK_N keys, as wgmma reads them
// from shared memory: 16_fp8.cu copies each tile as it is.
//
// ldmatrix.trans transposes 2-byte elements. Of a byte matrix it moves pairs: lane 4 g + t gets, of keys
// 2 t and 2 t + 1, columns 2 g and 2 g + 1. A byte permutation takes the columns apart. So the lane has
// column 2 g of four keys, 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, in one register: a row of V^T, and in the
// very order of keys in which P is in registers (fp8.cuh). Row r < 8 of each 16 of V^T is column 2 r of
// V, row 8 + r is column 2 r + 1: so eight lanes store eight rows by one stmatrix, without conflicts.
//
// Launch   grid (tiles of a head, kv_heads, sequences), packed (all tiles, kv_heads, 1); block 128;
//          2 BLOCK_N HEAD_DIM bytes of dynamic shared memory
// Shapes   V_image [sequences, kv_heads, tiles, HEAD_DIM BLOCK_N], packed [kv_heads, tiles, ...]: see
//          v_image.cuh. Keys past the end of a sequence are zeros, whatever lies behind it in V
// Traffic  reads V once, writes as many bytes
#include "attention_params.cuh"
#include "fp8_tiles.cuh"
#include "packed_tiles.cuh"
#include "v_image.cuh"

constexpr int THREADS = 128, CHUNKS = HEAD_DIM / 16;
constexpr int PANELS_OF_TILE = BLOCK_N / KEY_BYTES;  // a block transposes one: KEY_BYTES keys
constexpr unsigned PANEL8_BYTES = V_ROWS * KEY_BYTES;
constexpr unsigned SHARED_BYTES = KEY_BYTES * HEAD_DIM + PANEL8_BYTES;

// Where chunk c of a row of V is in shared memory: eight lanes of ldmatrix read eight rows, so the chunks
// of a column are spread over the banks as far as a row has enough of them.
__device__ __forceinline__ int raw_at(int row, int c) {
  const int spread = CHUNKS % 8 == 0   ? row % 8
                     : CHUNKS % 4 == 0 ? row / 2 % 4
                     : CHUNKS % 2 == 0 ? row / 4 % 2
                                       : 0;
  return row * HEAD_DIM + (c ^ spread) * 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_v(
    const unsigned char* __restrict__ V, unsigned char* __restrict__ V_image,
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]; null: not packed
    const AttentionParams params) {
  // ---- the panel of this block
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  unsigned char* const image_smem = dynamic_smem + KEY_BYTES * HEAD_DIM;
  int tile = blockIdx.x / PANELS_OF_TILE, sequence = blockIdx.z;
  const int panel = blockIdx.x % PANELS_OF_TILE;
  const int head = blockIdx.y;
  const bool packed = cu_seqlens_k != nullptr;
  if (packed) find_tile(tile, sequence, BLOCK_N, params.sequences, cu_seqlens_k);
  const int k_first = packed ? cu_seqlens_k[sequence] : 0;
  int keys = (packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv) - tile * BLOCK_N;
  // The whole block, before any barrier. Rows of a sequence without keys get its first tile, masked.
  if (keys <= 0 && tile > 0) return;
  keys -= panel * KEY_BYTES;

  // ---- its keys to shared memory; zeros past the end
  const unsigned char* const source =
      V + (packed ? 0 : sequence) * params.v.batch + head * params.v.head +
      (long long)(k_first + tile * BLOCK_N + panel * KEY_BYTES) * params.v.row;
#pragma unroll 8
  for (int i = threadIdx.x; i < KEY_BYTES * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, c = i % CHUNKS;
    *reinterpret_cast<uint4*>(dynamic_smem + raw_at(row, c)) =
        row < keys ? *reinterpret_cast<const uint4*>(source + row * params.v.row + 16 * c)
                   : uint4{};
  }
  __syncthreads();  // hazard: keys of other threads are not there yet

  // ---- behind V's columns a row of ones, and seven of zeros
  for (int i = threadIdx.x; i < 8 * KEY_BYTES / 16; i += THREADS) {
    const unsigned one = i < KEY_BYTES / 16 ? 0x38383838 : 0;  // 1.0 in e4m3, four times
    reinterpret_cast<uint4*>(image_smem + HEAD_DIM * KEY_BYTES)[i] = {one, one, one, one};
  }

  // ---- 16 columns of 32 keys at a time
  const int lane_id = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < CHUNKS * (KEY_BYTES / 32); i += THREADS / 32) {
    const int c = i % CHUNKS, key = i / CHUNKS * 32;
    unsigned pairs[4];
    ldmatrix_x4_trans(pairs, smem_address(dynamic_smem + raw_at(key + lane_id, c)));
    const int row = 16 * c + lane_id / 16 * 8 + lane_id % 8;
    const int chunk = key / 16 + lane_id / 8 % 2;
    stmatrix_x4(
        smem_address(image_smem) + row * KEY_BYTES + (chunk ^ chunk_xor<KEY_BYTES>(row)) * 16,
        __byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[2], pairs[3], 0x6420),
        __byte_perm(pairs[0], pairs[1], 0x7531), __byte_perm(pairs[2], pairs[3], 0x7531));
  }
  __syncthreads();  // hazard: rows of other threads are not there yet

  // ---- the panel, as it is
  const long long v_tile = first_v_tile(
      BLOCK_N, head, params.kv_heads, sequence, k_first, params.N_kv, params.sequences);
  uint4* const out =
      reinterpret_cast<uint4*>(V_image + (v_tile + tile) * V8_BYTES + panel * PANEL8_BYTES);
  for (int i = threadIdx.x; i < PANEL8_BYTES / 16; i += THREADS)
    out[i] = reinterpret_cast<const uint4*>(image_smem)[i];
}
