// 15 by fp16: the first launch, which splits Q, K and V, and the exponents of their tiles. For
// 15_fp16x3.cu and the step before it; explained in 15's notebook.

#pragma once
#ifndef BLOCK_N
#define BLOCK_N 64  // B_c, keys per tile: two accumulators of O leave registers for these
#endif
#include "attention_params.cuh"
#include "half2.cuh"
#include "hopper_tiles.cuh"
#include "packed_tiles.cuh"

constexpr int SPLIT_THREADS = 256, Q_ROWS = 64;  // rows that share an exponent
constexpr int MAX_EXPONENT = 14;  // of a tile's largest element: hi is below 2^15 then

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 .. 127
  return __int_as_float((exponent + 127) << 23);
}

// x = hi + lo, two elements at a time. lo is exact before it is rounded.
__device__ __forceinline__ void split(float x, float y, unsigned& hi, unsigned& lo) {
  hi = pack(__half(), x, y);
  const float2 rounded = unpack(__half(), hi);
  lo = pack(__half(), x - rounded.x, y - rounded.y);
}

// The bits of |x|, which compare as it does; 0 of infinities and NaN, which are no scale.
__device__ __forceinline__ unsigned magnitude(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffff;
  return bits < 0x7f800000 ? bits : 0;
}

// How many tiles of `block` rows a head has. Where sequences are packed, each begins a tile, and rows
// and tiles are those of all.
__device__ __forceinline__ int tiles_of_head(int block, int rows, int sequences) {
  return sequences > 0 ? rows / block + sequences : (rows + block - 1) / block;
}

// Which exponent is that of a tile of a sequence whose first row is `first`.
__device__ __forceinline__ int exponent_index(
    int block, int tile, int head, int heads, int sequence, int first, int rows, int sequences) {
  const int of_head = tiles_of_head(block, rows, sequences);
  if (sequences > 0) return head * of_head + first / block + sequence + tile;
  return (sequence * heads + head) * of_head + tile;
}

template <typename T>
__device__ __forceinline__ T choose(int which, T q, T k, T v) {
  return which == 0 ? q : which == 1 ? k : v;
}

// Splits `rows` of a tile's ROWS rows, by all threads of a block.
template <int ROWS>
__device__ __forceinline__ void split_rows(
    const float* __restrict__ source, long long row_stride, int rows, __half* hi, __half* lo,
    int* exponent) {
  constexpr int CHUNKS = HEAD_DIM / 4, EACH = (ROWS * CHUNKS + SPLIT_THREADS - 1) / SPLIT_THREADS;
  float4 x[EACH];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int chunk = i * SPLIT_THREADS + threadIdx.x, row = chunk / CHUNKS;
    x[i] = row < min(rows, ROWS)
               ? *reinterpret_cast<const float4*>(source + row * row_stride + 4 * (chunk % CHUNKS))
               : float4{};
    largest = max(
        largest,
        max(max(magnitude(x[i].x), magnitude(x[i].y)), max(magnitude(x[i].z), magnitude(x[i].w))));
  }
  __shared__ unsigned of_warps[SPLIT_THREADS / 32];
  of_warps[threadIdx.x / 32] = __reduce_max_sync(0xffffffff, largest);
  __syncthreads();  // hazard: other warps have not written their maxima yet
  largest = __reduce_max_sync(0xffffffff, of_warps[threadIdx.x % (SPLIT_THREADS / 32)]);
  // At most 126, as 2^-126 is the least power of two with all bits: what is lost so is below 2^-149.
  const int scale = min(MAX_EXPONENT + 127 - (int)(largest >> 23), 126);
  if (threadIdx.x == 0) *exponent = scale;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int chunk = i * SPLIT_THREADS + threadIdx.x;
    if (chunk / CHUNKS >= min(rows, ROWS)) continue;
    const float factor = power_of_two(scale);
    uint2 of_hi, of_lo;
    split(x[i].x * factor, x[i].y * factor, of_hi.x, of_lo.x);
    split(x[i].z * factor, x[i].w * factor, of_hi.y, of_lo.y);
    *reinterpret_cast<uint2*>(hi + 4 * chunk) = of_hi;
    *reinterpret_cast<uint2*>(lo + 4 * chunk) = of_lo;
  }
}

extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) fp16x3_split(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    __half* __restrict__ q_split,  // [2 batch, heads, N, HEAD_DIM]: hi and lo of each batch
    __half* __restrict__ k_split, __half* __restrict__ v_split,
    int* __restrict__ q_exponents,         // see exponent_index
    int* __restrict__ kv_exponents,        // the same, of K and V in turn
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- the tile, head and sequence of this block: for each sequence Q, then K, then V
  const bool packed = params.sequences > 0;
  const int q_tiles = tiles_of_head(Q_ROWS, params.N, params.sequences),
            kv_tiles = tiles_of_head(BLOCK_N, params.N_kv, params.sequences);
  const int q_blocks = q_tiles * params.heads, kv_blocks = kv_tiles * params.kv_heads;
  int sequence = blockIdx.x / (q_blocks + 2 * kv_blocks);
  int i = blockIdx.x % (q_blocks + 2 * kv_blocks);
  const bool of_q = i < q_blocks, of_k = !of_q && i < q_blocks + kv_blocks;
  i -= of_q ? 0 : of_k ? q_blocks : q_blocks + kv_blocks;
  const int heads = of_q ? params.heads : params.kv_heads, block = of_q ? Q_ROWS : BLOCK_N;
  int tile = i % (of_q ? q_tiles : kv_tiles);
  const int head = i / (of_q ? q_tiles : kv_tiles), all_rows = of_q ? params.N : params.N_kv;
  const int* const cu_seqlens = of_q ? cu_seqlens_q : cu_seqlens_k;
  if (packed) find_tile(tile, sequence, block, params.sequences, cu_seqlens);
  const int first = packed ? cu_seqlens[sequence] : 0, first_row = tile * block;
  const int rows = (packed ? cu_seqlens[sequence + 1] - first : all_rows) - first_row;
  if (rows <= 0) return;  // the whole block, before any barrier: a shorter sequence

  // ---- its exponent, hi and lo
  const int index =
      exponent_index(block, tile, head, heads, sequence, first, all_rows, params.sequences);
  const int which = of_q ? 0 : of_k ? 1 : 2;
  const Strides strides = choose(which, params.q, params.k, params.v);
  const float* const source = choose(which, Q, K, V) + (packed ? 0 : sequence) * strides.batch +
                              head * strides.head + (first + first_row) * strides.row;
  const long long hi_head = 2ll * (packed ? 0 : sequence) * heads + head;
  __half* const hi = choose(which, q_split, k_split, v_split) +
                     (hi_head * all_rows + first + first_row) * HEAD_DIM;
  __half* const lo = hi + (long long)heads * all_rows * HEAD_DIM;
  if (of_q) split_rows<Q_ROWS>(source, strides.row, rows, hi, lo, q_exponents + index);
  else split_rows<BLOCK_N>(source, strides.row, rows, hi, lo, kv_exponents + 2 * index + !of_k);
}
