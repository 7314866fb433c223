// 16 transpose: V, [keys, HEAD_DIM] in e4m3, becomes V^T in tiles of BLOCK_N keys, as wgmma reads them
// from shared memory: 16_fp8.cu copies each tile as it is.
//
// ldmatrix.trans transposes 2-byte elements. Of a byte matrix it moves pairs: lane 4 g + t gets, of keys
// 2 t and 2 t + 1, columns 2 g and 2 g + 1. A byte permutation takes the columns apart. So the lane has
// column 2 g of four keys, 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, in one register: a row of V^T, and in the
// very order of keys in which P is in registers (fp8.cuh). Row r < 8 of each 16 of V^T is column 2 r of
// V, row 8 + r is column 2 r + 1: so eight lanes store eight rows by one stmatrix, without conflicts.
//
// A warp does all of it for up to 4 KB of its own, and waits for no other.
//
// Launch   grid (tiles of a head, kv_heads, sequences), packed (all tiles, kv_heads, 1); block THREADS:
//          a warp for each UNIT_CHUNKS chunks of 16 columns of a panel; SHARED_BYTES, dynamic
// Shapes   V_image [sequences, kv_heads, tiles, HEAD_DIM BLOCK_N], packed [kv_heads, tiles, ...]: see
//          v_image.cuh. Keys past the end of a sequence are zeros, whatever lies behind it in V
// Traffic  reads V once, writes as many bytes
#include "attention_params.cuh"
#include "fp8_tiles.cuh"
#include "packed_tiles.cuh"
#include "v_image.cuh"

constexpr int CHUNKS = HEAD_DIM / 16;
constexpr int PANELS_OF_TILE = BLOCK_N / KEY_BYTES;
constexpr unsigned PANEL8_BYTES = V_ROWS * KEY_BYTES;
constexpr int ROUNDED_CHUNKS = CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
constexpr int UNIT_CHUNKS = ROUNDED_CHUNKS < 256 / KEY_BYTES ? ROUNDED_CHUNKS : 256 / KEY_BYTES;
constexpr int UNITS = (CHUNKS + UNIT_CHUNKS - 1) / UNIT_CHUNKS;  // of a panel
constexpr int THREADS = 32 * PANELS_OF_TILE * UNITS;
constexpr int UNIT_BYTES = KEY_BYTES * UNIT_CHUNKS * 16, LOADS = UNIT_BYTES / 512;
constexpr int STEPS = UNIT_CHUNKS * (KEY_BYTES / 32);  // 16 columns of 32 keys each
constexpr unsigned SHARED_BYTES = PANELS_OF_TILE * UNITS * UNIT_BYTES;

// Where chunk c of a row of a unit is in shared memory: eight lanes of ldmatrix read eight rows, so the
// chunks of a column are spread over the banks.
__device__ __forceinline__ int raw_at(int row, int c) {
  const int spread = UNIT_CHUNKS == 8   ? row % 8
                     : UNIT_CHUNKS == 4 ? row / 2 % 4
                     : UNIT_CHUNKS == 2 ? row / 4 % 2
                                        : 0;
  return (row * UNIT_CHUNKS + (c ^ spread)) * 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_v(
    const unsigned char* __restrict__ V, unsigned char* __restrict__ V_image,
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]; null: not packed
    const AttentionParams params) {
  // ---- the tile of this block, the panel and the chunks of this warp
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  unsigned char* const smem = dynamic_smem + warp_id * UNIT_BYTES;
  int tile = blockIdx.x, sequence = blockIdx.z;
  const int head = blockIdx.y;
  const int panel = warp_id / UNITS, first_chunk = warp_id % UNITS * UNIT_CHUNKS;
  const bool packed = cu_seqlens_k != nullptr;
  if (packed) find_tile(tile, sequence, BLOCK_N, params.sequences, cu_seqlens_k);
  const int k_first = packed ? cu_seqlens_k[sequence] : 0;
  int keys = (packed ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv) - tile * BLOCK_N;
  // The whole block. Rows of a sequence without keys get its first tile, masked.
  if (keys <= 0 && tile > 0) return;
  keys -= panel * KEY_BYTES;

  // ---- its keys to shared memory; zeros past the end
  const unsigned char* const source =
      V + (packed ? 0 : sequence) * params.v.batch + head * params.v.head +
      (long long)(k_first + tile * BLOCK_N + panel * KEY_BYTES) * params.v.row + 16 * first_chunk;
  uint4 raw[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int row = (32 * i + lane_id) / UNIT_CHUNKS, c = (32 * i + lane_id) % UNIT_CHUNKS;
    const unsigned char* const from = source + row * params.v.row + 16 * c;
    raw[i] = row < keys && first_chunk + c < CHUNKS
                 ? __ldcs(reinterpret_cast<const uint4*>(from))  // nobody reads V again
                 : uint4{};
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int row = (32 * i + lane_id) / UNIT_CHUNKS, c = (32 * i + lane_id) % UNIT_CHUNKS;
    *reinterpret_cast<uint4*>(smem + raw_at(row, c)) = raw[i];
  }
  __syncwarp();  // hazard: keys of other lanes are not there yet

  // ---- 16 columns of 32 keys at a time, into the same place
  unsigned pairs[STEPS][4];
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    ldmatrix_x4_trans(
        pairs[i], smem_address(smem + raw_at(i / UNIT_CHUNKS * 32 + lane_id, i % UNIT_CHUNKS)));
  __syncwarp();  // hazard: other lanes still read what is overwritten
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const unsigned* const p = pairs[i];
    const int row = i % UNIT_CHUNKS * 16 + lane_id / 16 * 8 + lane_id % 8;
    const int chunk = i / UNIT_CHUNKS * 2 + lane_id / 8 % 2;
    stmatrix_x4(
        smem_address(smem) + row * KEY_BYTES + (chunk ^ chunk_xor<KEY_BYTES>(row)) * 16,
        __byte_perm(p[0], p[1], 0x6420), __byte_perm(p[2], p[3], 0x6420),
        __byte_perm(p[0], p[1], 0x7531), __byte_perm(p[2], p[3], 0x7531));
  }
  __syncwarp();  // hazard: rows of other lanes are not there yet

  // ---- its rows of the panel; behind the last of them a row of ones, and seven of zeros
  const long long v_tile = first_v_tile(
      BLOCK_N, head, params.kv_heads, sequence, k_first, params.N_kv, params.sequences);
  uint4* const out = reinterpret_cast<uint4*>(
      V_image + (v_tile + tile) * V8_BYTES + panel * PANEL8_BYTES + first_chunk * 16 * KEY_BYTES);
  const int chunks = min(CHUNKS - first_chunk, UNIT_CHUNKS);
#pragma unroll
  for (int i = lane_id; i < UNIT_BYTES / 16; i += 32)
    if (i < chunks * KEY_BYTES) out[i] = reinterpret_cast<const uint4*>(smem)[i];
  if (first_chunk + chunks < CHUNKS) return;
  for (int i = lane_id; i < 8 * KEY_BYTES / 16; i += 32) {
    const unsigned one = i < KEY_BYTES / 16 ? 0x38383838 : 0;  // 1.0 in e4m3, four times
    out[chunks * KEY_BYTES + i] = {one, one, one, one};
  }
}
