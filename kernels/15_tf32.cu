// 15 tf32: float32 on tensor cores. Three TF32 products in place of one that is exact.
//
// Since 07: elements are float32, of which a tensor core reads 11 bits. Each is split into hi, its
// rounded upper half, and lo, the rest; hi hi + hi lo + lo hi keeps 21 bits of a product or more.
// Tensor cores cut off what they add, so that a sum that stays in them drifts: O's are new for each
// tile and added on the CUDA cores. No ldmatrix moves 4-byte elements to their lanes. But the
// columns of a sum, and those of O, may come in any order: a lane takes four that are neighbours.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 32 WARPS, 4
//          HEAD_DIM_PADDED (BLOCK_M + 4 BLOCK_N) bytes of dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), float32,
//          strides in elements, rows contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens.
//          lse (batch, heads, N) or (heads, tokens)
// Needs    sm_80; HEAD_DIM and strides multiples of 4, pointers of 16 bytes. An infinite element makes
//          NaN, as does one that hi rounds to infinity; below 1e-34, elements keep fewer bits
// Traffic  Q and O once; K and V: for each tile of rows, the keys that they see
#include "block.cuh"    // Block, Window: 05
#include "hooks.cuh"    // what the library adds to kernels: nothing, until 11
#include "mask.cuh"     // mask: 07
#include "ptx.cuh"      // cp.async, row_pair: 07
#include "softmax.cuh"  // NEG_INF, LOG2_E, M_INIT: 05; row_allreduce: 07

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 4, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per block
#endif
#ifndef BLOCK_N
#define BLOCK_N 32  // B_c, keys per tile
#endif
#ifndef WARPS
#define WARPS 4  // per block; each has BLOCK_M / WARPS of its rows
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 3  // per SM: what the compiler keeps registers free for
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8.0f  // m_i follows only maxima that exceed it by more, in powers of 2
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int TILES_M = BLOCK_M / (16 * WARPS);  // MMA atoms of 16 rows in a warp tile
constexpr int ROWS = 2 * TILES_M;                // per thread: g, g + 8, ... of its warp's
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 31) / 32 * 32;  // a row, in whole lines of 128 bytes
constexpr int CHUNKS = HEAD_DIM_PADDED / 4;                 // of 16 bytes in it
constexpr int ROW_BYTES = 4 * HEAD_DIM_PADDED;
constexpr int SPAN = 8;  // threads that copy a row
static_assert(HEAD_DIM % 4 == 0 && HEAD_DIM <= 256, "whole chunks; acc must fit the registers");
static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "a warp has whole fragments");
using Statistics = float[ROWS];
using Scores = float[TILES_M][BLOCK_N / 8][4];  // accumulators of S: 16 rows and 8 keys each
using Output = float[TILES_M][HEAD_DIM_PADDED / 8][4];

#include "load_tile.cuh"  // this thread's share of a tile, by cp.async

// The byte offset of a chunk in its tile. A quarter of a warp reads four neighbouring chunks of rows
// 2 i and 2 i + 1 (Q, K), or chunks i and i + 4 of four even or four odd rows (V): the exclusive or
// puts either eight in different banks.
__device__ __forceinline__ unsigned swizzle_words(unsigned row, unsigned chunk) {
  return 16 * (row * CHUNKS + (chunk ^ (row % 2 * 4 + row / 2 % 4)));
}

__device__ __forceinline__ float4 read_chunk(const unsigned char* address) {
  return *reinterpret_cast<const float4*>(address);
}

// x = hi + lo. hi is x to the nearest of 11 bits; cvt.rna.tf32 would take twice the instructions, as
// it keeps infinities. lo is exact, and the tensor core ignores its last bit: an error of 2^-23 x.
__device__ __forceinline__ void split(float x, unsigned& hi, unsigned& lo) {
  hi = (__float_as_uint(x) + 0x1000) & 0xffffe000;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

// D += A B on the tensor cores, 16 x 8 x 8. Lane 4 g + t holds
//   A: a[0] = (g, t)   a[1] = (g+8, t)   a[2] = (g, t+4)   a[3] = (g+8, t+4)
//   B: b[0] = (t, g)   b[1] = (t+4, g)   D: as in ptx.cuh
__device__ __forceinline__ void mma_m16n8k8(
    float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A fragment of A or B, split.
template <int WORDS>
struct Fragment {
  unsigned hi[WORDS], lo[WORDS];
  __device__ __forceinline__ void set(int i, float x) { split(x, hi[i], lo[i]); }
};

// large + small += A B. Each addition cuts some bits off its sum: off that of the small products,
// bits that are worth less.
__device__ __forceinline__ void mma_three(
    float (&large)[4], float (&small)[4], const Fragment<4>& a, const Fragment<2>& b) {
  mma_m16n8k8(small, a.lo, b.hi);
  mma_m16n8k8(small, a.hi, b.lo);
  mma_m16n8k8(large, a.hi, b.hi);
}

// S = scale Q K^T for this warp's rows. The columns of a sum may come in any order: of 16, a lane reads
// 4 t .. 4 t + 3, which are t and t + 4 of two products.
__device__ __forceinline__ void gemm_qk(
    Scores& S, float scale, const unsigned char* Q_smem, unsigned q_lane,
    const unsigned char* K_smem, unsigned k_lane) {
  Scores small = {};
#pragma unroll
  for (int k = 0; k < (HEAD_DIM + 15) / 16; ++k) {
    Fragment<4> a[2][TILES_M];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float4 q =
          read_chunk(Q_smem + swizzle_advance<CHUNKS>(q_lane, 4 * k) + 8 * i * ROW_BYTES);
      a[0][i / 2].set(i % 2, q.x);
      a[0][i / 2].set(i % 2 + 2, q.y);
      a[1][i / 2].set(i % 2, q.z);
      a[1][i / 2].set(i % 2 + 2, q.w);
    }
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      Fragment<2> b[2];
      const float4 key =
          read_chunk(K_smem + swizzle_advance<CHUNKS>(k_lane, 4 * k) + 8 * n * ROW_BYTES);
      b[0].set(0, key.x);
      b[0].set(1, key.y);
      b[1].set(0, key.z);
      b[1].set(1, key.w);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) mma_three(S[m][n], small[m][n], a[i][m], b[i]);
    }
  }
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[m][n][e] = scale * (S[m][n][e] + small[m][n][e]);
}

// Everything so far is rescaled to the new maxima, but only when some score exceeds m_i by more than
// RESCALE_THRESHOLD (07). Scores and m_i are in units of log2.
__device__ __forceinline__ void online_softmax_rescale(
    const Scores& S, Statistics& m_i, Statistics& l_i, Output& acc) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    m_new[i] = m_i[i];
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      m_new[i] = fmaxf(m_new[i], fmaxf(row_pair(S, i, n)[0], row_pair(S, i, n)[1]));
    exceeded |= m_new[i] > m_i[i] + RESCALE_THRESHOLD;
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
    const float rescale = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new[i];
    l_i[i] *= rescale;
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) row_pair(acc, i, n)[e] *= rescale;
  }
}

// acc += P V. The accumulators of 8 keys have the layout that the left operand needs, if V's rows 2 t
// and 2 t + 1 are t and t + 4 of the product. Of 32 columns a lane reads four neighbours, as columns
// g of four products; their sum over the tile begins at 0, and is added in float32.
__device__ __forceinline__ void gemm_pv(
    Output& acc, const Scores& S, const Statistics& m_i, Statistics& l_i,
    const unsigned char* V_smem, unsigned v_lane) {
  Fragment<4> a[BLOCK_N / 8][TILES_M];
#pragma unroll
  for (int k = 0; k < BLOCK_N / 8; ++k)
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float p = exp2f(row_pair(S, i, k)[e] - m_i[i]);
        l_i[i] += p;
        a[k][i / 2].set(i % 2 + 2 * e, p);
      }
#pragma unroll
  for (int n = 0; n < HEAD_DIM_PADDED / 8; n += 4) {
    float sum[TILES_M][4][4] = {};
#pragma unroll
    for (int k = 0; k < BLOCK_N / 8; ++k) {
      Fragment<2> b[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The next row: another bit of the swizzle, which is 64 bytes.
        const float4 v = read_chunk(V_smem + (v_lane ^ 64 * i) + 32 * n + (8 * k + i) * ROW_BYTES);
        b[0].set(i, v.x);
        b[1].set(i, v.y);
        b[2].set(i, v.z);
        b[3].set(i, v.w);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) mma_three(sum[m][j], sum[m][j], a[k][m], b[j]);
    }
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][n + j][e] += sum[m][j][e];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) tf32(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params HOOK_PARAMETERS) {
  // ---- prologue: the tile, head and sequence of this block, and the keys that its rows see
  const Block block(BLOCK_M, params, cu_seqlens_q, cu_seqlens_k);
  const int first_row = block.first_row, q_len = block.q_len;
  if (first_row >= q_len) return;  // the whole block, before any barrier: a shorter sequence
  Q += block.rows_offset(params.q);
  O += block.rows_offset(params.o);
  K += block.keys_offset(params.k);
  V += block.keys_offset(params.v);
  const Window window(BLOCK_M, block, params);
  const int last_row = window.last_row, end = window.end;
  const Hooks hooks = {
      HOOK_ARGUMENTS block.sequence, block.head, block.kv_head, q_len, block.kv_len};
  Tiles<BLOCK_N> tiles(hooks, first_row / BLOCK_M, window.begin, end);
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  constexpr unsigned TILE = BLOCK_N * ROW_BYTES;  // bytes of a tile of K or V
  const unsigned char *Q_smem = dynamic_smem, *K_smem = Q_smem + BLOCK_M * ROW_BYTES;
  const unsigned char* V_smem = K_smem + 2 * TILE;
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16 * TILES_M;
  const unsigned q_lane = swizzle_words(warp_row + g, t), k_lane = swizzle_words(g, t);
  const unsigned v_lane = swizzle_words(2 * t, g / 2 + g % 2 * 4);
  const int copy_row = threadIdx.x / SPAN, copy_chunk = threadIdx.x % SPAN;  // this thread copies
  const unsigned copy_offset = swizzle_words(copy_row, copy_chunk);
  const unsigned Q_copy = smem_address(Q_smem) + copy_offset;
  const unsigned K_copy = smem_address(K_smem) + copy_offset;
  const unsigned V_copy = smem_address(V_smem) + copy_offset;
  Q += copy_row * params.q.row + 4 * copy_chunk;
  K += (tiles.first() + copy_row) * params.k.row + 4 * copy_chunk;
  V += (tiles.first() + copy_row) * params.v.row + 4 * copy_chunk;
  if (tiles.first() < end) {
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_copy, Q, params.q.row, q_len - first_row - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        K_copy, K, params.k.row, end - tiles.first() - copy_row, HEAD_DIM);
    load_tile<BLOCK_N, CHUNKS, THREADS>(
        V_copy, V, params.v.row, end - tiles.first() - copy_row, HEAD_DIM);
    cp_async_commit();
  }
  Output acc = {};
  Statistics m_i, l_i;  // m_i in units of log2; l_i of this lane's keys until the epilogue
#pragma unroll
  for (int i = 0; i < ROWS; ++i) hook_start(m_i[i], l_i[i], hooks, t == 0);  // M_INIT and 0
  const float scale = scale_of_q(params.softmax_scale);                      // softmax_scale LOG2_E

  // ---- one pass: scores, the new maximum, everything so far rescaled if need be, this tile added
  unsigned stage_offset = 0;  // of the half of K_smem and V_smem in use, not being filled
  for (int first = tiles.first(), next; first < end; first = next, stage_offset ^= TILE) {
    next = tiles.next(first);
    cp_async_wait<0>();
    __syncthreads();  // hazard: a tile could be read before it lands, or overwritten while in use
    Scores S = {};
    gemm_qk(S, scale, Q_smem, q_lane, K_smem + stage_offset, k_lane);
    if (next < end) {
      K += (next - first) * params.k.row;
      V += (next - first) * params.v.row;
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          K_copy + (stage_offset ^ TILE), K, params.k.row, end - next - copy_row, HEAD_DIM);
      load_tile<BLOCK_N, CHUNKS, THREADS>(
          V_copy + (stage_offset ^ TILE), V, params.v.row, end - next - copy_row, HEAD_DIM);
      cp_async_commit();
    }
    const int q_idx = window.first_pos + warp_row + g;  // the first row's place among the keys
    hook_scores(S, hooks, q_idx, first + 2 * t, tiles.partial(first));
    if (first < last_row + window.lo || first + BLOCK_N > min(first_row + window.hi + 1, end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, first_row + warp_row + g - col_idx, end - col_idx, window.lo, window.hi);
    }
    online_softmax_rescale(S, m_i, l_i, acc);
    gemm_pv(acc, S, m_i, l_i, V_smem + stage_offset, v_lane);
  }

  // ---- epilogue: the row's sum; divide once
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: zeros, lse = -inf
    const int r = warp_row + 8 * i + g;
    if (first_row + r >= q_len) continue;
    if (lse && t == 0) block.store_lse(lse, params, r, m_i[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 8; n += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + 16 * e + 4 * t;  // the chunk of V that lane 2 t + e reads
        if (column < HEAD_DIM)
          *reinterpret_cast<float4*>(O + r * params.o.row + column) = make_float4(
              row_pair(acc, i, n)[e] * inverse, row_pair(acc, i, n + 1)[e] * inverse,
              row_pair(acc, i, n + 2)[e] * inverse, row_pair(acc, i, n + 3)[e] * inverse);
      }
  }
}
