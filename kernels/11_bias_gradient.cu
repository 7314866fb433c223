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
// Launch   bias_gradient: grid tiles * splits * heads * batches of the bias, block THREADS, no dynamic
//          shared memory; FORM, and the launches before and after: see bias_gradient.cuh
// Shapes   as 08, of any T, strides in elements, rows contiguous at any address; packed as there
// Traffic  Q, K, dO, V: for each tile of scores, once; dBias once

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
#define THREADS_X 8  // threads that share a row
#define BIAS_THREADS THREADS
#include "bias_gradient.cuh"   // BiasTile, ScoreTile: which tiles a block has; the sums over a tile
#include "register_tiles.cuh"  // row_of, load_rows and the sizes of a thread's tile: 04

static_assert(TILE_N % 4 == 0 && THREADS >= BLOCK, "keys in groups of four, as rows are");

// SLICE columns of a tile, transposed: a thread reads four rows, or four keys, of a column as a float4.
using Columns = float[SLICE][BLOCK + 4];
struct __align__(16) Shared {
  Columns Q, dO, K, V;
  float lse[BLOCK], delta[BLOCK];  // lse in units of log2
};

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
  const BiasTile bias(params);
  __shared__ __align__(
      16) char memory[sizeof(Shared) > sizeof(Sums) ? sizeof(Shared) : sizeof(Sums)];
  Shared& smem = *reinterpret_cast<Shared*>(memory);
  const int x = threadIdx.x % THREADS_X, y = threadIdx.x / THREADS_X;
  const float scale = forward.softmax_scale, scale_log2 = scale_log2_of(scale);

  // ---- the tiles of scores, in the same order in every run: dS of each, added in registers
  float acc[TILE_M][TILE_N] = {};
  for (ScoreTile tile(bias, params, sequences, cu_seqlens_q, cu_seqlens_k); tile.exists();
       tile.advance(bias, params, cu_seqlens_q, cu_seqlens_k)) {
    const int sequence = tile.sequence, head = tile.head, first_row = tile.first_row,
              first_key = tile.first_key, q_first = tile.q_first, k_first = tile.k_first,
              q_len = tile.q_len, kv_len = tile.kv_len;
    const int kv_head = head / (forward.heads / forward.kv_heads);
    const long long of_row =
        ((long long)(cu_seqlens_q != nullptr ? 0 : sequence) * forward.heads + head) * forward.N;
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
        [&](int i) { return first_row + row_of(i, y) + tile.shift; },
        [&](int j) { return max(first_key + key_of(j, x), 0); }, false);
#pragma unroll
    for (int i = 0; i < TILE_M; ++i) {
      const int r = row_of(i, y), row = first_row + r;
      const float row_lse = smem.lse[r], row_delta = smem.delta[r];
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) {
        const int key = first_key + key_of(j, x);
        const float p = exp2f(scale_log2 * s[i][j] - row_lse);
        // Weights of 0 add nothing, also where dP is infinite or NaN.
        const float ds =
            p != 0.0f && is_seen(tile, hooks, row, key) ? p * (dp[i][j] - row_delta) : 0.0f;
        acc[i][j] += FORM == SLOPES ? -fabsf(row + tile.shift - key) * ds : ds;
      }
    }
  }

  // ---- epilogue: each number of the bias by one thread
  if (FORM == BIAS && !bias.sum_rows && !bias.sum_keys) {
    dBias = of_bias(dBias, bias, params);
#pragma unroll
    for (int i = 0; i < TILE_M; ++i)
#pragma unroll
      for (int j = 0; j < TILE_N; ++j) {
        const int row = bias.row_tile(params) * BLOCK + row_of(i, y),
                  key = bias.key_tile(params) * BLOCK + key_of(j, x);
        if (row < params.rows && key < params.keys)
          from_float(dBias[(long long)row * params.keys + key], acc[i][j]);
      }
    return;
  }
  Sums& sums = *reinterpret_cast<Sums*>(memory);
  __syncthreads();  // hazard: columns could be overwritten while another thread reads them
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j) sums[row_of(i, y)][key_of(j, x)] = acc[i][j];
  add_and_store(sums, dBias, bias, params);
}
