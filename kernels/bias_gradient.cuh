// What the gradients of a bias (11_bias_gradient.cu, and _mma.cu on tensor cores) have in common: which
// tile of the bias a block has, and which tiles of scores read it; the sums over a tile; and the kernels
// before and after, for delta, for partial sums and for sinks. Explained in 11's notebook.
//
// FORM     BIAS: an array (batches, heads, rows, keys), each axis of full length or 1
//          SLOPES (batches, heads) of ALiBi: dS is added times -|distance|
//          TABLE (heads, 2 * reach + 1) by distance (T5): a block has a diagonal of tiles, along
//          which the distance of two elements stays the same
// Launch   bias_gradient_delta: grid ceil(batch * heads * N / (BIAS_THREADS / 32))
//          bias_gradient_sum: grid ceil(numbers of the bias / (BIAS_THREADS / 32)), if it is split
//          sink_gradient: grid heads. All: block BIAS_THREADS, no dynamic shared memory
//
// Sizes    BLOCK and HEAD_DIM, as the kernel before defines them; BIAS_THREADS, its threads per block

#pragma once
#include "backward_params.cuh"
#include "hooks.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define BIAS 0
#define SLOPES 1
#define TABLE 2
#ifndef FORM
#define FORM BIAS
#endif
#ifndef BLOCK
#define BLOCK 64  // rows, and keys, of a tile
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O
#endif
#ifndef BIAS_THREADS
#define BIAS_THREADS 128
#endif

struct BiasParams {
  AttentionParams forward;
  Strides d_o;
  int batches, heads, rows, keys;  // of the bias; 1 where it is broadcast. TABLE: its width is keys
  int row_tiles, key_tiles;        // of the scores of the longest sequence
  int tiles;                       // of the bias of a head; TABLE: diagonals of tiles
  int splits;                      // blocks that share a tile of the bias
};

__device__ __forceinline__ float to_float(float a) { return a; }
__device__ __forceinline__ float to_float(__half a) { return __half2float(a); }
__device__ __forceinline__ float to_float(__nv_bfloat16 a) { return __bfloat162float(a); }
__device__ __forceinline__ void from_float(float& a, float x) { a = x; }
__device__ __forceinline__ void from_float(__half& a, float x) { a = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& a, float x) {
  a = __float2bfloat16_rn(x);
}

// ---- the tiles of a block

// A tile of the bias, and a share of the tiles of scores that read it.
struct BiasTile {
  int tile, split;  // its number in its head; of `splits` blocks that share it, this one
  int head, batch;  // of the bias
  long long place;  // how many heads of the bias are before it
  bool sum_rows, sum_keys;

  __device__ __forceinline__ explicit BiasTile(const BiasParams& params) {
    tile = blockIdx.x % params.tiles;
    split = blockIdx.x / params.tiles % params.splits;
    place = blockIdx.x / params.tiles / params.splits;
    head = place % params.heads;
    batch = place / params.heads;
    sum_rows = params.rows == 1;
    sum_keys = FORM != TABLE && params.keys == 1;
  }
  __device__ __forceinline__ int row_tile(const BiasParams& params) const {
    return sum_rows ? 0 : tile / (sum_keys ? 1 : params.key_tiles);
  }
  __device__ __forceinline__ int key_tile(const BiasParams& params) const {
    return sum_keys ? 0 : tile % params.key_tiles;
  }
};

// The tiles of scores of a block, one after the other, in the same order in every run: along the keys,
// the rows, the heads, the sequences; only along those axes over which the bias is broadcast. Tiles of
// which no row sees a key are left out.
struct ScoreTile {
  long long left;  // this one, and those after it
  int row_tile, key_tile, head, sequence;
  int q_first, k_first;      // where its sequence begins, if packed
  int q_len, kv_len, shift;  // row i is at key i + shift
  int first_row, first_key;  // the first key of a diagonal may be below 0
  int window_lo, window_hi;  // a row sees keys row + window_lo .. row + window_hi

  __device__ __forceinline__ ScoreTile(
      const BiasTile& bias, const BiasParams& params, int sequences, const int* cu_seqlens_q,
      const int* cu_seqlens_k) {
    const int key_steps = bias.sum_keys ? params.key_tiles : 1,
              row_steps = bias.sum_rows ? params.row_tiles : 1;
    const int head_steps = params.heads == 1 ? params.forward.heads : 1,
              batch_steps = params.batches == 1 ? sequences : 1;
    const long long steps = (long long)row_steps * key_steps * head_steps * batch_steps;
    const long long begin = steps * bias.split / params.splits;
    left = steps * (bias.split + 1) / params.splits - begin;
    key_tile = bias.sum_keys ? begin % key_steps : bias.key_tile(params);
    row_tile = bias.sum_rows ? begin / key_steps % row_steps : bias.row_tile(params);
    head = params.heads == 1 ? begin / key_steps / row_steps % head_steps : bias.head;
    sequence = params.batches == 1 ? begin / key_steps / row_steps / head_steps : bias.batch;
    find(bias, params, cu_seqlens_q, cu_seqlens_k);
  }
  __device__ __forceinline__ bool exists() const { return left > 0; }
  __device__ __forceinline__ void advance(
      const BiasTile& bias, const BiasParams& params, const int* cu_seqlens_q,
      const int* cu_seqlens_k) {
    step(bias, params);
    find(bias, params, cu_seqlens_q, cu_seqlens_k);
  }

 private:
  __device__ __forceinline__ void step(const BiasTile& bias, const BiasParams& params) {
    --left;
    if (bias.sum_keys && ++key_tile < params.key_tiles) return;
    if (bias.sum_keys) key_tile = 0;
    if (bias.sum_rows && ++row_tile < params.row_tiles) return;
    if (bias.sum_rows) row_tile = 0;
    if (params.heads == 1 && ++head < params.forward.heads) return;
    if (params.heads == 1) head = 0;
    ++sequence;
  }
  // This tile, or the next one of which some row sees some key.
  __device__ __forceinline__ void find(
      const BiasTile& bias, const BiasParams& params, const int* cu_seqlens_q,
      const int* cu_seqlens_k) {
    const AttentionParams& forward = params.forward;
    for (; left > 0; step(bias, params)) {
      const bool packed = cu_seqlens_q != nullptr;
      q_first = packed ? cu_seqlens_q[sequence] : 0;
      k_first = packed ? cu_seqlens_k[sequence] : 0;
      q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
      kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
      shift = kv_len - q_len;
      first_row = row_tile * BLOCK;
      // TABLE: diagonal 0 begins at the row's own position; those before it have smaller distances.
      first_key = FORM == TABLE ? first_row + shift + (bias.tile - params.key_tiles) * BLOCK
                                : key_tile * BLOCK;
      window_lo = shift - forward.window_left;
      window_hi = shift + forward.window_right;
      const int last_row = min(first_row + BLOCK, q_len) - 1,
                last_key = min(first_key + BLOCK, kv_len) - 1;
      if (last_row < first_row || last_key < max(first_key, 0)) continue;
      if (last_key >= first_row + window_lo && first_key <= last_row + window_hi) return;
    }
  }
};

// Whether a row sees a key; either may not exist.
__device__ __forceinline__ bool is_seen(
    const ScoreTile& tile, const Hooks& hooks, int row, int key) {
  return row < tile.q_len && key >= max(row + tile.window_lo, 0) &&
         key <= min(row + tile.window_hi, tile.kv_len - 1) &&
         !is_hidden(hooks, row + tile.shift, max(key, 0));
}

// ---- a tile of sums

using Sums = float[BLOCK][BLOCK + 1];

// Where a block's sums begin, of those of its head of the bias.
template <typename Result>
__device__ __forceinline__ Result* of_bias(
    Result* dBias, const BiasTile& bias, const BiasParams& params) {
  const long long numbers = (long long)params.batches * params.heads * params.rows * params.keys;
  return dBias + bias.split * numbers + bias.place * params.rows * params.keys;
}

// The sums of a tile over its rows, its keys, both, or along its diagonals, each by one thread. All
// threads have written their part of `sums`; a barrier follows.
template <typename Result>
__device__ __forceinline__ void add_and_store(
    Sums& sums, Result* dBias, const BiasTile& bias, const BiasParams& params) {
  __syncthreads();  // hazard: sums could be read before another thread has written its part

  if (FORM == TABLE) {  // element i + BLOCK: keys i after their row
    dBias += (((long long)bias.split * params.heads + bias.head) * params.tiles + bias.tile) *
             (2 * BLOCK);
    for (int i = threadIdx.x; i < 2 * BLOCK; i += BIAS_THREADS) {
      float sum = 0.0f;
      for (int r = max(BLOCK - i, 0); r < min(2 * BLOCK - i, BLOCK); ++r)
        sum += sums[r][r + i - BLOCK];
      from_float(dBias[i], sum);
    }
    return;
  }
  const int i = threadIdx.x;  // the thread's row, or its key
  float sum = 0.0f;
  if (i < BLOCK)
    for (int n = 0; n < BLOCK; ++n) sum += bias.sum_keys ? sums[i][n] : sums[n][i];
  if (bias.sum_rows && bias.sum_keys) {
    __syncthreads();  // hazard: row 0 could be overwritten while another thread reads it
    if (i < BLOCK) sums[0][i] = sum;
    __syncthreads();  // hazard: the sums of rows could be read before they are there
    sum = 0.0f;
    for (int n = 0; i == 0 && n < BLOCK; ++n) sum += sums[0][n];
  }
  const int at = (bias.sum_keys ? bias.row_tile(params) : bias.key_tile(params)) * BLOCK + i;
  if (i < BLOCK && at < (bias.sum_keys ? params.rows : params.keys))
    from_float(of_bias(dBias, bias, params)[at], sum);
}

// ---- before and after

// delta = rowsum(dO * O), one number per row, by one warp per row.
template <typename T>
__global__ void __launch_bounds__(BIAS_THREADS) bias_gradient_delta(
    const T* __restrict__ O, const T* __restrict__ dO, float* __restrict__ delta,
    const BiasParams params, long long rows) {
  // ---- a warp for each row
  const AttentionParams& forward = params.forward;
  const long long i = (long long)blockIdx.x * (BIAS_THREADS / 32) + threadIdx.x / 32;
  if (i >= rows) return;
  const long long row = i % forward.N, head = i / forward.N % forward.heads,
                  batch = i / forward.N / forward.heads;
  O += batch * forward.o.batch + row * forward.o.row + head * forward.o.head;
  dO += batch * params.d_o.batch + row * params.d_o.row + head * params.d_o.head;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < HEAD_DIM; c += 32) sum += to_float(dO[c]) * to_float(O[c]);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  if (threadIdx.x % 32 == 0) delta[i] = sum;
}

// A warp for each number of the bias: its lanes add partial sums, each its own share of them, and then
// each other's.
template <typename Result>
__global__ void __launch_bounds__(BIAS_THREADS) bias_gradient_sum(
    const float* __restrict__ partial, Result* __restrict__ dBias, const BiasParams params) {
  // ---- a warp for each number
  const long long numbers = (long long)params.batches * params.heads * params.rows * params.keys;
  const long long number = (long long)blockIdx.x * (BIAS_THREADS / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (number >= numbers) return;
  float sum = 0.0f;
#if FORM == TABLE
  // Distances low .. high read this number: beyond the ends of the table all those that are left. Each
  // has elements on two diagonals of tiles.
  const int reach = params.keys / 2, column = number % params.keys;
  const int least = 1 - params.key_tiles * BLOCK, most = params.row_tiles * BLOCK - 1;
  const int low = column == 0 ? least : max(column - reach, least);
  const int high = column == params.keys - 1 ? most : min(column - reach, most);
  for (int distance = low + lane; distance <= high; distance += 32) {
    const int above = distance + params.key_tiles * BLOCK;  // from the first diagonal's middle
    for (int split = 0; split < params.splits; ++split) {
      const float* of_head = partial + ((long long)split * params.heads + number / params.keys) *
                                           params.tiles * (2 * BLOCK);
      sum += of_head[above / BLOCK * (2 * BLOCK) + above % BLOCK + BLOCK];
      if (above % BLOCK != 0) sum += of_head[(above / BLOCK + 1) * (2 * BLOCK) + above % BLOCK];
    }
  }
#else
  for (int split = lane; split < params.splits; split += 32)
    sum += partial[split * numbers + number];
#endif
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  if (lane == 0) from_float(dBias[number], sum);
}

// A sink has the weight exp(sink - lse) and the value 0 in each row: dS = weight * (0 - delta).
extern "C" __global__ void __launch_bounds__(BIAS_THREADS) sink_gradient(
    const float* __restrict__ lse, const float* __restrict__ delta, const float* __restrict__ sinks,
    float* __restrict__ dSinks, int heads, int N, int batches) {
  // ---- a block for each head
  __shared__ float sums[BIAS_THREADS];
  const int head = blockIdx.x;
  float sum = 0.0f;
  for (int batch = 0; batch < batches; ++batch)
    for (int row = threadIdx.x; row < N; row += BIAS_THREADS) {
      const long long i = ((long long)batch * heads + head) * N + row;
      if (lse[i] != NEG_INF) sum -= exp2f(LOG2_E * (sinks[head] - lse[i])) * delta[i];
    }
  sums[threadIdx.x] = sum;
  for (int half = BIAS_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // hazard: sums could be read before another thread has written them
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dSinks[head] = sums[0];
}
