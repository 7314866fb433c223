// 12 flash_cute: 07 in CuTe. Layouts say where an element is; they partition copies and products.
// A TiledCopy cuts tiles of global memory into 16-byte copies, a TiledMMA cuts S and O into the
// accumulators of each lane, and both use one layout of shared memory. The algorithm is that of 07.
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

// Two neighbours of row i, as the online softmax of 07 takes them.
template <typename Rows>
__device__ __forceinline__ float* row_pair(Rows& rows, int i, int n) {
  return &rows(i, 2 * n);
}

using namespace cute;  // Layout, Shape, Int, _1, _8, ...: named as in CuTe's documentation

constexpr int THREADS = 32 * WARPS;
constexpr int TILES_M = BLOCK_M / (16 * WARPS);             // MMA atoms of 16 rows in a warp tile
constexpr int ROWS = 2 * TILES_M;                           // of S and O per thread
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

#include "online_softmax.cuh"  // Maxima, online_softmax_rescale: 07

// Where an element is in shared memory. The atom is 8 rows of a panel: its 16-byte chunks are
// permuted by the row, so that the eight that ldmatrix reads at a time are in different banks.
// Tiles repeat it, and panels follow each other.
using SmemAtom = decltype(composition(
    Swizzle<SWIZZLE_BITS, 3, 3>{}, Layout<Shape<_8, Int<PANEL>>, Stride<Int<PANEL>, _1>>{}));
using SmemLayoutQ =
    decltype(tile_to_shape(SmemAtom{}, Shape<Int<BLOCK_M>, Int<HEAD_DIM_PADDED>>{}));
using SmemLayoutK = decltype(tile_to_shape(
    SmemAtom{}, Shape<Int<BLOCK_N>, Int<HEAD_DIM_PADDED>, _2>{}));  // 2 stages
// The same memory with the coordinates exchanged: the second product takes V as (HEAD_DIM, keys).
using SmemLayoutVt = decltype(composition(
    SmemLayoutK{}, Layout<
                       Shape<Int<HEAD_DIM_PADDED>, Int<BLOCK_N>, _2>,
                       Stride<Int<BLOCK_N>, _1, Int<BLOCK_N * HEAD_DIM_PADDED>>>{}));

// Which lane has which element: of both products, whose atom is mma.sync m16n8k16, and of all
// copies.
template <typename T>
using MmaAtom = conditional_t<
    is_same_v<T, __half>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
template <typename T>
using WarpsMma = TiledMMA<
    MMA_Atom<MmaAtom<T>>, Layout<Shape<Int<WARPS>, _1, _1>>, Tile<Int<16 * WARPS>, _16, _16>>;
template <typename T>
using GmemCopyAtom = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, T>;  // or zeros
using CopyThreads = Layout<Shape<Int<COPY_ROWS>, Int<PANEL / 8>>, Stride<Int<PANEL / 8>, _1>>;

// This thread's share of a tile: (chunk, rows, panels); zeros from rows_left on. Rows relative to
// the thread's first one are constants. Like threadIdx, coordinates are unsigned.
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

// A key that a row does not see scores -inf, so that its weight is exactly 0. coords: of S's
// elements in the tile; row_pos, the position of the tile's first row among the keys, and end are
// relative to the tile's first key.
template <typename Scores, typename Coords>
__device__ __forceinline__ void mask(
    Scores& S, const Coords& coords, int row_pos, int end, int window_lo, int window_hi) {
  const int key = get<1>(coords(0, 0));  // this thread's first
#pragma unroll
  for (int i = 0; i < size<0>(S); ++i) {
    const int row = row_pos + get<0>(coords(i, 0)) - key;
    const unsigned seen = keys_before<BLOCK_N>(min(row + window_hi + 1, end - key)) &
                          ~keys_before<BLOCK_N>(row + window_lo);
#pragma unroll
    for (int j = 0; j < size<1>(S); ++j)
      if (!(seen >> j & 1)) S(i, j) = NEG_INF;
  }
}

// Accumulators ((key pair, row half), M, N) seen as (rows, columns) of this thread: another layout
// of the same registers.
template <typename Accumulators>
__device__ __forceinline__ auto by_rows(Accumulators& acc) {
  const auto l = acc.layout();
  return make_tensor(
      acc.data(),
      make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l))));
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
  Tensor gO = make_tensor(make_gmem_ptr(O), shape_q, make_stride(params.o.row, _1{}));
  Tensor sQ = make_tensor(make_smem_ptr(Q_smem), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(K_smem), SmemLayoutK{});
  Tensor sV = make_tensor(make_smem_ptr(V_smem), SmemLayoutK{});
  Tensor sVt = make_tensor(make_smem_ptr(V_smem), SmemLayoutVt{});

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

  // This thread's part of the products: fragments, where ldmatrix finds them, accumulators and
  // their coordinates.
  const WarpsMma<T> tiled_mma;
  const auto thr_mma = tiled_mma.get_slice(threadIdx.x);
  Tensor tSrQ = thr_mma.partition_fragment_A(sQ);             // (A's registers, M, HEAD_DIM / 16)
  Tensor tSrK = thr_mma.partition_fragment_B(sK(_, _, 0));    // (B's registers, N, HEAD_DIM / 16)
  Tensor tOrVt = thr_mma.partition_fragment_B(sVt(_, _, 0));  // (registers, HEAD_DIM, BLOCK_N / 16)
  const auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, tiled_mma);
  const auto copy_k = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, T>{}, tiled_mma);
  const auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, T>{}, tiled_mma);
  const auto thr_copy_q = copy_q.get_slice(threadIdx.x);
  const auto thr_copy_k = copy_k.get_slice(threadIdx.x);
  const auto thr_copy_v = copy_v.get_slice(threadIdx.x);
  Tensor tSsQ = thr_copy_q.partition_S(sQ);
  Tensor tSsK = thr_copy_k.partition_S(sK);
  Tensor tOsVt = thr_copy_v.partition_S(sVt);
  Tensor tSrQ_copy = thr_copy_q.retile_D(tSrQ);
  Tensor tSrK_copy = thr_copy_k.retile_D(tSrK);
  Tensor tOrVt_copy = thr_copy_v.retile_D(tOrVt);
  Tensor tOrO = thr_mma.partition_fragment_C(gO);
  Tensor tScS = thr_mma.partition_C(make_identity_tensor(Shape<Int<BLOCK_M>, Int<BLOCK_N>>{}));
  const auto coords_S = by_rows(tScS);

  if (begin < end) {
    load_tile(tiled_copy, tQgQ, tQsQ, tQcQ, q_len - first_row);
    load_tile(tiled_copy, tKgK, tKsK(_, _, _, 0), tKcK, end - begin);
    load_tile(tiled_copy, tVgV, tVsV(_, _, _, 0), tKcK, end - begin);
    cp_async_fence();
  }
  clear(tOrO);
  auto acc = by_rows(tOrO);
  Statistics l_i = {};  // of this lane's keys until the epilogue
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  int stage = 0;  // of K_smem and V_smem, in use; the next tile arrives in the other one
  for (int first = begin; first < end; first += BLOCK_N, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Tensor tSrS = partition_fragment_C(tiled_mma, Shape<Int<BLOCK_M>, Int<BLOCK_N>>{});
    clear(tSrS);
#pragma unroll
    for (int k = 0; k < size<2>(tSrK); ++k) {
      copy(copy_q, tSsQ(_, _, k), tSrQ_copy(_, _, k));
      copy(copy_k, tSsK(_, _, k, stage), tSrK_copy(_, _, k));
      gemm(tiled_mma, tSrQ(_, _, k), tSrK(_, _, k), tSrS);
    }

    // Issued after the scores, as in 07.
    const int next = first + BLOCK_N;
    if (next < end) {
      tKgK.data() = tKgK.data() + BLOCK_N * params.k.row;
      tVgV.data() = tVgV.data() + BLOCK_N * params.v.row;
      load_tile(tiled_copy, tKgK, tKsK(_, _, _, stage ^ 1), tKcK, end - next);
      load_tile(tiled_copy, tVgV, tVsV(_, _, _, stage ^ 1), tKcK, end - next);
      cp_async_fence();
    }
    auto S = by_rows(tSrS);
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end))
      mask(S, coords_S, first_row - first, end - first, window.lo, window.hi);
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);

    // acc += P V, 16 keys after 16 keys: while the tensor cores work on some, this thread computes
    // the weights of the next. The accumulators of 2 x 8 keys have the layout that the left operand
    // of 16 keys needs.
#pragma unroll
    for (int k = 0; k < size<2>(tOrVt); ++k) {
      Tensor tOrP = make_fragment_like(tSrQ(_, _, 0));  // 16 keys of P, laid out as 16 columns of Q
      Tensor words = recast<unsigned>(tOrP);            // ((1, row half, key half), M)
#pragma unroll
      for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * m + i % 2, key = 4 * k + i / 2 * 2;
          const float x = exp2f(fmaf(S(row, key), softmax_scale_log2, -maxima.m_i[row]));
          const float y = exp2f(fmaf(S(row, key + 1), softmax_scale_log2, -maxima.m_i[row]));
          l_i[row] += x + y;
          words(i, m) = pack(T(), x, y);
        }
      copy(copy_v, tOsVt(_, _, k, stage), tOrVt_copy(_, _, k));
      gemm(tiled_mma, tOrP, tOrVt(_, _, k), tOrO);
    }
  }

  // ---- epilogue: the row's sum; divide once
  Tensor tOgO = thr_mma.partition_C(gO);
  Tensor tOcO = thr_mma.partition_C(make_identity_tensor(shape_q));
  auto rows_O = by_rows(tOgO);
  auto coords_O = by_rows(tOcO);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = get<0>(coords_O(i, 0));
    if (first_row + r >= q_len) continue;
    if (lse && get<1>(coords_O(i, 0)) == 0) block.store_lse(lse, params, r, maxima.get(i), sum);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 4; j += 2)
      *reinterpret_cast<unsigned*>(&rows_O(i, j)) =
          pack(T(), acc(i, j) * inverse, acc(i, j + 1) * inverse);
  }
}
