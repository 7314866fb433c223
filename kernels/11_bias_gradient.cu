// 11 bias gradient: the gradients of what is added to the scores, with the same bits in every run.
//
//   dBias = dS = P * (dP - delta), as in 08, summed over the axes along which the bias is broadcast
//
// Atomic additions would take an order that differs from run to run. Here a block has a tile of
// the bias, not of K: it goes through the tiles of scores that read it in a fixed order, computes
// dS of each again, and adds it up in registers. Over the rows or keys of a tile it adds once, after
// the loop. A bias with few tiles is split: several blocks have the same tile and a share of the
// scores each, and another launch adds what they found, in the order of their numbers.
//
// FORM     BIAS: an array (batches, heads, rows, keys), each axis of full length or 1
//          SLOPES (batches, heads) of ALiBi: dS is added times -|distance|
//          TABLE (heads, 2 * reach + 1) by distance (T5): a block has a diagonal of tiles, along
//          which the distance of two elements stays the same
// Launch   bias_gradient_delta: grid ceil(batch * heads * N / (THREADS / 32))
//          bias_gradient: grid tiles * splits * heads * batches of the bias
//          bias_gradient_sum: grid ceil(numbers of the bias / (THREADS / 32)), if it is split
//          sink_gradient: grid heads. All: block THREADS, no dynamic shared memory
// Shapes   as 08, of any T, strides in elements, rows contiguous at any address; packed as there
// Traffic  Q, K, dO, V: for each tile of scores, once; dBias once

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
#ifndef SLICE
#define SLICE 16  // columns of Q, K, dO and V in shared memory at a time
#endif
#ifndef THREADS
#define THREADS 128  // per block
#endif
#define BLOCK_M BLOCK
#define BLOCK_N BLOCK
#define THREADS_X 8            // threads that share a row
#include "register_tiles.cuh"  // row_of, load_rows and the sizes of a thread's tile: 04

static_assert(TILE_N % 4 == 0 && THREADS >= BLOCK, "keys in groups of four, as rows are");

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

// SLICE columns of a tile, transposed: a thread reads four rows, or four keys, of a column as a float4.
using Columns = float[SLICE][BLOCK + 4];
struct __align__(16) Shared {
  Columns Q, dO, K, V;
  float lse[BLOCK], delta[BLOCK];  // lse in units of log2
};
using Tile = float[BLOCK][BLOCK + 1];

// The key within the tile that is key j of a thread's: groups of four, as row_of has them for rows.
__device__ __forceinline__ int key_of(int j, int x) {
  return j / 4 * (4 * THREADS_X) + 4 * x + j % 4;
}

__device__ __forceinline__ void load_keys(float (&b)[TILE_N], const float* column, int x) {
#pragma unroll
  for (int j = 0; j < TILE_N; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(column + key_of(j, x));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[j + i] = word(four, i);
  }
}

// The block copies columns from first_column on of rows first .. first + BLOCK - 1; zeros outside of
// 0 .. end - 1 and past the end of a row. `first` may be below 0.
template <typename T>
__device__ __forceinline__ void load_columns(
    Columns& tile, const T* __restrict__ source, long long stride, int first, int end,
    int first_column) {
#pragma unroll 4
  for (int e = threadIdx.x; e < BLOCK * SLICE; e += THREADS) {
    const int c = e % SLICE, r = e / SLICE;
    const bool in_bounds = first + r >= 0 && first + r < end && first_column + c < HEAD_DIM;
    tile[c][r] = in_bounds ? to_float(source[(first + r) * stride + first_column + c]) : 0.0f;
  }
}

// delta = rowsum(dO * O), one number per row, by one warp per row.
template <typename T>
__global__ void __launch_bounds__(THREADS) bias_gradient_delta(
    const T* __restrict__ O, const T* __restrict__ dO, float* __restrict__ delta,
    const BiasParams params, long long rows) {
  // ---- a warp for each row
  const AttentionParams& forward = params.forward;
  const long long i = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
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

// Result: the type of the bias; float where it is split, and dBias is the array of partial sums.
template <typename T, typename Result>
__global__ void __launch_bounds__(THREADS) bias_gradient(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const T* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ delta,
    Result* __restrict__ dBias,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BiasParams params, int sequences HOOK_PARAMETERS) {
  // ---- prologue: the tile of the bias, and this block's share of the tiles of scores that read it
  const AttentionParams& forward = params.forward;
  const int tile = blockIdx.x % params.tiles, split = blockIdx.x / params.tiles % params.splits;
  const int place = blockIdx.x / params.tiles / params.splits;
  const int bias_head = place % params.heads, bias_batch = place / params.heads;
  const bool sum_rows = params.rows == 1, sum_keys = FORM == TABLE ? false : params.keys == 1;
  const int key_steps = sum_keys ? params.key_tiles : 1;
  const long long tile_steps = (sum_rows ? (long long)params.row_tiles : 1) * key_steps;
  const int summed_heads = params.heads == 1 ? forward.heads : 1;
  const int summed_batches = params.batches == 1 ? sequences : 1;
  const long long steps = tile_steps * summed_heads * summed_batches;
  const long long begin = steps * split / params.splits, end = steps * (split + 1) / params.splits;

  __shared__ __align__(
      16) char memory[sizeof(Shared) > sizeof(Tile) ? sizeof(Shared) : sizeof(Tile)];
  Shared& smem = *reinterpret_cast<Shared*>(memory);
  const int x = threadIdx.x % THREADS_X, y = threadIdx.x / THREADS_X;
  const float scale = forward.softmax_scale, scale_log2 = scale_log2_of(scale);

  // ---- the tiles of scores, in the same order in every run: dS of each, added in registers
  float acc[TILE_M][TILE_N] = {};
  for (long long step = begin; step < end; ++step) {
    const long long inner = step % tile_steps;
    const int head = params.heads == 1 ? step / tile_steps % summed_heads : bias_head;
    const int sequence = params.batches == 1 ? step / tile_steps / summed_heads : bias_batch;
    const bool packed = cu_seqlens_q != nullptr;
    const int q_first = packed ? cu_seqlens_q[sequence] : 0;
    const int k_first = packed ? cu_seqlens_k[sequence] : 0;
    const int q_len = packed ? cu_seqlens_q[sequence + 1] - q_first : forward.N;
    const int kv_len = packed ? cu_seqlens_k[sequence + 1] - k_first : forward.N_kv;
    const int shift = kv_len - q_len;  // row i is at key i + shift
    const int row_tile = sum_rows ? inner / key_steps : tile / (sum_keys ? 1 : params.key_tiles);
    const int key_tile = sum_keys ? inner % key_steps : tile % params.key_tiles;
    const int first_row = row_tile * BLOCK;
    // TABLE: diagonal 0 begins at the row's own position; those before it have smaller distances.
    const int first_key =
        FORM == TABLE ? first_row + shift + (tile - params.key_tiles) * BLOCK : key_tile * BLOCK;

    // A row sees keys row + window_lo .. row + window_hi. The whole block leaves out what none sees.
    const int window_lo = shift - forward.window_left, window_hi = shift + forward.window_right;
    const int last_row = min(first_row + BLOCK, q_len) - 1,
              last_key = min(first_key + BLOCK, kv_len) - 1;
    if (last_row < first_row || last_key < max(first_key, 0)) continue;
    if (last_key < first_row + window_lo || first_key > last_row + window_hi) continue;

    const int kv_head = head / (forward.heads / forward.kv_heads);
    const long long of_row =
        ((long long)(packed ? 0 : sequence) * forward.heads + head) * forward.N;
    const T* q = Q + sequence * forward.q.batch + q_first * forward.q.row + head * forward.q.head;
    const T* d_o =
        dO + sequence * params.d_o.batch + q_first * params.d_o.row + head * params.d_o.head;
    const T* k =
        K + sequence * forward.k.batch + k_first * forward.k.row + kv_head * forward.k.head;
    const T* v =
        V + sequence * forward.v.batch + k_first * forward.v.row + kv_head * forward.v.head;

    float s[TILE_M][TILE_N] = {}, dp[TILE_M][TILE_N] = {};
    for (int column = 0; column < HEAD_DIM; column += SLICE) {
      __syncthreads();  // hazard: columns, lse and delta could be overwritten while in use
      load_columns(smem.Q, q, forward.q.row, first_row, q_len, column);
      load_columns(smem.dO, d_o, params.d_o.row, first_row, q_len, column);
      load_columns(smem.K, k, forward.k.row, first_key, kv_len, column);
      load_columns(smem.V, v, forward.v.row, first_key, kv_len, column);
      for (int r = threadIdx.x; column == 0 && r < BLOCK; r += THREADS) {
        const bool exists = first_row + r < q_len;
        const float l = exists ? lse[of_row + q_first + first_row + r] : NEG_INF;
        smem.lse[r] = l == NEG_INF ? 1e38f : LOG2_E * l;  // a row that sees no key: weights of 0
        smem.delta[r] = exists ? delta[of_row + q_first + first_row + r] : 0.0f;
      }
      __syncthreads();  // hazard: columns could be read before other threads have written their part
#pragma unroll 4
      for (int c = 0; c < SLICE; ++c) {
        float row[TILE_M], key[TILE_N];
        load_rows(row, smem.Q[c], y);
        load_keys(key, smem.K[c], x);
        outer_product(s, row, key);
        load_rows(row, smem.dO[c], y);
        load_keys(key, smem.V[c], x);
        outer_product(dp, row, key);
      }
    }

    // Scores as the forward had them, with all that is added to them.
    const Hooks hooks = {HOOK_ARGUMENTS sequence, head, kv_head, q_len, kv_len};
    modify<TILE_M, TILE_N>(
        hooks, scale, 1.0f, [&](int i, int j) -> float& { return s[i][j]; },
        [&](int i) { return first_row + row_of(i, y) + shift; },
        [&](int j) { return max(first_key + key_of(j, x), 0); }, false);
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      const int r = row_of(i, y), row = first_row + r;
      const float row_lse = smem.lse[r], row_delta = smem.delta[r];
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) {
        const int key = first_key + key_of(j, x);
        const bool seen = row < q_len && key >= max(row + window_lo, 0) &&
                          key <= min(row + window_hi, kv_len - 1) &&
                          !is_hidden(hooks, row + shift, max(key, 0));
        const float p = exp2f(scale_log2 * s[i][j] - row_lse);
        // Weights of 0 add nothing, also where dP is infinite or NaN.
        const float ds = seen && p != 0.0f ? p * (dp[i][j] - row_delta) : 0.0f;
        acc[i][j] += FORM == SLOPES ? -fabsf(row + shift - key) * ds : ds;
      }
    }
  }

  // ---- epilogue: each number of the bias by one thread
  const long long numbers = (long long)params.batches * params.heads * params.rows * params.keys;
  if (FORM != TABLE) dBias += split * numbers + (long long)place * params.rows * params.keys;
  const int first_row = sum_rows ? 0 : tile / (sum_keys ? 1 : params.key_tiles) * BLOCK;
  const int first_key = sum_keys ? 0 : tile % params.key_tiles * BLOCK;
  if (FORM == BIAS && !sum_rows && !sum_keys) {
#pragma unroll
    for (int i = 0; i < TILE_M; ++i)
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) {
        const int row = first_row + row_of(i, y), key = first_key + key_of(j, x);
        if (row < params.rows && key < params.keys)
          from_float(dBias[(long long)row * params.keys + key], acc[i][j]);
      }
    return;
  }
  Tile& sums = *reinterpret_cast<Tile*>(memory);
  __syncthreads();  // hazard: columns could be overwritten while another thread reads them
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) sums[row_of(i, y)][key_of(j, x)] = acc[i][j];
  __syncthreads();  // hazard: sums could be read before another thread has written its part

  if (FORM == TABLE) {  // element i + BLOCK: of the keys i behind their row
    dBias += (((long long)split * params.heads + bias_head) * params.tiles + tile) * (2 * BLOCK);
    for (int i = threadIdx.x; i < 2 * BLOCK; i += THREADS) {
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
    for (int n = 0; n < BLOCK; ++n) sum += sum_keys ? sums[i][n] : sums[n][i];
  if (sum_rows && sum_keys) {
    __syncthreads();  // hazard: row 0 could be overwritten while another thread reads it
    if (i < BLOCK) sums[0][i] = sum;
    __syncthreads();  // hazard: the sums of rows could be read before they are there
    sum = 0.0f;
    for (int n = 0; i == 0 && n < BLOCK; ++n) sum += sums[0][n];
  }
  const int at = sum_keys ? first_row + i : first_key + i;
  if (i < BLOCK && at < (sum_keys ? params.rows : params.keys)) from_float(dBias[at], sum);
}

// A warp for each number of the bias: its lanes add partial sums, each its own share of them, and then
// each other's.
template <typename Result>
__global__ void __launch_bounds__(THREADS) bias_gradient_sum(
    const float* __restrict__ partial, Result* __restrict__ dBias, const BiasParams params) {
  // ---- a warp for each number
  const long long numbers = (long long)params.batches * params.heads * params.rows * params.keys;
  const long long number = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
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
extern "C" __global__ void __launch_bounds__(THREADS) sink_gradient(
    const float* __restrict__ lse, const float* __restrict__ delta, const float* __restrict__ sinks,
    float* __restrict__ dSinks, int heads, int N, int batches) {
  // ---- a block for each head
  __shared__ float sums[THREADS];
  const int head = blockIdx.x;
  float sum = 0.0f;
  for (int batch = 0; batch < batches; ++batch)
    for (int row = threadIdx.x; row < N; row += THREADS) {
      const long long i = ((long long)batch * heads + head) * N + row;
      if (lse[i] != NEG_INF) sum -= exp2f(LOG2_E * (sinks[head] - lse[i])) * delta[i];
    }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // hazard: sums could be read before another thread has written them
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dSinks[head] = sums[0];
}
