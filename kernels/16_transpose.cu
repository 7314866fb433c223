// 16 transpose: V, [keys, HEAD_DIM] in e4m3, becomes V^T in tiles of BLOCK_N keys, as wgmma reads them
// from shared memory: 16_fp8.cu copies each tile as it is. v_transpose.cuh says how. Above 64
// columns, where a call has many rows, 16_background.cu does it, or all but the first heads'.
//
// Launch   transpose_v: grid (panels of a head's tiles, kv_heads, sequences), packed (panels of all tiles,
//          kv_heads, 1), or for the first heads of all sequences (panels of a head's tiles, heads, 1);
//          block THREADS; SHARED_BYTES, dynamic. clear_counts: one block
// Shapes   V_image [sequences, kv_heads, tiles, HEAD_DIM BLOCK_N], packed [kv_heads, tiles, ...]: see
//          v_image.cuh. Keys past the end of a sequence are zeros, whatever lies behind it in V
// Traffic  reads V once, writes as many bytes
#include "attention_params.cuh"
#include "packed_tiles.cuh"
#include "v_image.cuh"
#include "v_transpose.cuh"

constexpr int THREADS = 128;
constexpr unsigned SHARED_BYTES = TRANSPOSE_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS) transpose_v(
    const unsigned char* __restrict__ V, unsigned char* __restrict__ V_image,
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]; null: not packed
    const AttentionParams params) {
  // ---- the panel of this block
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  int tile = blockIdx.x / PANELS_OF_TILE, sequence = blockIdx.z + blockIdx.y / params.kv_heads;
  const int panel = blockIdx.x % PANELS_OF_TILE, head = blockIdx.y % params.kv_heads;
  const bool packed = cu_seqlens_k != nullptr;
  if (packed) find_tile(tile, sequence, BLOCK_N, params.sequences, cu_seqlens_k);
  const int k_first = packed ? cu_seqlens_k[sequence] : 0;
  int keys = (packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv) - tile * BLOCK_N;
  // The whole block, before any barrier. Rows of a sequence without keys get its first tile, masked.
  if (keys <= 0 && tile > 0) return;
  keys -= panel * KEY_BYTES;

  // ---- its V^T, and the rows of ones
  const unsigned char* const source =
      V + (packed ? 0 : sequence) * params.v.batch + head * params.v.head +
      (long long)(k_first + tile * BLOCK_N + panel * KEY_BYTES) * params.v.row;
  const long long v_tile = first_v_tile(
      BLOCK_N, head, params.kv_heads, sequence, k_first, params.N_kv, params.sequences);
  unsigned char* const image_smem = dynamic_smem + RAW_BYTES;
  write_ones(image_smem, threadIdx.x, THREADS);
  for (int i = threadIdx.x; i < KEY_BYTES * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, c = i % CHUNKS;
    const bool exists = row < keys;  // past the sequence are zeros
    cp_async(
        smem_address(dynamic_smem) + row * RAW_ROW + 16 * c,
        exists ? source + row * params.v.row + 16 * c : source, exists ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // hazard: keys of other threads are not there yet
  transpose_panel<THREADS>(dynamic_smem, image_smem, threadIdx.x);
  __syncthreads();  // hazard: rows of other threads are not there yet
  uint4* const out =
      reinterpret_cast<uint4*>(V_image + (v_tile + tile) * V8_BYTES + panel * PANEL8_BYTES);
  for (int i = threadIdx.x; i < PANEL8_BYTES / 16; i += THREADS)
    out[i] = reinterpret_cast<const uint4*>(image_smem)[i];
}

// Before the first call whose V 16_background.cu transposes itself; it leaves the counts as they were.
extern "C" __global__ void clear_counts(int* __restrict__ counts, const int n) {
  // ---- by one block
  for (int i = threadIdx.x; i < n; i += blockDim.x) counts[i] = 0;
}
