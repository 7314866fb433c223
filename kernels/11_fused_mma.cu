// 11 fused_mma: what stands beside attention in a model, in the kernel that has the scores and the
// tiles. Else as 07.
//
// Since 07: a tile of the bias (BIAS) comes by cp.async, while the products of the tile before are
// computed, and by ldmatrix, which hands a lane the elements of its own scores: S's accumulators
// have the layout of a left operand. ALIBI needs no array (Press et al., 2022): left of the
// diagonal -slope |i - j| is a term of the row, which goes into the maximum, and one of the column,
// with which the accumulators begin. ROTARY rotates Q and K in shared memory, each row by the warp
// that copied it (Su et al., 2021).
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 32 WARPS, 2
//          HEAD_DIM_PADDED (BLOCK_M + 4 BLOCK_N) bytes of dynamic shared memory, and BLOCK_M
//          BLOCK_N sizeof(Bias) with a bias
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float16 or
//          bfloat16, strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with
//          cu_seqlens. lse (batch, heads, N) or (heads, tokens). bias (batch, heads, N, N_kv),
//          alibi_slopes (batch, heads), rotary_cos, rotary_sin (positions, ROTARY_DIM / 2),
//          q_positions (batch, N), k_positions (batch, N_kv)
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes; ROTARY_DIM a multiple
//          of 16
// Traffic  Q, O and bias once; K, V and the tables: for each tile of rows, from the first key that
//          one of them sees to the last
#include "block.cuh"  // Block, Window: 05
#include "fused_params.cuh"

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
#ifndef BIAS
#define BIAS 0  // added to the scaled scores: Q's type (1), float32 (2); bool (3): may be seen
#endif
#ifndef BIAS_VECTOR
#define BIAS_VECTOR 1  // rows of the bias are contiguous, at multiples of 16 bytes
#endif
#ifndef ALIBI
#define ALIBI 0  // 1: -slope |distance| is added to the scaled scores
#endif
#ifndef ROTARY
#define ROTARY 0  // 1: words p and p + ROTARY_DIM / 2 of Q and K are rotated; 2: 2 p and 2 p + 1
#endif
#ifndef ROTARY_DIM
#define ROTARY_DIM (HEAD_DIM / 16 * 16)  // words of a row that are rotated: the first ones
#endif
#ifndef ROTARY_FLOAT
#define ROTARY_FLOAT 0  // 1: the tables are float32, not of the type of Q
#endif

#include "mma_tiles.cuh"  // 07: what a warp does with its tile
static_assert(HEAD_DIM <= 256, "acc must fit the registers");

#if BIAS == 2
template <typename T>
using Bias = float;
#elif BIAS == 3
template <typename T>
using Bias = bool;
#else
template <typename T>
using Bias = T;
#endif
#if ROTARY_FLOAT
template <typename T>
using Table = float;
#else
template <typename T>
using Table = T;
#endif

#if BIAS
// The bias has a tile of its own, with a part for each warp, which alone copies and reads it: no
// barrier of the block is needed. Chunks of 16 bytes are swizzled as those of K are.
constexpr int WARP_ROWS = 16 * TILES_M;
constexpr unsigned BIAS_BYTES = BIAS == 1 ? 2 : BIAS == 2 ? 4 : 1;  // of an element
constexpr unsigned BIAS_ROW = BLOCK_N * BIAS_BYTES, BIAS_CHUNKS = BIAS_ROW / 16;
constexpr unsigned BIAS_SPAN = BIAS_CHUNKS % 8 == 0   ? 8
                               : BIAS_CHUNKS % 4 == 0 ? 4
                               : BIAS_CHUNKS % 2 == 0 ? 2
                                                      : 1;

__device__ __forceinline__ unsigned bias_offset(unsigned row, unsigned byte) {
  constexpr unsigned SPAN = BIAS_SPAN;
  const unsigned chunk = byte / 16;
  return row * BIAS_ROW + 16 * (chunk / SPAN * SPAN + (chunk % SPAN ^ row / (8 / SPAN) % SPAN)) +
         byte % 16;
}

// The same row, further on, by bytes whose bits the first offset in the row does not have: as
// swizzle_advance.
__device__ __forceinline__ unsigned bias_advance(unsigned offset, unsigned bytes) {
  constexpr unsigned WIDTH = 16 * BIAS_SPAN;
  return (offset ^ bytes % WIDTH) + bytes / WIDTH * WIDTH;
}

// This warp's rows of the bias, from `source` on. There are rows_left rows and keys_left keys;
// out-of-range entries are unspecified: such keys get masked, and such rows are not stored.
template <typename T>
__device__ __forceinline__ void load_bias(
    unsigned char* tile, const Bias<T>* __restrict__ source, const FusedParams& fused,
    int rows_left, int keys_left) {
  const int lane_id = threadIdx.x % 32;
#if BIAS_VECTOR
  constexpr int LANES = BIAS_CHUNKS % 4 == 0   ? 4
                        : BIAS_CHUNKS % 2 == 0 ? 2
                                               : 1;          // that share a row
  constexpr int STEP = 32 / LANES, CHUNK = 16 / BIAS_BYTES;  // rows at a time; keys
  const int row = lane_id / LANES, chunk = lane_id % LANES;
  const unsigned target = smem_address(tile) + bias_offset(row, 16 * chunk);
  source += row * fused.bias_row + chunk * CHUNK;
  rows_left -= row;
  keys_left -= chunk * CHUNK;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i += STEP, source += STEP * fused.bias_row) {
    if (STEP > WARP_ROWS && row >= WARP_ROWS) break;
#pragma unroll
    for (int j = 0; j < BIAS_CHUNKS; j += LANES) {
      const int keys = i < rows_left ? min(max(keys_left - j * CHUNK, 0), CHUNK) : 0;
      cp_async(bias_advance(target, 16 * j) + i * BIAS_ROW, source + j * CHUNK, keys * BIAS_BYTES);
    }
  }
#else
#pragma unroll 4
  for (int e = lane_id; e < WARP_ROWS * BLOCK_N; e += 32) {
    const int row = e / BLOCK_N, key = e % BLOCK_N;
    const bool in_bounds = row < rows_left && key < keys_left;
    *reinterpret_cast<Bias<T>*>(tile + bias_offset(row, key * BIAS_BYTES)) =
        in_bounds ? source[row * fused.bias_row + key * fused.bias_key] : Bias<T>(0);
  }
#endif
}

// S, with which the product begins: bias / softmax_scale; -inf where a key is hidden, and whatever
// is added to it.
template <typename T>
__device__ __forceinline__ void add_bias(
    Scores& S, const unsigned char* tile, float inverse_scale) {
  const int lane_id = threadIdx.x % 32;
#if BIAS == 1
  const unsigned first = smem_address(tile) + bias_offset(lane_id % 16, lane_id / 16 * 16);
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned pairs[4];
      ldmatrix_x4(pairs, bias_advance(first, 32 * n) + 16 * m * BIAS_ROW);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 b = unpack(T(), pairs[i]);
        float* s = &S[m][2 * n + i / 2][i % 2 * 2];
        s[0] = fmaf(b.x, inverse_scale, s[0]);
        s[1] = fmaf(b.y, inverse_scale, s[1]);
      }
    }
#else
  const unsigned first = bias_offset(lane_id / 4, lane_id % 4 * 2 * BIAS_BYTES);
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      const unsigned char* pair = tile + bias_advance(first, 8 * n * BIAS_BYTES) + 8 * i * BIAS_ROW;
      float* s = &row_pair(S, i, n)[0];
#if BIAS == 2
      const float2 b = *reinterpret_cast<const float2*>(pair);
      s[0] = fmaf(b.x, inverse_scale, s[0]);
      s[1] = fmaf(b.y, inverse_scale, s[1]);
#else
      const uchar2 seen = *reinterpret_cast<const uchar2*>(pair);
      if (!seen.x) s[0] = NEG_INF;
      if (!seen.y) s[1] = NEG_INF;
#endif
    }
#endif
}
#endif

#if ROTARY
// Eight words of a row of a rotary table.
__device__ __forceinline__ void load_angles(float (&a)[8], const float* __restrict__ row) {
  const float4 low = reinterpret_cast<const float4*>(row)[0],
               high = reinterpret_cast<const float4*>(row)[1];
  const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = eight[i];
}

template <typename T>
__device__ __forceinline__ void load_angles(float (&a)[8], const T* __restrict__ row) {
  const uint4 four = *reinterpret_cast<const uint4*>(row);
  const unsigned pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack(T(), pairs[i]);
    a[2 * i] = both.x;
    a[2 * i + 1] = both.y;
  }
}

// Rotates the rows of a tile that this warp copied, two chunks of eight words at a time: those that
// hold eight pairs. Row r is at positions[r], or at first_pos + r where there are none.
template <int TILE_ROWS, typename T>
__device__ __forceinline__ void rotate(
    unsigned char* tile, const Table<T>* __restrict__ rotary_cos,
    const Table<T>* __restrict__ rotary_sin, const int* __restrict__ positions, int first_pos,
    int rows_left, const FusedParams& fused) {
  constexpr int PAIRS = ROTARY_DIM / 16;                     // of chunks in a row
  constexpr int STEP = THREADS / SPAN, OF_WARP = 32 / SPAN;  // rows that load_tile copies at a time
  constexpr int MY_ROWS = (TILE_ROWS + STEP - 1) / STEP * OF_WARP;
#pragma unroll 4  // at 8, as many as Q has at HEAD_DIM = 128, registers spill
  for (int e = threadIdx.x % 32; e < MY_ROWS * PAIRS; e += 32) {
    const int mine = e / PAIRS, pair = e % PAIRS;
    const int r = mine / OF_WARP * STEP + threadIdx.x / 32 * OF_WARP + mine % OF_WARP;
    if (r >= min(rows_left, TILE_ROWS)) continue;
    // Positions are clamped to the tables' rows, so that none is read past them, whoever gave it.
    const long long pos =
        min(max(positions ? positions[r] : first_pos + r, 0), fused.positions - 1);
    float cosine[8], sine[8];
    load_angles(cosine, rotary_cos + pos * fused.cos_row + 8 * pair);
    load_angles(sine, rotary_sin + pos * fused.sin_row + 8 * pair);
    uint4& low =
        *reinterpret_cast<uint4*>(tile + swizzle<CHUNKS>(r, ROTARY == 2 ? 2 * pair : pair));
    uint4& high = *reinterpret_cast<uint4*>(
        tile + swizzle<CHUNKS>(r, ROTARY == 2 ? 2 * pair + 1 : pair + PAIRS));
    unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < (ROTARY == 2 ? 8 : 4); ++i) {
#if ROTARY == 2
      const float2 a = unpack(T(), words[i]);
      words[i] = pack(T(), a.x * cosine[i] - a.y * sine[i], a.y * cosine[i] + a.x * sine[i]);
#else
      const float2 a = unpack(T(), words[i]), b = unpack(T(), words[i + 4]);  // pairs 2 i, 2 i + 1
      const float *c = cosine + 2 * i, *s = sine + 2 * i;
      words[i] = pack(T(), a.x * c[0] - b.x * s[0], a.y * c[1] - b.y * s[1]);
      words[i + 4] = pack(T(), b.x * c[0] + a.x * s[0], b.y * c[1] + a.y * s[1]);
#endif
    }
    low = make_uint4(words[0], words[1], words[2], words[3]);
    high = make_uint4(words[4], words[5], words[6], words[7]);
  }
}
#endif

#if ALIBI
// To the left of the diagonal -slope |i - j| is slope (j - first), which the accumulators begin
// with, and a term of the row, slope (first - i), which goes into the maximum; to the right the
// signs change. Not where an array may make scores so large that such a sum is rounded by many
// powers of 2.
constexpr bool SPLIT = BIAS == 0 || BIAS == 3;

// S += slope (j - first), for a tile on one side of the diagonal.
__device__ __forceinline__ void add_columns(Scores& S, float slope) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = row_pair(S, i, n)[e];
        s = fmaf(slope, 8 * n + e, s + slope * (2 * t));
      }
}

// S -= slope |distance|, for a tile that the diagonal crosses. row_pos: of this lane's first row,
// from its first key on.
__device__ __forceinline__ void add_distances(Scores& S, float slope, int row_pos) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float distance = row_pos + 8 * i;
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = row_pair(S, i, n)[e];
        s = fmaf(-slope, fabsf(distance - (8 * n + e)), s);
      }
  }
}
#endif

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) fused_mma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,                 // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,    // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,    // [sequences + 1]
    const void* __restrict__ bias,           // [batch, heads, N, N_kv] of Bias<T>
    const float* __restrict__ alibi_slopes,  // [batch, heads]
    const void* __restrict__ rotary_cos,     // [positions, ROTARY_DIM / 2] of Table<T>
    const void* __restrict__ rotary_sin,     // the same
    const int* __restrict__ q_positions,     // [batch, N]; null: row i is at i + N_kv - N
    const int* __restrict__ k_positions,     // [batch, N_kv]; null: key j is at j
    const AttentionParams params, const FusedParams fused) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int first_pos = window.first_pos, last_pos = window.last_pos, last_row = window.last_row;
  constexpr int ALIGN = BIAS ? 16 : 1;  // tiles of the bias begin at multiples of 16 bytes
  const int begin = window.begin / ALIGN * ALIGN, end = window.end;
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
#if BIAS
  unsigned char* bias_tile =
      dynamic_smem + 2 * BLOCK_M * HEAD_DIM_PADDED + 4 * TILE;  // this warp's part
  bias_tile += warp_row * BLOCK_N * sizeof(Bias<T>);
  const Bias<T>* bias_rows = static_cast<const Bias<T>*>(bias) + block.sequence * fused.bias_batch +
                             block.head * fused.bias_head;
  bias_rows += (first_row + warp_row) * fused.bias_row + begin * fused.bias_key;
#endif
#if ROTARY
  const Table<T>*cosines = static_cast<const Table<T>*>(rotary_cos),
        *sines = static_cast<const Table<T>*>(rotary_sin);
  if (q_positions)
    q_positions += block.sequence * fused.q_positions_batch + block.q_first + first_row;
  if (k_positions) k_positions += block.sequence * fused.k_positions_batch + block.k_first;
#endif
  if (begin < end) {
#if BIAS
    load_bias<T>(bias_tile, bias_rows, fused, q_len - first_row - warp_row, end - begin);
#endif
    load_tile<BLOCK_M>(Q_smem + copy_offset, Q, params.q.row, q_len - first_row - copy_row);
    load_tile<BLOCK_N>(K_smem + copy_offset, K, params.k.row, end - begin - copy_row);
    load_tile<BLOCK_N>(V_smem + copy_offset, V, params.v.row, end - begin - copy_row);
    cp_async_commit();
#if ROTARY
    cp_async_wait<0>();
    __syncwarp();  // hazard: words would be rotated before the other lanes' copies have arrived
    rotate<BLOCK_M, T>(
        dynamic_smem, cosines, sines, q_positions, first_pos, q_len - first_row, fused);
#endif
  }
  Output acc = {};
  Statistics l_i = {};  // of this lane's keys until the epilogue
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;
#if ALIBI
  const float slope = alibi_slopes[block.sequence * fused.alibi_batch + block.head] /
                      scale;  // as S is, before the scaling
#endif

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  unsigned stage_offset = 0;  // of the half of K_smem and V_smem in use, not being filled
  for (int first = begin; first < end; first += BLOCK_N, stage_offset ^= TILE) {
    cp_async_wait<0>();
#if ROTARY
    __syncwarp();  // hazard: words could be rotated before the other lanes' copies have arrived
    rotate<BLOCK_N, T>(
        dynamic_smem + (K_smem - Q_smem) + stage_offset, cosines, sines,
        k_positions ? k_positions + first : nullptr, first, end - first, fused);
#endif
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Scores S = {};
#if ALIBI
    const bool left = SPLIT && (first + BLOCK_N - 1 <= first_pos || params.window_right == 0);
    const bool right = SPLIT && first > last_pos;
    const float column_slope = left ? slope : right ? -slope : 0.0f;
    if (SPLIT) add_columns(S, column_slope);
#endif
#if BIAS
    add_bias<T>(S, bias_tile, 1.0f / scale);
#endif
    gemm_qk<T>(S, q_lane, k_lane + stage_offset);
#if ALIBI
    if (!left && !right) add_distances(S, slope, first_pos + warp_row + g - first - 2 * t);
#endif

    // Issued before the scores, it would cost 75 more instructions a tile, mostly register moves.
    const int next = first + BLOCK_N;
    if (next < end) {
      K += BLOCK_N * params.k.row;
      V += BLOCK_N * params.v.row;
      load_tile<BLOCK_N>(
          K_smem + (stage_offset ^ TILE) + copy_offset, K, params.k.row, end - next - copy_row);
      load_tile<BLOCK_N>(
          V_smem + (stage_offset ^ TILE) + copy_offset, V, params.v.row, end - next - copy_row);
#if BIAS
      bias_rows += BLOCK_N * fused.bias_key;
      __syncwarp();  // hazard: the bias's tile could be overwritten while other lanes read it
      load_bias<T>(bias_tile, bias_rows, fused, q_len - first_row - warp_row, end - next);
#endif
      cp_async_commit();
    }
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    Statistics row_bias = {};
#if ALIBI
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      row_bias[i] = column_slope * softmax_scale_log2 * (first - first_pos - warp_row - g - 8 * i);
#endif
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2, ALIBI ? &row_bias : nullptr);
    Statistics m_tile;  // m_i without what the whole row has for ALiBi in this tile
#pragma unroll
    for (int i = 0; i < ROWS; ++i) m_tile[i] = maxima.m_i[i] - (ALIBI ? row_bias[i] : 0.0f);
    gemm_pv<T>(acc, S, m_tile, l_i, softmax_scale_log2, v_lane + stage_offset);
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
