// 11 projection: attention and its output projection in one kernel: Y = O W_O, where O has the
// heads side by side.
//
// Since 07: O is never written. Its accumulators, divided and packed, are the left operand of one
// more product, with the HEAD_DIM rows of W_O that belong to the head; its tiles are swizzled and
// double-buffered like those of V. The heads' products add up to Y. ALL_HEADS = 0: a block has one
// head, as in 07, and adds its product to Y by atomics. ALL_HEADS = 1: a block has a tile of rows
// for all heads, one after the other, so that no other block writes these rows.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, or 1 with ALL_HEADS,
//          sequences), block 32 WARPS, 2 HEAD_DIM_PADDED (BLOCK_M + 4 BLOCK_N) bytes of dynamic
//          shared memory
// Shapes   Q (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. W_O (heads HEAD_DIM, columns) of the same type, contiguous. Y (batch, N,
//          columns) or (tokens, columns), float32; zeros before, but with ALL_HEADS. Its strides
//          are params.o
// Needs    sm_80; HEAD_DIM, columns and strides multiples of 8, pointers of 16 bytes
// Traffic  Q once; K and V as in 07; for each tile of rows all of W_O, a tile of Y for each head
#include "block.cuh"  // Block, Window: 05

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 128
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
#ifndef ALL_HEADS
#define ALL_HEADS 0  // 1: a block computes all heads of its rows
#endif
#ifndef STAGGERED
#define STAGGERED 1  // heads begin with different columns of Y
#endif
#ifndef VECTOR_ATOMICS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VECTOR_ATOMICS 1  // four floats in one instruction, from sm_90 on
#else
#define VECTOR_ATOMICS 0
#endif
#endif

#include "mma_tiles.cuh"  // 07: what a warp does with its tile
static_assert(HEAD_DIM <= 128, "acc must fit the registers");
using Operand = unsigned[TILES_M][HEAD_DIM_PADDED / 16][4];  // O, packed: the left operand of O W_O
static_assert(
    2 * HEAD_DIM_PADDED <= BLOCK_M + 4 * BLOCK_N, "two tiles of W_O have the place of Q, K and V");

// sum += O W, for as many columns of W_O as a tile has.
template <typename T>
__device__ __forceinline__ void gemm_ow(Output& sum, const Operand& O, unsigned w_lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM_PADDED / 16; ++k)
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, swizzle_advance<CHUNKS>(w_lane, 2 * n) + 32 * k * HEAD_DIM_PADDED);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        mma_m16n8k16(T(), sum[m][2 * n], O[m][k], b[0], b[1]);
        mma_m16n8k16(T(), sum[m][2 * n + 1], O[m][k], b[2], b[3]);
      }
    }
}

// Y += four floats. Lanes t and t + 1, t even, exchange halves of a fragment: then each has four
// neighbours of one row.
__device__ __forceinline__ void atomic_add(
    float* row, float* row_8, const float (&d)[4], bool in_row, bool in_row_8) {
  const bool odd = threadIdx.x % 2;
  const float x = __shfl_xor_sync(0xffffffff, odd ? d[0] : d[2], 1);
  const float y = __shfl_xor_sync(0xffffffff, odd ? d[1] : d[3], 1);
  if (odd ? !in_row_8 : !in_row) return;
  float* const target = odd ? row_8 - 2 : row;
  const float4 four = odd ? make_float4(x, y, d[2], d[3]) : make_float4(d[0], d[1], x, y);
#if VECTOR_ATOMICS
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(four.x),
               "f"(four.y), "f"(four.z), "f"(four.w)
               : "memory");
#else
  atomicAdd(target, four.x), atomicAdd(target + 1, four.y), atomicAdd(target + 2, four.z),
      atomicAdd(target + 3, four.w);
#endif
}

// Y += O W for this block's rows: HEAD_DIM columns after HEAD_DIM columns.
template <typename T>
__device__ __forceinline__ void project(
    const Operand& O, const T* __restrict__ W, float* __restrict__ Y, long long y_row, int columns,
    int rows_left, int head) {
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  constexpr unsigned TILE = 2 * HEAD_DIM_PADDED * HEAD_DIM_PADDED;  // bytes of a tile of W
  const unsigned W_smem = smem_address(dynamic_smem);
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16 * TILES_M;
  const unsigned w_lane = W_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const int copy_row = threadIdx.x / SPAN, copy_chunk = threadIdx.x % SPAN;
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  W += (long long)copy_row * columns + 8 * copy_chunk;
  Y += (warp_row + g) * y_row + 2 * t;
  __syncthreads();  // hazard: Q, K and V could be overwritten while other warps read them
  // Heads begin with different columns, so that those that run at the same time do not add to the
  // same places.
  const int tiles = (columns + HEAD_DIM - 1) / HEAD_DIM;
  int first = STAGGERED && !ALL_HEADS ? head % tiles * HEAD_DIM : 0;
  load_tile<HEAD_DIM_PADDED, CHUNKS, THREADS>(
      W_smem + copy_offset, W + first, columns, HEAD_DIM - copy_row,
      min(columns - first, HEAD_DIM));
  cp_async_commit();

  unsigned stage_offset = 0;
  for (int i = 0; i < tiles; ++i, stage_offset ^= TILE) {
    const int width = min(columns - first, HEAD_DIM);
    Output sum = {};
    if (ALL_HEADS &&
        head > 0) {  // the sum of the heads before: these words are this thread's alone
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
          if (warp_row + 8 * i + g < rows_left && 8 * n < width) {
            const float2 before =
                *reinterpret_cast<const float2*>(Y + 8 * i * y_row + first + 8 * n);
            row_pair(sum, i, n)[0] = before.x;
            row_pair(sum, i, n)[1] = before.y;
          }
    }
    cp_async_wait<0>();
    __syncthreads();  // hazard: W's tile could be read before it lands, or the last one overwritten
    const int next = first + HEAD_DIM < columns ? first + HEAD_DIM : 0;
    if (i + 1 < tiles) {
      load_tile<HEAD_DIM_PADDED, CHUNKS, THREADS>(
          W_smem + (stage_offset ^ TILE) + copy_offset, W + next, columns, HEAD_DIM - copy_row,
          min(columns - next, HEAD_DIM));
      cp_async_commit();
    }
    gemm_ow<T>(sum, O, w_lane + stage_offset);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        if (8 * n >= width) break;
        float *const row = Y + 16 * m * y_row + first + 8 * n, *const row_8 = row + 8 * y_row;
        const bool in_row = warp_row + 16 * m + g < rows_left;
        const bool in_row_8 = warp_row + 16 * m + 8 + g < rows_left;
        if (!ALL_HEADS) {
          atomic_add(row, row_8, sum[m][n], in_row, in_row_8);
        } else {
          if (in_row) *reinterpret_cast<float2*>(row) = make_float2(sum[m][n][0], sum[m][n][1]);
          if (in_row_8) *reinterpret_cast<float2*>(row_8) = make_float2(sum[m][n][2], sum[m][n][3]);
        }
      }
    first = next;
  }
}

// O of one head for a tile of rows, divided and packed. Q is the tile's first row, K and V the
// sequence's first key.
template <typename T>
__device__ __forceinline__ void attention(
    Operand& O, const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const Block& block, const AttentionParams& params) {
  const int first_row = block.first_row, q_len = block.q_len;
  const Window window(BLOCK_M, block, params);
  const int last_row = window.last_row, begin = window.begin, end = window.end;
  // ldmatrix takes the address of a row from each lane: q_lane, k_lane and v_lane are the first.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  constexpr unsigned TILE = 2 * BLOCK_N * HEAD_DIM_PADDED;  // bytes of a tile of K or V
  const unsigned Q_smem = smem_address(dynamic_smem);
  const unsigned K_smem = Q_smem + 2 * BLOCK_M * HEAD_DIM_PADDED;
  const unsigned V_smem = K_smem + 2 * TILE;
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16 * TILES_M;
  unsigned q_lane = Q_smem + swizzle<CHUNKS>(warp_row + lane_id % 16, lane_id / 16);
  unsigned k_lane = K_smem + swizzle<CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  unsigned v_lane = V_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  asm volatile("" : "+r"(q_lane), "+r"(k_lane), "+r"(v_lane));  // kept in registers, as in 07
  const int copy_row = threadIdx.x / SPAN, copy_chunk = threadIdx.x % SPAN;  // this thread copies
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  Q += copy_row * params.q.row + 8 * copy_chunk;
  K += (begin + copy_row) * params.k.row + 8 * copy_chunk;
  V += (begin + copy_row) * params.v.row + 8 * copy_chunk;
  if (begin < end) {
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + copy_offset, Q, params.q.row, q_len - first_row - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        K_smem + copy_offset, K, params.k.row, end - begin - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        V_smem + copy_offset, V, params.v.row, end - begin - copy_row, HEAD_DIM);
    cp_async_commit();
  }
  Output acc = {};
  Statistics l_i = {};  // of this lane's keys until the epilogue
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  unsigned stage_offset = 0;  // of the half of K_smem and V_smem in use, not being filled
  for (int first = begin; first < end; first += BLOCK_N, stage_offset ^= TILE) {
    cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Scores S = {};
    gemm_qk<T>(S, q_lane, k_lane + stage_offset);
    // Issued before the scores, it would cost 75 more instructions a tile, mostly register moves.
    const int next = first + BLOCK_N;
    if (next < end) {
      K += BLOCK_N * params.k.row;
      V += BLOCK_N * params.v.row;
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          K_smem + (stage_offset ^ TILE) + copy_offset, K, params.k.row, end - next - copy_row,
          HEAD_DIM);
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          V_smem + (stage_offset ^ TILE) + copy_offset, V, params.v.row, end - next - copy_row,
          HEAD_DIM);
      cp_async_commit();
    }
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, maxima.m_i, l_i, softmax_scale_log2, v_lane + stage_offset);
  }

  // ---- epilogue: the row's sum; divide once. O's layout is that of a left operand, as P's was
  Statistics inverse;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that sees no key: zeros
  }
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int k = 0; k < HEAD_DIM_PADDED / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * m + i % 2;
        const float* a = row_pair(acc, row, 2 * k + i / 2);
        O[m][k][i] = pack(T(), a[0] * inverse[row], a[1] * inverse[row]);
      }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) projection(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const T* __restrict__ W_O, float* __restrict__ Y,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int columns, const AttentionParams params) {
  // ---- prologue: the tile, head and sequence of this block
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  const int sequence = block.sequence, q_first = block.q_first, k_first = block.k_first;
  Q += sequence * params.q.batch + (q_first + first_row) * params.q.row;
  Y += sequence * params.o.batch + (q_first + first_row) * params.o.row;
  K += sequence * params.k.batch + k_first * params.k.row;
  V += sequence * params.v.batch + k_first * params.v.row;

  // ---- attention of each head, and its share of Y
  int head = block.head;
  for (const int last = ALL_HEADS ? params.heads - 1 : head; head <= last; ++head) {
    const int kv_head = head / (params.heads / params.kv_heads);
    Operand O;
    attention(
        O, Q + head * params.q.head, K + kv_head * params.k.head, V + kv_head * params.v.head,
        block, params);
    project(
        O, W_O + (long long)head * HEAD_DIM * columns, Y, params.o.row, columns, q_len - first_row,
        head);
    if (ALL_HEADS) __syncthreads();  // hazard: the next head's Q could overwrite W while in use
  }
}
