// 12, step 2, tensors: a pointer with a layout, a type that says where an element is. Tiles and
// fragments are cut out of tensors.
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
#include "block.cuh"  // Block, Window: 05

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

#include "mma_tiles.cuh"  // this warp's products, masks and softmax; THREADS, TILES_M, ...: 07

using namespace cute;  // Layout, Shape, Int, _1, _8, ...: named as in CuTe's documentation

constexpr int PANEL = HEAD_DIM_PADDED % 64 == 0   ? 64
                      : HEAD_DIM_PADDED % 32 == 0 ? 32
                                                  : 16;  // columns of an atom
constexpr int SWIZZLE_BITS = PANEL == 64 ? 3 : PANEL == 32 ? 2 : 1;

// Where an element is in shared memory. The atom is 8 rows of a panel: its 16-byte chunks are
// permuted by the row, so that the eight that ldmatrix reads at a time are in different banks.
// Tiles repeat it, and panels follow each other.
using SmemAtom = decltype(composition(
    Swizzle<SWIZZLE_BITS, 3, 3>{}, Layout<Shape<_8, Int<PANEL>>, Stride<Int<PANEL>, _1>>{}));
using SmemLayoutQ =
    decltype(tile_to_shape(SmemAtom{}, Shape<Int<BLOCK_M>, Int<HEAD_DIM_PADDED>>{}));
using SmemLayoutK = decltype(tile_to_shape(
    SmemAtom{}, Shape<Int<BLOCK_N>, Int<HEAD_DIM_PADDED>, _2>{}));  // 2 stages

// The block copies a tile, 16 bytes at a time. Rows from rows_left on become zeros.
template <typename Source, typename Target>
__device__ __forceinline__ void load_tile(
    const Source& source, const Target& target, int rows_left) {
  for (int e = threadIdx.x; e < size<0>(target) * CHUNKS; e += THREADS) {
    const int row = e / CHUNKS, column = 8 * (e % CHUNKS);
    const bool in_bounds = row < rows_left && column < HEAD_DIM;
    const void* chunk = &source(in_bounds ? row : 0, in_bounds ? column : 0);
    cp_async(smem_address(&target(row, column)), chunk, in_bounds ? 16 : 0);
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
  constexpr int TILE = BLOCK_N * HEAD_DIM_PADDED;  // elements of a tile of K or V
  T* const Q_smem = reinterpret_cast<T*>(dynamic_smem);
  T* const K_smem = Q_smem + BLOCK_M * HEAD_DIM_PADDED;
  T* const V_smem = K_smem + 2 * TILE;
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
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_id = threadIdx.x / 32, warp_row = warp_id * 16 * TILES_M;

  // Each lane passes the address of one row to ldmatrix: in fragment (i, k) of 16 x 16, its own.
  int stage = 0;  // of the tiles of K and V, in use; the next tile arrives in the other one
  const Shape<_16, _16> fragment;
  Tensor sQ_warp =
      local_tile(sQ, Shape<Int<16 * TILES_M>, Int<HEAD_DIM_PADDED>>{}, make_coord(warp_id, _0{}));
  Tensor q_lane = flat_divide(sQ_warp, fragment)(lane_id % 16, lane_id / 16 * 8, _, _);
  Tensor k_lane =
      flat_divide(sK, fragment)(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 * 8, _, _, _);
  Tensor v_lane = flat_divide(sV, fragment)(lane_id % 16, lane_id / 16 * 8, _, _, _);

  if (begin < end) {
    load_tile(gQ, sQ, q_len - first_row);
    load_tile(gK, sK(_, _, 0), end - begin);
    load_tile(gV, sV(_, _, 0), end - begin);
    cp_async_fence();
  }
  Output acc = {};
  Statistics l_i = {};  // of this lane's keys until the epilogue
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  for (int first = begin; first < end; first += BLOCK_N, stage ^= 1) {
    cute::cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Scores S = {};
    gemm_qk<T>(S, q_lane, k_lane(_, _, stage));

    // Issued after the scores, as in 07.
    const int next = first + BLOCK_N;
    if (next < end) {
      gK.data() = gK.data() + BLOCK_N * params.k.row;
      gV.data() = gV.data() + BLOCK_N * params.v.row;
      load_tile(gK, sK(_, _, stage ^ 1), end - next);
      load_tile(gV, sV(_, _, stage ^ 1), end - next);
      cp_async_fence();
    }
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, maxima.m_i, l_i, softmax_scale_log2, v_lane(_, _, stage));
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = warp_row + 8 * i + g;
    if (first_row + r >= q_len) continue;
    if (lse && t == 0) block.store_lse(lse, params, r, maxima.m_i[i] + maxima.base[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      *reinterpret_cast<unsigned*>(O + r * params.o.row + 8 * n + 2 * t) =
          pack(T(), row_pair(acc, i, n)[0] * inverse, row_pair(acc, i, n)[1] * inverse);
  }
}
