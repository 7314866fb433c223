// What 08_backward_mma.cu and its steps have in common: the sizes of tiles, which keys and rows a
// block has, which part of each product a warp has, the copies of tiles and the products of a warp.
// The pieces are those of 05 and 07, applied to five products; notebook 08 explains how the work is
// divided. P is computed again from the log-sum-exp that the forward pass left: no maximum, no sum.
//   S^T = K Q^T   dP^T = V dO^T   P^T = exp(S^T - lse)   dS^T = P^T (dP^T - delta)
//   dV += P^T dO   dK += dS^T Q   dQ += dS K   where delta = rowsum(dO O)
//
// Launch   backward_mma_preprocess and backward_mma_convert: grid (ceil(longest q_len / BLOCK_M),
//          heads, sequences); backward_mma: grid (ceil(longest kv_len / BLOCK_N), kv_heads,
//          sequences) and SHARED_BYTES of dynamic shared memory; block 32 WARPS for all three
// Shapes   Q, O, dO, dQ (batch, N, heads, HEAD_DIM), K, V, dK, dV (batch, N_kv, kv_heads,
//          HEAD_DIM), float16 or bfloat16, strides in elements, rows contiguous; packed: (tokens,
//          heads, HEAD_DIM) with cu_seqlens. lse (batch, heads, N) or (heads, tokens). Scratch, for
//          each head of Q and each tile of rows (see row_tiles): lse_delta float[2 BLOCK_M],
//          dQ_accum float[BLOCK_M DQ_COLUMNS], dq_semaphore int; one more int in the last
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  K, V, dK, dV once; Q, dO and dQ_accum (read and written) once for each tile of keys that
//          they see

#pragma once
#include "ptx.cuh"
#include "swizzle.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 128  // B_c, keys per block
#endif
#ifndef WARPS
#define WARPS 8  // per block
#endif
#ifndef WARPS_KEYS
#define WARPS_KEYS 4  // the warps along the keys of S and dP; the others are along its rows
#endif
#ifndef WARPS_DKV
#define WARPS_DKV 4  // the warps along the keys of dK and dV; the others are along the columns
#endif
#ifndef WARPS_DQ
#define WARPS_DQ 2  // the warps along the rows of dQ; the others are along the columns
#endif
#ifndef SLICE_M
#define SLICE_M 32  // rows of S that a warp has in registers at a time
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // per SM: what the compiler keeps registers free for
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int HEAD_DIM_PADDED =
    (HEAD_DIM + 15) / 16 * 16;               // a row in shared memory, zeros up to whole fragments
constexpr int CHUNKS = HEAD_DIM_PADDED / 8;  // of 16 bytes in a row of Q, K, V, dO
constexpr int ROW_CHUNKS = BLOCK_M / 8;      // of 16 bytes in a row (a key) of P^T and dS^T
constexpr int KEY_CHUNKS = BLOCK_N / 8;      // of 16 bytes in a row of P and dS
constexpr int COLUMN_BLOCKS = HEAD_DIM_PADDED / 16;  // columns 16 by 16, which warps take in turn
constexpr int WARPS_ROWS = WARPS / WARPS_KEYS, WARPS_DKV_D = WARPS / WARPS_DKV,
              WARPS_DQ_D = WARPS / WARPS_DQ;
constexpr int WARP_ROWS = BLOCK_M / WARPS_ROWS;         // of S
constexpr int KEY_TILES = BLOCK_N / (16 * WARPS_KEYS);  // MMA atoms of 16 keys, of S
constexpr int DKV_TILES = BLOCK_N / (16 * WARPS_DKV);   // of dK and dV
constexpr int DKV_BLOCKS = (COLUMN_BLOCKS + WARPS_DKV_D - 1) / WARPS_DKV_D;  // 16 columns each
constexpr int DQ_TILES = BLOCK_M / (16 * WARPS_DQ);                          // MMA atoms of 16 rows
constexpr int DQ_BLOCKS = (COLUMN_BLOCKS + WARPS_DQ_D - 1) / WARPS_DQ_D;     // 16 columns each
constexpr int DQ_COLUMNS = 16 * WARPS_DQ_D * DQ_BLOCKS;                      // of dQ_accum
constexpr unsigned KEYS_BYTES = 2 * BLOCK_N * HEAD_DIM_PADDED,
                   ROWS_BYTES = 2 * BLOCK_M * HEAD_DIM_PADDED;
constexpr unsigned STAGE_BYTES = 2 * ROWS_BYTES;  // Q and dO
constexpr unsigned SCORES_BYTES = 2 * BLOCK_N * BLOCK_M, LSE_DELTA_BYTES = 8 * BLOCK_M;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "rows are copied 16 bytes at a time");
static_assert(
    BLOCK_N % (16 * WARPS_KEYS) == 0 && BLOCK_N % (16 * WARPS_DKV) == 0,
    "a warp has whole fragments");
static_assert(
    WARP_ROWS % SLICE_M == 0 && SLICE_M % 16 == 0 && BLOCK_M % (16 * WARPS_DQ) == 0,
    "a warp has whole fragments");
static_assert(
    (BLOCK_M & (BLOCK_M - 1)) == 0 && (BLOCK_N & (BLOCK_N - 1)) == 0 && (WARPS & (WARPS - 1)) == 0,
    "offsets are added by exclusive or");
static_assert(THREADS >= BLOCK_M / 2, "each thread copies 16 bytes of lse and delta at most");

#include "backward_blocks.cuh"
#include "backward_preprocess.cuh"

// ---- what a warp has

// Which part of each product a warp has, and which of its fragments' elements a lane: g and t as in
// ptx.cuh.
struct Warp {
  int id, lane_id, g, t;
  int key, row;  // the first of S
  int dkv_key, dkv_block,
      dkv_blocks;  // the first key of dK and dV; the first of its 16-column blocks, and how many
  int dq_row, dq_block, dq_blocks;  // the same of dQ, with rows for keys

  __device__ __forceinline__ Warp() {
    lane_id = threadIdx.x % 32;
    id = threadIdx.x / 32;
    g = lane_id / 4;
    t = lane_id % 4;
    key = id / WARPS_ROWS * 16 * KEY_TILES;
    row = id % WARPS_ROWS * WARP_ROWS;
    dkv_key = id / WARPS_DKV_D * 16 * DKV_TILES;
    dkv_block = id % WARPS_DKV_D;
    dkv_blocks = (COLUMN_BLOCKS - dkv_block + WARPS_DKV_D - 1) / WARPS_DKV_D;
    dq_row = id % WARPS_DQ * 16 * DQ_TILES;
    dq_block = id / WARPS_DQ;
    dq_blocks = (COLUMN_BLOCKS - dq_block + WARPS_DQ_D - 1) / WARPS_DQ_D;
  }
};

// ---- copies

#include "load_tile.cuh"

// Threads that copy a row, which is also how far the swizzle reaches.
constexpr int COPY_CHUNKS = SWIZZLE_SPAN<CHUNKS>;

// Stores a pair of 2-byte floats at a byte offset in a tile in shared memory.
__device__ __forceinline__ void store_pair(unsigned char* tile, unsigned offset, unsigned pair) {
  *reinterpret_cast<unsigned*>(tile + offset) = pair;
}

// ---- products of a warp

// acc += A B^T, over HEAD_DIM. Both lanes are in tiles of Q, K, V or dO.
template <typename T, int M, int N>
__device__ __forceinline__ void gemm_abt(
    T, float (&acc)[M][N][4], unsigned a_lane, unsigned b_lane) {
#pragma unroll
  for (int k = 0; k < COLUMN_BLOCKS; ++k) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
      ldmatrix_x4(a[m], swizzle_advance<CHUNKS>(a_lane, 2 * k) + 32 * m * HEAD_DIM_PADDED);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, swizzle_advance<CHUNKS>(b_lane, 2 * k) + 32 * n * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Fragments of A for gemm_ab from a tile of P or dS in shared memory, whose rows have ROW chunks.
// `lane` is this lane's address in the first one.
template <int ROW>
struct FromTile {
  unsigned lane;
  __device__ __forceinline__ void operator()(unsigned (&a)[4], int m, int k) const {
    ldmatrix_x4(a, swizzle_advance<ROW>(lane, 2 * k) + 256 * m * ROW);
  }
};
// The same where the tile is A^T.
template <int ROW>
struct FromTransposedTile {
  unsigned lane;
  __device__ __forceinline__ void operator()(unsigned (&a)[4], int m, int k) const {
    ldmatrix_x4_trans(a, swizzle_advance<ROW>(lane, 2 * m) + 256 * k * ROW);
  }
};

// Pair i of fragment k of a left operand, from accumulators of 16 rows: two of 16 x 8 have the
// layout that an operand of 16 x 16 needs, as in 07, so only the width of the elements changes.
template <int N>
__device__ __forceinline__ float2 operand_pair(const float (&acc)[N][4], int k, int i) {
  const float* const pair = &acc[2 * k + i / 2][i % 2 * 2];
  return make_float2(pair[0], pair[1]);
}
// Fragments of A for gemm_ab that are in registers.
template <int M, int K_STEPS>
struct FromRegisters {
  const unsigned (&half)[M][K_STEPS][4];
  __device__ __forceinline__ void operator()(unsigned (&a)[4], int m, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = half[m][k][i];
  }
};

// acc += A B, over 16 K_STEPS keys or rows. load_a(a, m, k) gives fragments of A; b_lane is in a
// tile of Q, K or dO, in the first of this warp's blocks of 16 columns. It has each STRIDE-th of
// them: `blocks` in all, N / 2 at most.
template <int K_STEPS, int STRIDE, typename T, int M, int N, typename LoadA>
__device__ __forceinline__ void gemm_ab(
    T, float (&acc)[M][N][4], const LoadA& load_a, unsigned b_lane, int blocks) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_a(a[m], m, k);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      if (COLUMN_BLOCKS % STRIDE != 0 && n >= blocks) break;
      unsigned b[4];
      ldmatrix_x4_trans(
          b, swizzle_advance<CHUNKS>(b_lane, 2 * n * STRIDE) + 32 * k * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
