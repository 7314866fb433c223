// 12, first step: 07 with CuTe's layouts and copies in place of addresses written by hand. The
// products are still ours.
//
// Since 07: a layout says where an element of a tile is in shared memory, so that Q, K and V are
// tensors with coordinates (row, column); a TiledCopy cuts the tiles of global memory into 16-byte
// copies, of which an identity tensor gives the coordinates. flat_divide cuts what is in shared
// memory into fragments, of which each lane keeps the address that it gives to ldmatrix.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 32 WARPS, 2
//          HEAD_DIM_PADDED (BLOCK_M + 4 BLOCK_N) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Needs    sm_80; CuTe's headers (the package nvidia-cutlass); HEAD_DIM and strides multiples of 8,
//          pointers of 16 bytes
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see
#include <cute/tensor.hpp>
#include "block.cuh"    // Block, Window: 05
#include "half2.cuh"    // pack: 06
#include "mask.cuh"     // keys_before: a mask as bits, one for each key of a thread
#include "ptx.cuh"      // mma.sync and ldmatrix as functions, and where their fragments are
#include "softmax.cuh"  // NEG_INF, LOG2_E, M_INIT: 05; row_allreduce over the four lanes of a row

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per block
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
#ifndef EXACT_SHIFT
#define EXACT_SHIFT 0  // 1: for scales so large that m_i's rounding matters; see weight()
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8.0f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

using namespace cute;  // Layout, Shape, Int, _1, _8, ...: named as in CuTe's documentation

constexpr int THREADS = 32 * WARPS;
constexpr int TILES_M = BLOCK_M / (16 * WARPS);  // MMA atoms of 16 rows in a warp tile
constexpr int ROWS = 2 * TILES_M;                // per thread: g, g + 8, ... of its warp's
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // a row, in whole fragments
constexpr int PANEL = HEAD_DIM_PADDED % 64 == 0   ? 64
                      : HEAD_DIM_PADDED % 32 == 0 ? 32
                                                  : 16;  // columns of an atom
constexpr int SWIZZLE_BITS = PANEL == 64 ? 3 : PANEL == 32 ? 2 : 1;
constexpr int COPY_ROWS = THREADS / (PANEL / 8);  // that the block copies at a time
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "whole chunks; acc must fit the registers");
static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "a warp has whole fragments");
static_assert(
    BLOCK_M % COPY_ROWS == 0 && BLOCK_N % COPY_ROWS == 0, "each thread copies equally many chunks");

// Where an element is in shared memory. The atom is 8 rows of a panel: its 16-byte chunks are
// permuted by the row, so that the eight that ldmatrix reads at a time are in different banks.
// Tiles repeat it, and panels follow each other.
using SmemAtom = decltype(composition(
    Swizzle<SWIZZLE_BITS, 3, 3>{}, Layout<Shape<_8, Int<PANEL>>, Stride<Int<PANEL>, _1>>{}));
using SmemLayoutQ =
    decltype(tile_to_shape(SmemAtom{}, Shape<Int<BLOCK_M>, Int<HEAD_DIM_PADDED>>{}));
using SmemLayoutK = decltype(tile_to_shape(
    SmemAtom{}, Shape<Int<BLOCK_N>, Int<HEAD_DIM_PADDED>, _2>{}));  // 2 stages

// Which thread copies which chunk of a tile.
template <typename T>
using GmemCopyAtom = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, T>;
using CopyThreads = Layout<Shape<Int<COPY_ROWS>, Int<PANEL / 8>>, Stride<Int<PANEL / 8>, _1>>;

using Statistics = float[ROWS];
using Scores = float[TILES_M][BLOCK_N / 8][4];  // accumulators of S: 16 rows and 8 keys each
using Output = float[TILES_M][HEAD_DIM_PADDED / 8][4];

// This thread's share of a tile: (chunk, rows, panels). rows_left is how many rows of the tile
// there are; what is past the end becomes zeros. Rows are compared relative to the thread's first
// one: their differences are constants. Like threadIdx, coordinates are unsigned.
template <typename TiledCopy, typename Source, typename Target, typename Coords>
__device__ __forceinline__ void load_tile(
    const TiledCopy& tiled_copy, const Source& source, Target&& target, const Coords& coords,
    int rows_left) {
  const int row = get<0>(coords(0, 0, 0));
#pragma unroll
  for (int m = 0; m < size<1>(source); ++m)
#pragma unroll
    for (int k = 0; k < size<2>(source); ++k) {
      const int further = get<0>(coords(0, m, k)) - row, column = get<1>(coords(0, m, k));
      const bool in_bounds = further < rows_left - row && column < HEAD_DIM;
      copy(tiled_copy.with(in_bounds), source(_, m, k), target(_, m, k));
    }
}

// S = Q K^T for this warp's rows.
template <typename T, typename TileQ, typename TileK>
__device__ __forceinline__ void gemm_qk(Scores& S, const TileQ& q_lane, const TileK& k_lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM_PADDED / 16; ++k) {
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) ldmatrix_x4(a[m], smem_address(&q_lane(m, k)));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, smem_address(&k_lane(n, k)));
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), S[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), S[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// A key that a row does not see scores -inf, so that its weight is exactly 0. row_pos, the position
// of the thread's first row among the keys, and end are relative to the thread's first key.
__device__ __forceinline__ void mask(Scores& S, int row_pos, int end, int lo, int hi) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int low = row_pos + 8 * i + lo, high = row_pos + 8 * i + hi;
    const unsigned seen = keys_before<BLOCK_N>(min(high + 1, end)) & ~keys_before<BLOCK_N>(low);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(seen >> (2 * n + e) & 1)) row_pair(S, i, n)[e] = NEG_INF;
  }
}

// Everything so far is rescaled to the new maximum, but only when some weight would exceed
// 2^RESCALE_THRESHOLD: smaller ones do no harm, because the division by l_i cancels them.
__device__ __forceinline__ void online_softmax_rescale(
    const Scores& S, Statistics& m_i, Statistics& l_i, Output& acc, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(row_pair(S, i, n)[0], row_pair(S, i, n)[1]));
    m_new[i] = fmaxf(m_i[i], s_max * softmax_scale_log2);
    exceeded |= m_new[i] - m_i[i] > RESCALE_THRESHOLD;
  }
  if (__any_sync(0xffffffff, exceeded)) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
      const float rescale = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
      m_i[i] = m_new[i];
      l_i[i] *= rescale;
#pragma unroll
      for (int n = 0; n < HEAD_DIM_PADDED / 8; ++n) {
        row_pair(acc, i, n)[0] *= rescale;
        row_pair(acc, i, n)[1] *= rescale;
      }
    }
  }
}

// A score's weight, 2^(softmax_scale_log2 s - m_i), in one FFMA: its product is exact, while m_i,
// that of the row's largest s, is rounded. While |m_i| < 2^27 this is worth 2^4 at most, and 2^12
// fits float16. EXACT_SHIFT rounds both alike, so that no weight exceeds 2^8 at any scale.
__device__ __forceinline__ float weight(float s, float softmax_scale_log2, float m_i) {
  return exp2f(
      EXACT_SHIFT ? __fmul_rn(s, softmax_scale_log2) - m_i : fmaf(s, softmax_scale_log2, -m_i));
}

// acc += P V, 16 keys after 16 keys: tensor cores work on some while this thread weighs the next.
template <typename T, typename TileV>
__device__ __forceinline__ void gemm_pv(
    Output& acc, const Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2,
    const TileV& v_lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k) {
    // The accumulators of 2 x 8 keys have the layout that the left operand of 16 keys needs.
    unsigned a[TILES_M][4];
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * m + i % 2;
        const float* s = row_pair(S, row, 2 * k + i / 2);
        const float x = weight(s[0], softmax_scale_log2, m_i[row]);
        const float y = weight(s[1], softmax_scale_log2, m_i[row]);
        l_i[row] += x + y;
        a[m][i] = pack(T(), x, y);
      }
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, smem_address(&v_lane(k, n)));
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(T(), acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) flash_cute(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int last_row = window.last_row, begin = window.begin, end = window.end;

  // The tiles in global and in shared memory, with their layouts.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  T* const Q_smem = reinterpret_cast<T*>(dynamic_smem);
  T* const K_smem = Q_smem + cosize_v<SmemLayoutQ>;
  T* const V_smem = K_smem + cosize_v<SmemLayoutK>;
  const Shape<Int<BLOCK_M>, Int<HEAD_DIM_PADDED>> shape_q;
  const Shape<Int<BLOCK_N>, Int<HEAD_DIM_PADDED>> shape_k;
  Tensor gQ = make_tensor(make_gmem_ptr(Q), shape_q, make_stride(params.q.row, _1{}));
  Tensor gK = make_tensor(
      make_gmem_ptr(K + begin * params.k.row), shape_k, make_stride(params.k.row, _1{}));
  Tensor gV = make_tensor(
      make_gmem_ptr(V + begin * params.v.row), shape_k, make_stride(params.v.row, _1{}));
  Tensor sQ = make_tensor(make_smem_ptr(Q_smem), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(K_smem), SmemLayoutK{});
  Tensor sV = make_tensor(make_smem_ptr(V_smem), SmemLayoutK{});

  // This thread's part of the copies from global memory, and the coordinates of its chunks.
  const auto tiled_copy =
      make_tiled_copy(GmemCopyAtom<T>{}, CopyThreads{}, Layout<Shape<_1, _8>>{});
  const auto thr_copy = tiled_copy.get_slice(threadIdx.x);
  Tensor tQgQ = thr_copy.partition_S(gQ);
  Tensor tQsQ = thr_copy.partition_D(sQ);
  Tensor tKgK = thr_copy.partition_S(gK);
  Tensor tKsK = thr_copy.partition_D(sK);  // (chunk, rows, panels, stage)
  Tensor tVgV = thr_copy.partition_S(gV);
  Tensor tVsV = thr_copy.partition_D(sV);
  Tensor tQcQ = thr_copy.partition_S(make_identity_tensor(shape_q));
  Tensor tKcK = thr_copy.partition_S(make_identity_tensor(shape_k));
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_id = threadIdx.x / 32, warp_row = warp_id * 16 * TILES_M;

  // Each lane passes the address of one row to ldmatrix: a lane's row and chunk in a fragment of 16
  // x 16, in all fragments of a tile. With its coordinates in the fragment fixed, what is left is a
  // layout of the fragments.
  const Shape<_16, _16> fragment;
  Tensor sQ_warp =
      local_tile(sQ, Shape<Int<16 * TILES_M>, Int<HEAD_DIM_PADDED>>{}, make_coord(warp_id, _0{}));
  Tensor q_lane = flat_divide(sQ_warp, fragment)(lane_id % 16, lane_id / 16 * 8, _, _);
  Tensor k_lane =
      flat_divide(sK, fragment)(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8, _, _, _);
  Tensor v_lane = flat_divide(sV, fragment)(lane_id % 16, lane_id / 16 * 8, _, _, _);

  if (begin < end) {
    load_tile(tiled_copy, tQgQ, tQsQ, tQcQ, q_len - first_row);
    load_tile(tiled_copy, tKgK, tKsK(_, _, _, 0), tKcK, end - begin);
    load_tile(tiled_copy, tVgV, tVsV(_, _, _, 0), tKcK, end - begin);
    cp_async_fence();
    if (params.softmax_scale < 0.0f) {  // maxima precede the scaling: the sign goes into Q
      cute::cp_async_wait<0>();
      __syncthreads();  // hazard: signs could be flipped before other threads' copies land
      for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM_PADDED / 2; i += THREADS)
        reinterpret_cast<unsigned*>(dynamic_smem)[i] ^= 0x80008000;
    }
  }
  Output acc = {};
  Statistics m_i, l_i = {};  // m_i in units of log2; l_i of this lane's keys until the epilogue
#pragma unroll
  for (int i = 0; i < ROWS; ++i) m_i[i] = M_INIT;
  const float abs_scale = fmaxf(fabsf(params.softmax_scale), 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = abs_scale * LOG2_E;

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  int stage = 0;  // of K_smem and V_smem, in use; the next tile arrives in the other one
  for (int first = begin; first < end; first += BLOCK_N, stage ^= 1) {
    cute::cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Scores S = {};
    gemm_qk<T>(S, q_lane, k_lane(_, _, stage));

    // Issued after the scores, as in 07.
    const int next = first + BLOCK_N;
    if (next < end) {
      tKgK.data() = tKgK.data() + BLOCK_N * params.k.row;
      tVgV.data() = tVgV.data() + BLOCK_N * params.v.row;
      load_tile(tiled_copy, tKgK, tKsK(_, _, _, stage ^ 1), tKcK, end - next);
      load_tile(tiled_copy, tVgV, tVsV(_, _, _, stage ^ 1), tKcK, end - next);
      cp_async_fence();
    }
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    online_softmax_rescale(S, m_i, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, m_i, l_i, softmax_scale_log2, v_lane(_, _, stage));
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = warp_row + 8 * i + g;
    if (first_row + r >= q_len) continue;
    if (lse && t == 0) block.store_lse(lse, params, r, m_i[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      *reinterpret_cast<unsigned*>(O + r * params.o.row + 8 * n + 2 * t) =
          pack(T(), row_pair(acc, i, n)[0] * inverse, row_pair(acc, i, n)[1] * inverse);
  }
}
