// 11 rotation in the load, beside 11_rotary.cu: what did not pay. 07 with the rotary embedding where Q
// and K are in shared memory, after their load. Else as 07.
//
// A pair is one column of each half. Each row is rotated by the warp that copied it (Su et al., 2021). So a key is rotated again by each
// tile of rows that sees it, which costs more than the pass of 11_rotary.cu saves.
//
// Launch, shapes, traffic as 07; rotary_cos, rotary_sin (positions, ROTARY_DIM / 2), float32;
//          q_positions (batch, N), k_positions (batch, N_kv), int32, or null
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes; ROTARY_DIM a multiple
//          of 16
#include "block.cuh"  // Block, Window: 05

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
#ifndef ROTARY_DIM
#define ROTARY_DIM (HEAD_DIM / 16 * 16)  // words of a row that are rotated: the first ones
#endif

#include "mma_tiles.cuh"  // 07: what a warp does with its tile
static_assert(HEAD_DIM <= 256, "acc must fit the registers");

struct RotationParams {
  int q_positions_batch,
      k_positions_batch;  // from one batch to the next; 0 where all have the same
  int positions;          // rows of the tables
};

// Eight words of a row of a rotary table.
__device__ __forceinline__ void load_angles(float (&a)[8], const float* __restrict__ row) {
  const float4 low = reinterpret_cast<const float4*>(row)[0],
               high = reinterpret_cast<const float4*>(row)[1];
  const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = eight[i];
}

// Rotates the rows of a tile that this warp copied, two chunks of eight words at a time: those that
// hold eight pairs. Row r is at positions[r], or at first_pos + r where there are none.
template <int TILE_ROWS, typename T>
__device__ __forceinline__ void rotate(
    unsigned char* tile, const float* __restrict__ rotary_cos, const float* __restrict__ rotary_sin,
    const int* __restrict__ positions, int first_pos, int rows_left, const RotationParams& params) {
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
        min(max(positions ? positions[r] : first_pos + r, 0), params.positions - 1);
    float cosine[8], sine[8];
    load_angles(cosine, rotary_cos + pos * (ROTARY_DIM / 2) + 8 * pair);
    load_angles(sine, rotary_sin + pos * (ROTARY_DIM / 2) + 8 * pair);
    uint4& low = *reinterpret_cast<uint4*>(tile + swizzle<CHUNKS>(r, pair));
    uint4& high = *reinterpret_cast<uint4*>(tile + swizzle<CHUNKS>(r, pair + PAIRS));
    unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack(T(), words[i]), b = unpack(T(), words[i + 4]);  // pairs 2 i, 2 i + 1
      const float *c = cosine + 2 * i, *s = sine + 2 * i;
      words[i] = pack(T(), a.x * c[0] - b.x * s[0], a.y * c[1] - b.y * s[1]);
      words[i + 4] = pack(T(), b.x * c[0] + a.x * s[0], b.y * c[1] + a.y * s[1]);
    }
    low = make_uint4(words[0], words[1], words[2], words[3]);
    high = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) rotation_in_load(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const float* __restrict__ rotary_cos,  // [positions, ROTARY_DIM / 2]
    const float* __restrict__ rotary_sin,  // the same
    const int* __restrict__ q_positions,   // [batch, N]; null: row i is at i + N_kv - N
    const int* __restrict__ k_positions,   // [batch, N_kv]; null: key j is at j
    const AttentionParams params, const RotationParams rotation) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int first_pos = window.first_pos, last_row = window.last_row;
  const int begin = window.begin, end = window.end;
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
  if (q_positions)
    q_positions += block.sequence * rotation.q_positions_batch + block.q_first + first_row;
  if (k_positions) k_positions += block.sequence * rotation.k_positions_batch + block.k_first;
  if (begin < end) {
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + copy_offset, Q, params.q.row, q_len - first_row - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        K_smem + copy_offset, K, params.k.row, end - begin - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        V_smem + copy_offset, V, params.v.row, end - begin - copy_row, HEAD_DIM);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();  // hazard: words would be rotated before the other lanes' copies have arrived
    rotate<BLOCK_M, T>(
        dynamic_smem, rotary_cos, rotary_sin, q_positions, first_pos, q_len - first_row, rotation);
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
    __syncwarp();  // hazard: words could be rotated before the other lanes' copies have arrived
    rotate<BLOCK_N, T>(
        dynamic_smem + (K_smem - Q_smem) + stage_offset, rotary_cos, rotary_sin,
        k_positions ? k_positions + first : nullptr, first, end - first, rotation);
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
