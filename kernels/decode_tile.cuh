// The tile of 14 and of its steps: its sizes, which tokens and heads its rows are, which keys they
// see, and the results of the warps and blocks that share it. Explained in 14's notebook.

#pragma once
#include "decode_params.cuh"
#include "merge_states.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef K_COLUMNS
#define K_COLUMNS HEAD_DIM  // of Q and K in memory, whole chunks; a tile has zeros behind them
#endif
#ifndef V_COLUMNS
#define V_COLUMNS HEAD_DIM  // the same of V and O
#endif
#ifndef BLOCK_N
#define BLOCK_N 16  // keys per tile of a warp: 16 or 32
#endif
#ifndef WARPS
#define WARPS 8  // per block; each has the same rows, and keys of its own
#endif
#ifndef STAGES
#define STAGES 3  // tiles of K and V of a warp that are in shared memory, or on their way
#endif
#ifndef CACHE_E4M3
#define CACHE_E4M3 0  // 1: the cache holds e4m3, see e4m3_cache.cuh
#endif
#ifndef STATE_ROWS
#define STATE_ROWS 8  // at least the rows of a tile that a head of a token has: 1, 2, 4, 8 or 16
#endif

constexpr int TILE_ROWS = 16;        // of an MMA atom
#define BLOCK_M (TILE_ROWS * WARPS)  // so that mma_tiles.cuh gives each warp 16 rows
#include "mma_tiles.cuh"

template <typename T>
constexpr int ROW_CHUNKS = HEAD_DIM * sizeof(T) / 16;  // of 16 bytes in a row
template <typename T>
constexpr unsigned CACHE_BYTES = CACHE_E4M3 ? 1 : sizeof(T);  // of a number of K or V
template <typename T>
constexpr unsigned TILE_BYTES = BLOCK_N * HEAD_DIM * CACHE_BYTES<T>;
constexpr int STATE_STRIDE = HEAD_DIM + 8;  // floats; 8 more, so that rows are in different banks
// Where the rings, the warps' acc and their m and l begin in shared memory, behind Q; and its size.
template <typename T>
constexpr unsigned RING_BEGIN = TILE_ROWS * HEAD_DIM * sizeof(T);
template <typename T>
constexpr unsigned STATES_BEGIN = RING_BEGIN<T> + WARPS * STAGES * 2 * TILE_BYTES<T>;
template <typename T>
constexpr unsigned ML_BEGIN = STATES_BEGIN<T> + WARPS * STATE_ROWS * 4 * STATE_STRIDE;
template <typename T>
constexpr unsigned SHARED_BYTES = ML_BEGIN<T> + WARPS * STATE_ROWS * 8;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "lanes copy whole rows");
static_assert(K_COLUMNS <= HEAD_DIM && V_COLUMNS <= HEAD_DIM, "a tile has the columns of both");
static_assert(BLOCK_N <= 32, "a lane finds the page of a key");

// Whether a chunk of 16 bytes of a row is in memory: without a test, where all are.
template <int COLUMNS, unsigned BYTES>
__device__ __forceinline__ bool has_chunk(int chunk) {
  static_assert(COLUMNS * BYTES % 16 == 0, "whole chunks");
  return COLUMNS == HEAD_DIM || chunk < int(COLUMNS * BYTES / 16);
}

// Rows of a tile: row r is token r / group and head r % group of the unit's, `group` heads each.
struct Rows {
  const AttentionParams& params;
  int group, first;  // of the tile, its first row
  int count;         // in the tile

  __device__ __forceinline__ Rows(const AttentionParams& params, int group)
      : params(params),
        group(group),
        first(blockIdx.y * TILE_ROWS),
        count(min(params.N * group - first, TILE_ROWS)) {}

  __device__ __forceinline__ int token(int r) const {
    return min((first + r) / group, params.N - 1);
  }
  __device__ __forceinline__ int head(int unit, int r) const {
    return unit * group + (first + r) % group;
  }
  __device__ __forceinline__ long long offset(
      const Strides& strides, int sequence, int unit, int r) const {
    return sequence * strides.batch + token(r) * strides.row + head(unit, r) * strides.head;
  }

  // Q's rows into shared memory, zeros for those that are not there.
  template <typename T>
  __device__ __forceinline__ void load(
      unsigned char* Q_smem, const T* Q, int sequence, int unit) const {
    for (int i = threadIdx.x; i < TILE_ROWS * ROW_CHUNKS<T>; i += THREADS) {
      const int r = i / ROW_CHUNKS<T>, chunk = i % ROW_CHUNKS<T>;
      const uint4* from = reinterpret_cast<const uint4*>(Q + offset(params.q, sequence, unit, r));
      *reinterpret_cast<uint4*>(Q_smem + swizzle<ROW_CHUNKS<T>>(r, chunk)) =
          r < count && has_chunk<K_COLUMNS, sizeof(T)>(chunk) ? from[chunk]
                                                              : make_uint4(0, 0, 0, 0);
    }
  }

  // Four columns of a row of O, and the row's lse.
  template <typename T>
  __device__ __forceinline__ void store(
      T* O, float* lse, int sequence, int unit, int r, int column, const State& sum) const {
    const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;  // no key: zeros, lse = -inf
    if (lse && column == 0)
      lse[((long long)sequence * params.heads + head(unit, r)) * params.N + token(r)] =
          LN_2 * (sum.m + log2f(sum.l));
    if (V_COLUMNS == HEAD_DIM || column < V_COLUMNS)
      store4(
          O + offset(params.o, sequence, unit, r) + column,
          make_float4(sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse));
  }
};

// The keys that some row of the tile sees, in a sequence. The last token is at the last key.
struct Keys {
  int before;              // keys in the cache before this launch
  int q_pos;               // the key at which the first token is
  int begin, end;          // keys begin .. end - 1 are seen
  int all_begin, all_end;  // and by all rows, these
  int tile, tiles;         // the first, and how many; one where there is no key: it gives zeros

  __device__ __forceinline__ Keys(
      const DecodeParams& params, const Rows& rows, const int* cache_seqlens, bool appends,
      int sequence) {
    const AttentionParams& a = params.attention;
    const int more = appends ? a.N : 0;
    before = min(max(cache_seqlens[sequence], 0), a.N_kv - more);  // never past the cache's end
    q_pos = before + more - a.N;
    const int first_pos = q_pos + rows.token(0), last_pos = q_pos + rows.token(TILE_ROWS - 1);
    begin = max(first_pos - a.window_left, 0);
    end = min(last_pos + a.window_right + 1, before + more);
    all_begin = max(last_pos - a.window_left, 0);
    all_end = min(first_pos + a.window_right + 1, end);
    tile = begin / BLOCK_N;
    tiles = max((end + BLOCK_N - 1) / BLOCK_N - tile, 1);
  }
  __device__ __forceinline__ int first_key(int i) const { return (tile + i) * BLOCK_N; }
  __device__ __forceinline__ bool is_seen(int key) const { return key >= begin && key < end; }
};

// A key that a row does not see scores -inf, in a tile that not all rows see whole.
__device__ __forceinline__ void mask_tile(
    Scores& S, const Keys& keys, const Rows& rows, int first_key) {
  if (first_key >= keys.all_begin && first_key + BLOCK_N <= keys.all_end) return;
  const int g = threadIdx.x % 32 / 4, key = first_key + 2 * (threadIdx.x % 4);  // this lane's first
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pos = keys.q_pos + rows.token(g + 8 * i);
    const int low = pos - rows.params.window_left - key;
    const int high = min(pos + rows.params.window_right + 1, keys.end) - key;
    const unsigned seen = keys_before<BLOCK_N>(high) & ~keys_before<BLOCK_N>(low);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 4; ++j)
      if (!(seen >> j & 1)) row_pair(S, i, j / 2)[j % 2] = NEG_INF;
  }
}

// A warp's results into shared memory, and back, four columns of a row.
template <typename T>
__device__ __forceinline__ void store_state(
    unsigned char* smem, const Maxima& maxima, const Statistics& l_i, Output& acc) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < (STATE_ROWS + 7) / 8; ++i) {
    const float sum = row_allreduce(l_i[i], [](float x, float y) { return x + y; });
    if (g >= STATE_ROWS) break;
    const int row = warp * STATE_ROWS + g + 8 * i;
    float* o = reinterpret_cast<float*>(smem + STATES_BEGIN<T>) + row * STATE_STRIDE + 2 * t;
    if (t == 0)
      reinterpret_cast<float2*>(smem + ML_BEGIN<T>)[row] =
          make_float2(maxima.m_i[i] + maxima.base[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      *reinterpret_cast<float2*>(o + 8 * n) =
          make_float2(row_pair(acc, i, n)[0], row_pair(acc, i, n)[1]);
  }
}

template <typename T>
__device__ __forceinline__ State
load_state(const unsigned char* smem, int warp, int row, int column) {
  const int r = warp * STATE_ROWS + row;
  const float2 ml = reinterpret_cast<const float2*>(smem + ML_BEGIN<T>)[r];
  const float* o = reinterpret_cast<const float*>(smem + STATES_BEGIN<T>) + r * STATE_STRIDE;
  return {ml.x, ml.y, *reinterpret_cast<const float4*>(o + column)};
}

// A part of a unit, on its way through global memory to the block that merges. `slot` counts parts.
struct Parts {
  float* o;    // [slots, STATE_ROWS, HEAD_DIM]
  float2* ml;  // [slots, STATE_ROWS]

  __device__ __forceinline__ void store(int slot, int row, int column, const State& sum) const {
    const long long r = (long long)slot * STATE_ROWS + row;
    *reinterpret_cast<float4*>(o + r * HEAD_DIM + column) = sum.o;
    if (column == 0) ml[r] = make_float2(sum.m, sum.l);
  }
  __device__ __forceinline__ State load(int slot, int row, int column) const {
    const long long r = (long long)slot * STATE_ROWS + row;
    const float2 of_row = __ldcg(ml + r);  // from the L2 cache, where other blocks have put it
    return {of_row.x, of_row.y, __ldcg(reinterpret_cast<const float4*>(o + r * HEAD_DIM + column))};
  }
};

// Draws a ticket for a part of a unit. True in the block that comes last, which may read all parts.
// Written out in steps/14_04_last_block.cu.
__device__ __forceinline__ bool comes_last(int* ticket, int parts) {
  __shared__ bool is_last;
  __threadfence();  // hazard: the ticket could be seen before this part
  __syncthreads();  // hazard: the ticket could be drawn before all threads have written
  // atomicInc goes back to 0 with the last part: ready for the next launch.
  if (threadIdx.x == 0)
    is_last = atomicInc(reinterpret_cast<unsigned*>(ticket), parts - 1) == parts - 1;
  __syncthreads();  // hazard: is_last could be read before it is there
  if (!is_last) return false;
  __threadfence();  // hazard: parts could be read before the ticket
  return true;
}
