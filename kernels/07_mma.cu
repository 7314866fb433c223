// 07 FlashAttention-2 on tensor cores: P is born in the registers in which the next product wants it.
//
// Since 06: mma.sync in place of WMMA. Where its fragments lie is documented, so a lane knows the row and the key of
// each of its numbers: masks, maxima and rescaling stay in registers, and the accumulators of S, packed to half the
// width, are the left operand of P V (Dao, 2023). cp.async brings the next tile while this one is used; tiles are
// swizzled, so that ldmatrix meets no bank conflict; a warp has 32 rows, so that a fragment of K or V serves twice.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 32 WARPS, 2 ROW (BLOCK_M + 4
//          BLOCK_N) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or bfloat16, strides in
//          elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens. lse (batch, heads, N) or
//          (heads, tokens)
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Asks for Q and O once; K and V: for each tile of rows, the tiles of which some row sees a key
#include "attention_params.cuh"
#include "ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block
#endif
#ifndef BLOCK_N
#define BLOCK_N 64  // B_c, keys per tile
#endif
#ifndef WARPS
#define WARPS 4  // per block; each has BLOCK_M / WARPS of its rows
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // per SM: what the compiler keeps registers free for
#endif
#define THREADS (32 * WARPS)
#define TILES_M (BLOCK_M / (16 * WARPS))  // 16-row tiles of a warp
#define ROW ((HEAD_DIM + 15) / 16 * 16)   // a row in shared memory, filled with zeros to whole fragments
#define CHUNKS (ROW / 8)                  // 16 bytes each: what cp.async copies and what ldmatrix reads
#define SPAN (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)  // neighbouring chunks that the swizzle mixes
#define RAISE 8.0f                          // m_i follows a row's maximum when it is left behind by more than 2^RAISE
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC knows no INFINITY
#define LOG2_E 1.4426950408889634f
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "rows move in pieces of 16 bytes; acc must fit the registers");
static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "a warp has whole fragments");
static_assert(THREADS / SPAN % 8 == 0, "threads copy every eighth row, or the swizzle would change from row to row");

using Statistics = float[TILES_M][2];           // per row of this thread: g and g + 8 of each 16-row tile
using Scores = float[TILES_M][BLOCK_N / 8][4];  // accumulators of S: 16 rows and 8 keys each
using Output = float[TILES_M][ROW / 8][4];

// Where a chunk lies in its tile, in bytes. ldmatrix reads the same chunk of eight neighbouring rows: the exclusive or
// puts these eight in different banks.
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk) {
  return 16 * (row * CHUNKS + chunk / SPAN * SPAN + (chunk % SPAN ^ row / (8 / SPAN) % SPAN));
}

// The same row, 16 k elements further. As tiles start at multiples of 128 bytes, that is an exclusive or of addresses:
// one instruction, and often none.
__device__ __forceinline__ unsigned along(unsigned address, unsigned k) {
  constexpr unsigned WIDTH = 16 * SPAN;
  return (address ^ 32 * k % WIDTH) + 32 * k / WIDTH * WIDTH;
}

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

// This thread's share of a tile of ROWS rows. SPAN threads copy a row: from and to are the thread's first piece of 16
// bytes, left is how many rows there are from there on. What is not there becomes zeros.
template <int ROWS, typename T>
__device__ __forceinline__ void load_tile(unsigned to, const T* __restrict__ from, long long stride, int left) {
  constexpr int STEP = THREADS / SPAN;  // a multiple of 8, so that the swizzle stays as it is
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP, from += STEP * stride) {
    if (i + STEP > ROWS && i + threadIdx.x / SPAN >= ROWS) break;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += SPAN)
      cp_async(to + 16 * (i * CHUNKS + j), from + 8 * j, i < left && 8 * (threadIdx.x % SPAN + j) < HEAD_DIM ? 16 : 0);
  }
}

// S = Q K^T, this warp's rows
template <typename T>
__device__ __forceinline__ void scores(Scores& S, unsigned q_lane, unsigned k_lane) {
#pragma unroll
  for (int k = 0; k < ROW / 16; ++k) {
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) ldmatrix(a[m], along(q_lane, k) + 32 * m * ROW);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned b[4];
      ldmatrix(b, along(k_lane, k) + 32 * n * ROW);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_16x8x16(T(), S[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16(T(), S[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Keys that a row must not see score -inf, so that exp2 gives them exactly no weight. `place`: the key at which the
// thread's first row stands; `key`: its first key.
__device__ __forceinline__ void mask(Scores& S, int key, int place, int kv_len, int window_left, int window_right) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = place + 16 * m + 8 * h;
      const int low = window_left < 0 ? 0 : at - window_left;
      const int high = window_right < 0 ? kv_len - 1 : min(kv_len - 1, at + window_right);
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (key + 8 * n + e < low || key + 8 * n + e > high) S[m][n][2 * h + e] = NEG_INF;
    }
}

// m_i follows the maxima, and what is summed up so far is rescaled to it. That takes time, so it is done only when some
// weight would exceed 2^RAISE: smaller ones do no harm, as the division by l_i at the end cancels them.
__device__ __forceinline__ void follow_maxima(
    const Scores& S, Statistics& m_i, Statistics& l_i, Statistics& shift, Output& acc, float to_log2) {
  Statistics m_new;
  bool left_behind = false;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m_new[m][h] = m_i[m][h];
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) m_new[m][h] = fmaxf(m_new[m][h], fmaxf(S[m][n][2 * h], S[m][n][2 * h + 1]));
      left_behind |= m_new[m][h] * to_log2 > m_i[m][h] * to_log2 + RAISE;
    }
  if (!__any_sync(0xffffffff, left_behind)) return;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Four lanes share a row, each has seen its own keys.
      float x = m_new[m][h];
      x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
      shift[m][h] = x == NEG_INF ? 0.0f : x * to_log2;  // a row that has seen no key: -inf - (-inf) would be NaN
      const float rescale = exp2_approx(m_i[m][h] * to_log2 - shift[m][h]);
      m_i[m][h] = x;
      l_i[m][h] *= rescale;
#pragma unroll
      for (int n = 0; n < ROW / 8; ++n) acc[m][n][2 * h] *= rescale, acc[m][n][2 * h + 1] *= rescale;
    }
}

// acc += P V, 16 keys after 16 keys: while the tensor cores work on some, this thread computes the weights of the next.
template <typename T>
__device__ __forceinline__ void weigh(
    Output& acc, const Scores& S, Statistics& l_i, const Statistics& shift, float to_log2, unsigned v_lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k) {
    // The accumulators of 2 x 8 keys lie as an operand of 16 keys must: only the width changes.
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* s = &S[m][2 * k + i / 2][i % 2 * 2];
        const float x = exp2_approx(fmaf(s[0], to_log2, -shift[m][i % 2]));
        const float y = exp2_approx(fmaf(s[1], to_log2, -shift[m][i % 2]));
        l_i[m][i % 2] += x + y;
        a[m][i] = pack(T(), x, y);
      }
#pragma unroll
    for (int n = 0; n < ROW / 16; ++n) {
      unsigned b[4];
      ldmatrix_trans(b, along(v_lane, n) + 32 * k * ROW);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_16x8x16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma(const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
        float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; null: not wanted
        const int* __restrict__ cu_seqlens_q,  // [sequences + 1] where each sequence of Q begins; null: N rows each
        const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
        const AttentionParams params) {
  // ---- prologue: which tile of which head is mine, which keys it sees
  // Causal: the last rows see the most keys. The tiles of all heads that hold them start first, and light ones fill the
  // gaps at the end. Otherwise the tiles of a head are neighbours, so that they find K and V in the L2 cache.
  int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  if (params.window_right >= 0) {
    const unsigned heads = gridDim.y * gridDim.z, block = tile + gridDim.x * (head + gridDim.y * sequence);
    tile = gridDim.x - 1 - block / heads, head = block % heads % gridDim.y, sequence = block % heads / gridDim.y;
  }
  const int kv_head = head / (gridDim.y / params.kv_heads);
  const int q_first = cu_seqlens_q ? cu_seqlens_q[sequence] : 0, k_first = cu_seqlens_k ? cu_seqlens_k[sequence] : 0;
  const int q_len = cu_seqlens_q ? cu_seqlens_q[sequence + 1] - q_first : params.N;
  const int kv_len = cu_seqlens_k ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv;
  const int first_row = tile * BLOCK_M;
  if (first_row >= q_len) return;  // the whole block, before any barrier
  Q += (cu_seqlens_q ? q_first * params.q.row : sequence * params.q.batch) + head * params.q.head;
  O += (cu_seqlens_q ? q_first * params.o.row : sequence * params.o.batch) + head * params.o.head;
  K += (cu_seqlens_k ? k_first * params.k.row : sequence * params.k.batch) + kv_head * params.k.head;
  V += (cu_seqlens_k ? k_first * params.v.row : sequence * params.v.batch) + kv_head * params.v.head;

  // Row i stands at key i + kv_len - q_len. Of keys begin .. end - 1 each is seen by some row of the block, and of
  // full_begin .. full_end - 1 by all.
  const int first_place = first_row + kv_len - q_len, last_place = min(first_row + BLOCK_M, q_len) - 1 + kv_len - q_len;
  const int begin = params.window_left < 0 ? 0 : max(0, first_place - params.window_left) / BLOCK_N * BLOCK_N;
  const int end = params.window_right < 0 ? kv_len : min(kv_len, last_place + params.window_right + 1);
  const int full_begin = params.window_left < 0 ? 0 : last_place - params.window_left;
  const int full_end = params.window_right < 0 ? kv_len : min(kv_len, first_place + params.window_right + 1);

  // Each lane names one row to ldmatrix: k_lane is its own address in the first fragment of the tile.
  extern __shared__ __align__(128) unsigned char raw[];
  constexpr unsigned TILE = 2 * BLOCK_N * ROW;  // bytes of a tile of K or V; there are two of each
  const unsigned Q_smem = smem_address(raw), K_smem = Q_smem + 2 * BLOCK_M * ROW, V_smem = K_smem + 2 * TILE;
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16 * TILES_M;
  const unsigned q_lane = Q_smem + swizzled(warp_row + lane_id % 16, lane_id / 16);
  const unsigned k_lane = K_smem + swizzled(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = V_smem + swizzled(lane_id % 16, lane_id / 16);
  const int r = threadIdx.x / SPAN, c = threadIdx.x % SPAN;  // the first piece of 16 bytes that this thread copies
  const unsigned piece = swizzled(r, c);

  Output acc = {};
  Statistics m_i, l_i, shift;  // shift: m_i in units of log2, 0 where it is -inf; l_i of this thread's keys alone
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) m_i[m][h] = NEG_INF, l_i[m][h] = shift[m][h] = 0.0f;
  const float size = fmaxf(fabsf(params.softmax_scale), 1e-30f);  // 0 times -inf would be NaN
  const float to_log2 = size * LOG2_E;

  K += (begin + r) * params.k.row + 8 * c;
  V += (begin + r) * params.v.row + 8 * c;
  if (begin < end) {
    load_tile<BLOCK_M>(Q_smem + piece, Q + (first_row + r) * params.q.row + 8 * c, params.q.row, q_len - first_row - r);
    load_tile<BLOCK_N>(K_smem + piece, K, params.k.row, kv_len - begin - r);
    load_tile<BLOCK_N>(V_smem + piece, V, params.v.row, kv_len - begin - r);
    cp_async_commit();
    if (params.softmax_scale < 0.0f) {  // maxima are looked for before the scaling: the sign goes into Q
      cp_async_wait<0>();
      __syncthreads();  // hazard: words are turned round before others' copies have landed
      for (int i = threadIdx.x; i < BLOCK_M * ROW / 2; i += THREADS) reinterpret_cast<unsigned*>(raw)[i] ^= 0x80008000;
    }
  }

  // ---- one pass: while a tile is used, the next one travels into the other half of K_smem and V_smem
  unsigned here = 0;
  for (int first = begin; first < end; first += BLOCK_N, here ^= TILE) {
    cp_async_wait<0>();
    __syncthreads();  // hazard: the tile is read before others' copies have landed; the one before is overwritten
    Scores S = {};
    scores<T>(S, q_lane, k_lane + here);

    // Not before the scores: the copies would stand in the way of ldmatrix.
    const int next = first + BLOCK_N;
    if (next < end) {
      K += BLOCK_N * params.k.row;
      V += BLOCK_N * params.v.row;
      load_tile<BLOCK_N>(K_smem + (here ^ TILE) + piece, K, params.k.row, kv_len - next - r);
      load_tile<BLOCK_N>(V_smem + (here ^ TILE) + piece, V, params.v.row, kv_len - next - r);
      cp_async_commit();
    }
    if (first < full_begin || next > full_end)
      mask(S, first + 2 * t, first_place + warp_row + g, kv_len, params.window_left, params.window_right);
    follow_maxima(S, m_i, l_i, shift, acc, to_log2);
    weigh<T>(acc, S, l_i, shift, to_log2, v_lane + here);
  }

  // ---- epilogue: a row's four lanes add their sums; divide once
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float l = l_i[m][h] + __shfl_xor_sync(0xffffffff, l_i[m][h], 1);
      l += __shfl_xor_sync(0xffffffff, l, 2);
      const float inverse = l > 0.0f ? 1.0f / l : 0.0f;  // a row that has seen no key: zeros, and lse = -inf
      const int row = first_row + warp_row + 16 * m + 8 * h + g;
      if (row >= q_len) continue;
      if (lse && t == 0) {
        const long long start = cu_seqlens_q ? (long long)head * cu_seqlens_q[gridDim.z] + q_first
                                             : ((long long)sequence * gridDim.y + head) * params.N;
        lse[start + row] = m_i[m][h] * size + logf(l);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *reinterpret_cast<unsigned*>(O + row * params.o.row + 8 * n + 2 * t) =
            pack(T(), acc[m][n][2 * h] * inverse, acc[m][n][2 * h + 1] * inverse);
    }
}
