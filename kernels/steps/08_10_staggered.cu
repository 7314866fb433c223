// 08, step 10, staggered: half the warps compute dQ at the start of a step, the other half at its end.
//
// Since step 9: where P passes through shared memory, two halves of a block would otherwise do the same kind of work at
// the same time: products by tensor cores, then exponentials.
//
// Launch   backward_mma_preprocess and backward_mma_convert: grid (ceil(longest q_len / BLOCK_M), heads, sequences);
//          backward_mma: grid (ceil(longest kv_len / BLOCK_N), kv_heads, sequences) and SHARED_BYTES of dynamic shared
//          memory; block 32 WARPS for all three
// Shapes   Q, O, dO, dQ (batch, N, heads, HEAD_DIM), K, V, dK, dV (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens. lse
//          (batch, heads, N) or (heads, tokens). Scratch, for each head of Q and each tile of rows (see row_tiles):
//          statistics float[2 BLOCK_M], dQ_accum float[BLOCK_M DQ_COLUMNS]
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Spills   by NVRTC 12.9 for sm_90: 8 bytes at HEAD_DIM = 64, 12 at 128
// Traffic  K, V, dK, dV once; Q, dO and dQ_accum (read and written) once for each tile of keys that sees them
#include "backward_params.cuh"
#include "ptx.cuh"

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
#define WARPS_KEYS 4  // the warps along the keys of S^T and dP^T; the others are along its rows
#endif
#ifndef WARPS_DKV
#define WARPS_DKV 4  // the warps along the keys of dK and dV; the others are along the columns
#endif
#ifndef WARPS_DQ
#define WARPS_DQ 2  // the warps along the rows of dQ; the others are along the columns
#endif
#ifndef CHUNK
#define CHUNK 32  // rows of S^T that a warp has in registers at a time
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // per SM: what the compiler keeps registers free for
#endif
#ifndef VECTOR_ATOMICS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VECTOR_ATOMICS 1  // four floats in one instruction, from sm_90 on
#else
#define VECTOR_ATOMICS 0
#endif
#endif
#ifndef DQ_LATER
#define DQ_LATER 1  // 1: a tile of dQ is computed one step later, from a second buffer of dS; 0: less shared memory
#endif
#define POS_INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.4426950408889634f;

constexpr int THREADS = 32 * WARPS;
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // a row in shared memory, zeros up to whole fragments
constexpr int CHUNKS = HEAD_DIM_PADDED / 8;                 // of 16 bytes in a row of Q, K, V, dO
constexpr int ROW_CHUNKS = BLOCK_M / 8;                     // of 16 bytes in a row (a key) of P^T and dS^T
constexpr int COLUMN_BLOCKS = HEAD_DIM_PADDED / 16;         // columns 16 by 16, which warps take in turn
constexpr int WARPS_ROWS = WARPS / WARPS_KEYS, WARPS_DKV_D = WARPS / WARPS_DKV, WARPS_DQ_D = WARPS / WARPS_DQ;
constexpr int WARP_ROWS = BLOCK_M / WARPS_ROWS;                              // of S^T
constexpr int KEY_TILES = BLOCK_N / (16 * WARPS_KEYS);                       // MMA atoms of 16 keys, of S^T
constexpr int DKV_TILES = BLOCK_N / (16 * WARPS_DKV);                        // of dK and dV
constexpr int DKV_BLOCKS = (COLUMN_BLOCKS + WARPS_DKV_D - 1) / WARPS_DKV_D;  // 16 columns each
constexpr int DQ_TILES = BLOCK_M / (16 * WARPS_DQ);                          // MMA atoms of 16 rows
constexpr int DQ_BLOCKS = (COLUMN_BLOCKS + WARPS_DQ_D - 1) / WARPS_DQ_D;     // 16 columns each
constexpr int DQ_COLUMNS = 16 * WARPS_DQ_D * DQ_BLOCKS;                      // of dQ_accum
constexpr bool P_IN_REGISTERS = WARPS_KEYS == WARPS && WARPS_DKV == WARPS;   // and dS^T, for dV and dK
constexpr bool OWN_IN_REGISTERS = WARPS_KEYS == WARPS_DKV;  // of the scores that dV and dK need, those a warp computed
constexpr int GROUP_WARPS = WARPS_ROWS > WARPS_DKV_D ? WARPS_ROWS : WARPS_DKV_D;  // neighbours, with keys in common
constexpr bool STAGGERED = DQ_LATER && !P_IN_REGISTERS;  // half the warps compute dQ at the end of a step

constexpr unsigned KEYS_BYTES = 2 * BLOCK_N * HEAD_DIM_PADDED, ROWS_BYTES = 2 * BLOCK_M * HEAD_DIM_PADDED;
constexpr unsigned SCORES_BYTES = 2 * BLOCK_N * BLOCK_M, STATISTICS_BYTES = 8 * BLOCK_M;
constexpr unsigned SHARED_BYTES =
    2 * KEYS_BYTES + 4 * ROWS_BYTES + (1 + DQ_LATER + !P_IN_REGISTERS) * SCORES_BYTES + 2 * STATISTICS_BYTES;
static_assert(DQ_LATER || !P_IN_REGISTERS, "without a second buffer, P and dS pass through shared memory");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "rows are copied 16 bytes at a time");
static_assert(BLOCK_N % (16 * WARPS_KEYS) == 0 && BLOCK_N % (16 * WARPS_DKV) == 0, "a warp has whole fragments");
static_assert(
    WARP_ROWS % CHUNK == 0 && CHUNK % 16 == 0 && BLOCK_M % (16 * WARPS_DQ) == 0, "a warp has whole fragments");
static_assert((BLOCK_M & (BLOCK_M - 1)) == 0 && (WARPS & (WARPS - 1)) == 0, "offsets are added by exclusive or");
static_assert(THREADS >= BLOCK_M / 2, "each thread copies 16 bytes of the statistics at most");

template <int ROW>
constexpr int SWIZZLED = ROW % 8 == 0   ? 8
                         : ROW % 4 == 0 ? 4
                                        : 2;  // chunks of a row that the swizzle permutes
constexpr int SWIZZLE_CHUNKS = SWIZZLED<CHUNKS>;
static_assert(THREADS / SWIZZLE_CHUNKS % 8 == 0, "a thread's rows must be multiples of 8 apart to share one swizzle");

// The byte offset of a chunk of 16 bytes in a tile whose rows have ROW of them. ldmatrix reads the same chunk of eight
// neighbouring rows: the exclusive or puts these eight in different banks.
template <int ROW>
__device__ __forceinline__ unsigned swizzle(unsigned row, unsigned chunk) {
  constexpr unsigned S = SWIZZLED<ROW>;
  return 16 * (row * ROW + chunk / S * S + (chunk % S ^ row / (8 / S) % S));
}

// The same row, so many chunks further. Because tiles start at multiples of 128 bytes, and no bit is set both in the
// chunk at `address` and in `chunks`, that is an exclusive or of addresses.
template <int ROW>
__device__ __forceinline__ unsigned advance(unsigned address, unsigned chunks) {
  constexpr unsigned WIDTH = 16 * SWIZZLED<ROW>;
  return (address ^ 16 * chunks % WIDTH) + 16 * chunks / WIDTH * WIDTH;
}

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ float2 unpack(__half, unsigned both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

__device__ __forceinline__ float2 unpack(__nv_bfloat16, unsigned both) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
}

// This thread's share of a tile. SWIZZLE_CHUNKS threads copy a row: `target` and `source` are the thread's first chunk,
// rows_left is how many rows there are from there on. What is past the end becomes zeros.
template <int TILE_ROWS, typename T>
__device__ __forceinline__ void load_tile(
    unsigned target, const T* __restrict__ source, long long stride, int rows_left) {
  constexpr int STEP = THREADS / SWIZZLE_CHUNKS;  // a multiple of 8, so that the swizzle stays as it is
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i += STEP, source += STEP * stride) {
    if (i + STEP > TILE_ROWS && i + threadIdx.x / SWIZZLE_CHUNKS >= TILE_ROWS) break;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += SWIZZLE_CHUNKS) {
      const bool in_bounds = i < rows_left && 8 * (threadIdx.x % SWIZZLE_CHUNKS + j) < HEAD_DIM;
      cp_async(target + 16 * (i * CHUNKS + j), source + 8 * j, in_bounds ? 16 : 0);
    }
  }
}

// acc += A B^T, over HEAD_DIM: a_lane is in a tile of keys, b_lane in a tile of rows.
template <typename T>
__device__ __forceinline__ void gemm_abt(float (&acc)[KEY_TILES][CHUNK / 8][4], unsigned a_lane, unsigned b_lane) {
#pragma unroll
  for (int k = 0; k < COLUMN_BLOCKS; ++k) {
    unsigned a[KEY_TILES][4];
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m) ldmatrix_x4(a[m], advance<CHUNKS>(a_lane, 2 * k) + 32 * m * HEAD_DIM_PADDED);
#pragma unroll
    for (int n = 0; n < CHUNK / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, advance<CHUNKS>(b_lane, 2 * k) + 32 * n * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < KEY_TILES; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += A B, over 16 K keys or rows. load_a(a, m, k) gives fragments of A; b_lane is in a tile of Q, K or dO, in the
// first of this warp's blocks of 16 columns. It has each STRIDE-th of them: `blocks` in all, BLOCKS at most.
template <int M, int BLOCKS, int K, int STRIDE, typename T, typename LoadA>
__device__ __forceinline__ void gemm_ab(
    T, float (&acc)[M][2 * BLOCKS][4], const LoadA& load_a, unsigned b_lane, int blocks) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_a(a[m], m, k);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
      if (COLUMN_BLOCKS % STRIDE != 0 && n >= blocks) break;
      unsigned b[4];
      ldmatrix_x4_trans(b, advance<CHUNKS>(b_lane, 2 * n * STRIDE) + 32 * k * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Four floats of dQ_accum. They are in the order of the fragments: neighbouring lanes have neighbouring addresses.
__device__ __forceinline__ void atomic_add(float* dQ_accum, int fragment, const float (&d)[4]) {
  const int lane_id = threadIdx.x % 32;
#if VECTOR_ATOMICS
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dQ_accum + 128 * fragment + 4 * lane_id),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(dQ_accum + 128 * fragment + 32 * i + lane_id, d[i]);
#endif
}

// Where a sequence's tiles of rows begin in the scratch arrays of a head, and how many tiles a head has.
struct RowTiles {
  int first, of_head;
};

__device__ __forceinline__ RowTiles row_tiles(bool packed, int q_first, int sequence, int N) {
  const int tiles = (N + BLOCK_M - 1) / BLOCK_M;
  if (!packed) return {sequence * tiles, (int)gridDim.z * tiles};
  return {q_first / BLOCK_M + sequence, N / BLOCK_M + (int)gridDim.z};
}

// statistics: for each tile of rows, the log-sum-exp in units of log2 and then D = rowsum(dO O). dQ_accum becomes zero.
template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_preprocess(
    const T* __restrict__ O, const T* __restrict__ dO, const float* __restrict__ lse, float* __restrict__ statistics,
    float* __restrict__ dQ_accum, const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- statistics of a tile of rows
  const AttentionParams& forward = params.forward;
  const int head = blockIdx.y, sequence = blockIdx.z, first_row = blockIdx.x * BLOCK_M;
  const bool packed = cu_seqlens_q != nullptr;
  const int q_first = packed ? cu_seqlens_q[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
  const RowTiles tiles = row_tiles(packed, q_first, sequence, forward.N);
  if (first_row >= q_len) return;
  const long long slot = (long long)head * tiles.of_head + tiles.first + blockIdx.x;
  O += sequence * forward.o.batch + (q_first + first_row) * forward.o.row + head * forward.o.head;
  dO += sequence * params.d_o.batch + (q_first + first_row) * params.d_o.row + head * params.d_o.head;
  lse += ((long long)(packed ? 0 : sequence) * forward.heads + head) * forward.N + q_first + first_row;
  statistics += slot * 2 * BLOCK_M;
  dQ_accum += slot * BLOCK_M * DQ_COLUMNS;
  for (int i = threadIdx.x; i < BLOCK_M * DQ_COLUMNS / 4; i += THREADS)
    reinterpret_cast<float4*>(dQ_accum)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  constexpr int LANES = 8;  // of a row
#pragma unroll
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += THREADS / LANES) {
    const bool exists = first_row + row < q_len;
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
      const float l = exists ? lse[row] : -POS_INF;
      statistics[row] = l == -POS_INF ? POS_INF : l * LOG2_E;  // a row that sees no key: its weights are exp(-inf) = 0
      statistics[BLOCK_M + row] = sum;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_mma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, const T* __restrict__ dO,
    const float* __restrict__ statistics, float* __restrict__ dQ_accum, T* __restrict__ dK, T* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each sequence of Q begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params) {
  // ---- prologue: the keys of this block, and the tiles of rows that see one of them
  const AttentionParams& forward = params.forward;
  // Causal masks: longest-first order. The first keys are seen by the most rows, so their tiles, of all heads, start
  // first. Otherwise a head's tiles are neighbours.
  int tile = blockIdx.x, kv_head = blockIdx.y, sequence = blockIdx.z;
  const bool packed = cu_seqlens_q != nullptr;
  if (forward.window_right < UNLIMITED) {
    const unsigned heads = gridDim.y * gridDim.z;
    const unsigned block = tile + gridDim.x * (kv_head + gridDim.y * sequence);
    tile = block / heads, kv_head = block % heads % gridDim.y, sequence = block % heads / gridDim.y;
  }
  const int first_key = tile * BLOCK_N, group = forward.heads / forward.kv_heads;
  const int q_first = packed ? cu_seqlens_q[sequence] : 0, k_first = packed ? cu_seqlens_k[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
  const int kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
  if (first_key >= kv_len) return;  // the whole block, before any barrier: its sequence is shorter than the longest
  Q += sequence * forward.q.batch + q_first * forward.q.row + kv_head * group * forward.q.head;
  dO += sequence * params.d_o.batch + q_first * params.d_o.row + kv_head * group * params.d_o.head;
  K += sequence * forward.k.batch + (k_first + first_key) * forward.k.row + kv_head * forward.k.head;
  V += sequence * forward.v.batch + (k_first + first_key) * forward.v.row + kv_head * forward.v.head;
  dK += sequence * params.d_k.batch + (k_first + first_key) * params.d_k.row + kv_head * params.d_k.head;
  dV += sequence * params.d_v.batch + (k_first + first_key) * params.d_v.row + kv_head * params.d_v.head;

  // Row i sees keys i + lowest .. i + highest.
  const int lowest = kv_len - q_len - forward.window_left, highest = kv_len - q_len + forward.window_right;
  const int last_key = min(first_key + BLOCK_N, kv_len) - 1;
  const int first_tile = max(first_key - highest, 0) / BLOCK_M;
  const int last_tile = (min(last_key - lowest, q_len - 1) + BLOCK_M) / BLOCK_M - 1;
  const RowTiles tiles = row_tiles(packed, q_first, sequence, forward.N);
  const long long first_slot = (long long)kv_head * group * tiles.of_head + tiles.first;
  statistics += first_slot * (2 * BLOCK_M);
  dQ_accum += first_slot * (BLOCK_M * DQ_COLUMNS);

  // Each lane passes the address of one row to ldmatrix; *_lane is its address in the warp's first fragment.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned K_smem = smem_address(dynamic_smem), V_smem = K_smem + KEYS_BYTES, Q_smem = V_smem + KEYS_BYTES;
  constexpr unsigned STAGE = 2 * ROWS_BYTES;  // Q and dO; there are two of each
  const unsigned dS_smem = Q_smem + 2 * STAGE, P_smem = dS_smem + (1 + DQ_LATER) * SCORES_BYTES;
  const unsigned statistics_smem = P_smem + !P_IN_REGISTERS * SCORES_BYTES;
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_key = warp / WARPS_ROWS * 16 * KEY_TILES, warp_row = warp % WARPS_ROWS * WARP_ROWS;  // of S^T
  const int dkv_key = warp / WARPS_DKV_D * 16 * DKV_TILES, dkv_block = warp % WARPS_DKV_D;
  const int dq_row = warp % WARPS_DQ * 16 * DQ_TILES, dq_block = warp / WARPS_DQ;
  const int dkv_blocks = (COLUMN_BLOCKS - dkv_block + WARPS_DKV_D - 1) / WARPS_DKV_D;
  const int dq_blocks = (COLUMN_BLOCKS - dq_block + WARPS_DQ_D - 1) / WARPS_DQ_D;
  const unsigned k_lane = K_smem + swizzle<CHUNKS>(warp_key + lane_id % 16, lane_id / 16);  // A of S^T
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(warp_row + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);  // B
  const unsigned scores_lane = swizzle<ROW_CHUNKS>(warp_key + g, warp_row / 8) + 4 * t;  // P^T and dS^T are written
  const unsigned q_dkv = Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * dkv_block);  // B, with dO
  const unsigned dS_dq =
      dS_smem + swizzle<ROW_CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 + dq_row / 8);  // A of dQ
  const unsigned k_dq = K_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * dq_block);        // B

  const int copy_row = threadIdx.x / SWIZZLE_CHUNKS, copy_chunk = threadIdx.x % SWIZZLE_CHUNKS;  // this thread copies
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  Q += copy_row * forward.q.row + 8 * copy_chunk;
  dO += copy_row * params.d_o.row + 8 * copy_chunk;
  const auto load_q = [&](int head, int row_tile, unsigned stage) {
    const int row = row_tile * BLOCK_M;
    load_tile<BLOCK_M>(
        Q_smem + stage * STAGE + copy_offset, Q + head * forward.q.head + row * forward.q.row, forward.q.row,
        q_len - row - copy_row);
    if (threadIdx.x < BLOCK_M / 2)
      cp_async(
          statistics_smem + stage * STATISTICS_BYTES + 16 * threadIdx.x,
          statistics + (head * tiles.of_head + row_tile) * (2 * BLOCK_M) + 4 * threadIdx.x, 16);
  };
  const auto load_do = [&](int head, int row_tile, unsigned stage) {
    const int row = row_tile * BLOCK_M;
    load_tile<BLOCK_M>(
        Q_smem + stage * STAGE + ROWS_BYTES + copy_offset, dO + head * params.d_o.head + row * params.d_o.row,
        params.d_o.row, q_len - row - copy_row);
    cp_async_commit();
  };
  const auto load_rows = [&](int head, int row_tile, unsigned stage) {
    load_q(head, row_tile, stage);
    load_do(head, row_tile, stage);
  };

  float dK_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {}, dV_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {};
  const float softmax_scale_log2 = forward.softmax_scale * LOG2_E;

  // dQ += dS K for one tile of rows.
  const auto add_dq = [&](int slot, unsigned dS_lane) {
    float dQ_acc[DQ_TILES][2 * DQ_BLOCKS][4] = {};
    gemm_ab<DQ_TILES, DQ_BLOCKS, BLOCK_N / 16, WARPS_DQ_D>(
        T(), dQ_acc,
        [&](unsigned (&a)[4], int m, int k) {
          ldmatrix_x4_trans(a, advance<ROW_CHUNKS>(dS_lane, 2 * m) + 32 * k * BLOCK_M);
        },
        k_dq, dq_blocks);
    float* const target = dQ_accum + (long long)slot * (BLOCK_M * DQ_COLUMNS);
#pragma unroll
    for (int m = 0; m < DQ_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 2 * DQ_BLOCKS; ++n)
        if (COLUMN_BLOCKS % WARPS_DQ_D == 0 || n / 2 < dq_blocks)
          atomic_add(target, (warp * DQ_TILES + m) * 2 * DQ_BLOCKS + n, dQ_acc[m][n]);
  };

  load_tile<BLOCK_N>(
      K_smem + copy_offset, K + copy_row * forward.k.row + 8 * copy_chunk, forward.k.row,
      kv_len - first_key - copy_row);
  if (first_tile <= last_tile) load_q(0, last_tile, 0);
  load_tile<BLOCK_N>(
      V_smem + copy_offset, V + copy_row * forward.v.row + 8 * copy_chunk, forward.v.row,
      kv_len - first_key - copy_row);
  if (first_tile <= last_tile) load_do(0, last_tile, 0);
  else cp_async_commit();  // no row sees these keys; the epilogue waits for K and V all the same

  // ---- all heads of the group, and their tiles of rows from the last to the first
  unsigned stage = 0;
  int previous = -1;  // where the last step's dQ is to be added
  for (int head = 0, row_tile = last_tile; first_tile <= last_tile && head < group; stage ^= 1) {
    const int slot = head * tiles.of_head + row_tile;
    const int first_row = row_tile * BLOCK_M;
    const int next_tile = row_tile > first_tile ? row_tile - 1 : last_tile;
    const int next_head = row_tile > first_tile ? head : head + 1;
    cp_async_wait<0>();
    __syncthreads();  // hazard: tiles are read before the others' copies have arrived; those in use are replaced
    if (next_head < group) load_rows(next_head, next_tile, stage ^ 1);

    // DQ_LATER: dS has two buffers. The last step's is read here while this step's is written.
    const unsigned dS_stage = DQ_LATER ? stage * SCORES_BYTES : 0;
    const bool dq_first = !STAGGERED || warp < WARPS / 2;
    if (DQ_LATER && previous >= 0 && dq_first) add_dq(previous, dS_dq + (SCORES_BYTES ^ dS_stage));

    const unsigned rows = stage * STAGE;
    const bool masked =
        first_key + BLOCK_N > min(first_row + highest + 1, kv_len) || first_key < first_row + BLOCK_M - 1 + lowest;
    const float* const own_statistics =
        reinterpret_cast<const float*>(dynamic_smem + (statistics_smem - K_smem) + stage * STATISTICS_BYTES);
#pragma unroll
    for (int c = 0; c < WARP_ROWS / CHUNK; ++c) {
      float S[KEY_TILES][CHUNK / 8][4] = {}, dP[KEY_TILES][CHUNK / 8][4];
      gemm_abt<T>(S, k_lane, q_lane + rows + 2 * c * CHUNK * HEAD_DIM_PADDED);
#pragma unroll
      for (int n = 0; n < CHUNK / 8; ++n) {
        const float2* const own =
            reinterpret_cast<const float2*>(own_statistics + warp_row + c * CHUNK + 8 * n + 2 * t);
        const float2 l = own[0], D = own[BLOCK_M / 2];
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            S[m][n][i] = exp2f(fmaf(S[m][n][i], softmax_scale_log2, i % 2 ? -l.y : -l.x));
            dP[m][n][i] = i % 2 ? -D.y : -D.x;  // so that the product adds to -D
          }
      }
      if (masked) {  // a key that a row does not see has the weight 0
        const int key = first_key + warp_key + g, row = first_row + warp_row + c * CHUNK + 2 * t;
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
          for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int j = key + 16 * m + i / 2 * 8, distance = j - (row + 8 * n + i % 2);
              if (distance < lowest || distance > highest || j >= kv_len) S[m][n][i] = 0.0f;
            }
      }
      gemm_abt<T>(dP, k_lane + KEYS_BYTES, q_lane + rows + ROWS_BYTES + 2 * c * CHUNK * HEAD_DIM_PADDED);

      // Accumulators of 2 x 8 rows have the layout that the left operand of 16 rows needs: only the width changes.
      unsigned P_half[KEY_TILES][CHUNK / 16][4], dS_half[KEY_TILES][CHUNK / 16][4];
#pragma unroll
      for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* const p = &S[m][2 * k + i / 2][i % 2 * 2];
            const float* const dp = &dP[m][2 * k + i / 2][i % 2 * 2];
            P_half[m][k][i] = pack(T(), p[0], p[1]);
            dS_half[m][k][i] = pack(T(), p[0] * dp[0], p[1] * dp[1]);
            const unsigned place =
                advance<ROW_CHUNKS>(scores_lane, c * (CHUNK / 8) + 2 * k + i / 2) + 2 * (16 * m + i % 2 * 8) * BLOCK_M;
            *reinterpret_cast<unsigned*>(dynamic_smem + (dS_smem - K_smem) + place + dS_stage) = dS_half[m][k][i];
            if (!P_IN_REGISTERS)
              *reinterpret_cast<unsigned*>(dynamic_smem + (P_smem - K_smem) + place) = P_half[m][k][i];
          }
      if constexpr (OWN_IN_REGISTERS) {  // dV and dK, from the rows of this warp
        const auto from = [](const unsigned (&half)[KEY_TILES][CHUNK / 16][4]) {
          return [&half](unsigned (&a)[4], int m, int k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = half[m][k][i];
          };
        };
        const unsigned b_lane = q_dkv + rows + 2 * (warp_row + c * CHUNK) * HEAD_DIM_PADDED;
        gemm_ab<DKV_TILES, DKV_BLOCKS, CHUNK / 16, WARPS_DKV_D>(
            T(), dV_acc, from(P_half), b_lane + ROWS_BYTES, dkv_blocks);
        gemm_ab<DKV_TILES, DKV_BLOCKS, CHUNK / 16, WARPS_DKV_D>(T(), dK_acc, from(dS_half), b_lane, dkv_blocks);
      }
    }

    if constexpr (!P_IN_REGISTERS) {  // dV and dK, from the rows of the other warps
      if (DQ_LATER) {  // hazard: P and dS are read before the other warps with these keys have written theirs
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / GROUP_WARPS), "n"(32 * GROUP_WARPS) : "memory");
      } else {
        __syncthreads();  // hazard: dS is read before all warps have written theirs
      }
#pragma unroll
      for (int r = OWN_IN_REGISTERS; r < WARPS_ROWS; ++r) {
        const int row = warp_row ^ r * WARP_ROWS;
        const unsigned a_lane = swizzle<ROW_CHUNKS>(dkv_key + lane_id % 16, lane_id / 16 + row / 8);
        const unsigned b_lane = q_dkv + rows + 2 * row * HEAD_DIM_PADDED;
        const auto from = [&](unsigned tile_smem) {
          return [=](unsigned (&a)[4], int m, int k) {
            ldmatrix_x4(a, advance<ROW_CHUNKS>(tile_smem + a_lane, 2 * k) + 32 * m * BLOCK_M);
          };
        };
        gemm_ab<DKV_TILES, DKV_BLOCKS, WARP_ROWS / 16, WARPS_DKV_D>(
            T(), dV_acc, from(P_smem), b_lane + ROWS_BYTES, dkv_blocks);
        gemm_ab<DKV_TILES, DKV_BLOCKS, WARP_ROWS / 16, WARPS_DKV_D>(
            T(), dK_acc, from(dS_smem + dS_stage), b_lane, dkv_blocks);
      }
      if (!DQ_LATER) add_dq(slot, dS_dq);
    }
    if (DQ_LATER && previous >= 0 && !dq_first) add_dq(previous, dS_dq + (SCORES_BYTES ^ dS_stage));
    previous = slot;
    head = next_head, row_tile = next_tile;
  }
  if (DQ_LATER && previous >= 0) {
    __syncthreads();  // hazard: dS is read before the other warps have written theirs
    add_dq(previous, dS_dq + (stage ^ 1) * SCORES_BYTES);
  }

  // ---- epilogue: a lane has two neighbouring columns of its rows
  cp_async_wait<0>();  // where no row sees these keys, nobody has waited for K and V
  dK += (dkv_key + g) * params.d_k.row + 16 * dkv_block + 2 * t;
  dV += (dkv_key + g) * params.d_v.row + 16 * dkv_block + 2 * t;
#pragma unroll
  for (int m = 0; m < DKV_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2 * DKV_BLOCKS; ++n) {
      const int column = 16 * (n / 2) * WARPS_DKV_D + 8 * (n % 2);
      if (16 * dkv_block + column >= HEAD_DIM) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *x = &dK_acc[m][n][2 * h], *y = &dV_acc[m][n][2 * h];
        const int key = 16 * m + 8 * h;
        if (first_key + dkv_key + g + key >= kv_len) continue;
        *reinterpret_cast<unsigned*>(dK + key * params.d_k.row + column) =
            pack(T(), x[0] * forward.softmax_scale, x[1] * forward.softmax_scale);
        *reinterpret_cast<unsigned*>(dV + key * params.d_v.row + column) = pack(T(), y[0], y[1]);
      }
    }
}

// dQ = softmax_scale dQ_accum, in rows again.
template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_convert(
    const float* __restrict__ dQ_accum, T* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const BackwardParams params) {
  // ---- dQ: from the order of the fragments to rows
  const AttentionParams& forward = params.forward;
  const int head = blockIdx.y, sequence = blockIdx.z, first_row = blockIdx.x * BLOCK_M;
  const bool packed = cu_seqlens_q != nullptr;
  const int q_first = packed ? cu_seqlens_q[sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
  if (first_row >= q_len) return;
  const RowTiles tiles = row_tiles(packed, q_first, sequence, forward.N);
  dQ += sequence * params.d_q.batch + (q_first + first_row) * params.d_q.row + head * params.d_q.head;
  dQ_accum += ((long long)head * tiles.of_head + tiles.first + blockIdx.x) * BLOCK_M * DQ_COLUMNS;
  // A thread has 8 columns of two rows, 8 apart: the elements of four lanes of a fragment.
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK_M / 2 * (HEAD_DIM / 8); i += THREADS) {
    const int chunk = i % (HEAD_DIM / 8), g = i / (HEAD_DIM / 8) % 8, band = i / (HEAD_DIM / 8) / 8;
    const int row = 16 * band + g, block = chunk / 2;
    const int warp = band / DQ_TILES + WARPS_DQ * (block % WARPS_DQ_D), m = band % DQ_TILES;
    const int fragment = (warp * DQ_TILES + m) * 2 * DQ_BLOCKS + block / WARPS_DQ_D * 2 + chunk % 2;
    float x[4][4];  // of lane t and element i, or of i and t
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float4*>(x[j]) =
          reinterpret_cast<const float4*>(dQ_accum)[32 * fragment + (VECTOR_ATOMICS ? 4 * g + j : 8 * j + g)];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned out[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float a = VECTOR_ATOMICS ? x[t][2 * h] : x[2 * h][t],
                    b = VECTOR_ATOMICS ? x[t][2 * h + 1] : x[2 * h + 1][t];
        out[t] = pack(T(), a * forward.softmax_scale, b * forward.softmax_scale);
      }
      if (first_row + row + 8 * h < q_len)
        *reinterpret_cast<uint4*>(dQ + (row + 8 * h) * params.d_q.row + 8 * chunk) =
            make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}
