// 15 fp16x3: float32 on tensor cores at half precision's speed. Three fp16 products by wgmma.
//
// Since 10: elements are float32. A first kernel scales each tile of Q, K or V by a power of two that
// brings its largest element near the end of fp16's range, and splits it into hi and lo, two fp16
// arrays; hi hi + hi lo + lo hi keeps 21 bits of a product or more (Ootomo and Yokota, 2022). Tensor
// cores cut off what they add, so as in 15_tf32.cu small products come first, and O's sums are new
// for each tile of keys and added on the CUDA cores, where the tile's scale is undone at no cost.
// With three times the products softmax is a small share, so that turns alone hide it.
//
// Launch   fp16x3_split: grid of all tiles of Q, K and V, block SPLIT_THREADS; then fp16x3, as 10,
//          after its 10_order.cu
// Shapes   as 10, in float32. Between the kernels: hi and lo of each batch, (2 batch, heads, N,
//          HEAD_DIM), and an exponent for each tile: 64 rows of Q, BLOCK_N of K and V
// Needs    sm_90a and no other; HEAD_DIM a multiple of 8, strides multiples of 4, pointers of 16 bytes.
//          An infinite element makes NaN. Elements below 2^-17 of their tile's largest keep fewer
//          bits: the error is 2^-23 of an element or 2^-39 of the largest, whichever is more
// Traffic  the split reads and writes Q, K and V once; then as 10, with twice the bytes
#include "hopper_rows.cuh"
#include "packed_tiles.cuh"
#include "score_mod.cuh"  // nothing, until 11 gives it a function of scores

#ifndef STAGES
#define STAGES 5  // tiles in shared memory, of K and V in turn
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i follows only maxima that exceed it by more, in powers of 2
#endif
#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns in starting products
#endif

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr unsigned KV_BYTES = 2 * TILE_BYTES;  // hi and lo of a tile of K or V
constexpr unsigned KV_AT = CONSUMERS * 2 * Q_BYTES, BARRIERS_AT = KV_AT + STAGES * KV_BYTES;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * (2 * CONSUMERS + 2 * STAGES);
static_assert(HEAD_DIM <= 128, "two accumulators of O must fit the registers");

constexpr int SPLIT_THREADS = 256, Q_ROWS = 64;  // rows that share an exponent
constexpr int MAX_EXPONENT = 14;    // of a tile's largest element: hi is below 2^15 then
constexpr int WEIGHT_EXPONENT = 7;  // of the largest weight; with RESCALE_THRESHOLD below 2^15
static_assert(WEIGHT_EXPONENT + RESCALE_THRESHOLD <= 15, "weights must fit fp16");

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

// S += Q K^T, or S = Q K^T if `accumulate` is false, for the warpgroup's 64 rows. Steps as in 10.
__device__ __forceinline__ void add_qk(
    Scores& S, unsigned long long q, unsigned long long k, bool accumulate) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(
        __half(), S, q + (i / 4 * PANEL_BYTES + i % 4 * 32) / 16,
        k + (i / 4 * BLOCK_N * 128 + i % 4 * 32) / 16, accumulate || i > 0);
}

// Starts S = Q K^T. Each addition cuts some bits off its sum: off that of the small products, bits
// that are worth less. So those come first.
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  constexpr int Q_LO = Q_BYTES / 16, K_LO = TILE_BYTES / 16;
  wgmma_registers(S);
  wgmma_fence();
  add_qk(S, q + Q_LO, k, false);
  add_qk(S, q, k + K_LO, true);
  add_qk(S, q, k, true);
  wgmma_commit();
}

__device__ __forceinline__ void add_pv(
    Output& O, const Weights& P, unsigned long long v, bool accumulate) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
    wgmma_rs(__half(), O, P[i], v + i * 16 * 128 / 16, accumulate || i > 0);
}

// Starts O_tile = P V, of this tile of keys alone.
__device__ __forceinline__ void start_pv(
    Output& O_tile, const Weights& P_hi, const Weights& P_lo, unsigned long long v) {
  constexpr int V_LO = TILE_BYTES / 16;
  wgmma_registers(O_tile);
  wgmma_fence();
  add_pv(O_tile, P_lo, v, false);
  add_pv(O_tile, P_hi, v + V_LO, true);
  add_pv(O_tile, P_hi, v, true);
  wgmma_commit();
}

// Everything so far is rescaled to the new maxima, but only when some score exceeds m_i by more than
// RESCALE_THRESHOLD (07). m_i is in units of log2, WEIGHT_EXPONENT below a maximum.
__device__ __forceinline__ void online_softmax_rescale(
    const Scores& S, Statistics& m_i, Statistics& l_i, Output& acc, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    m_new[i] = fmaxf(m_i[i], s_max * softmax_scale_log2 - WEIGHT_EXPONENT);
    exceeded |= m_new[i] > m_i[i] + RESCALE_THRESHOLD;
  }
  if (!__any_sync(0xffffffff, exceeded)) return;
  Statistics rescale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
    rescale[i] = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new[i];
    l_i[i] *= rescale[i];
  }
  rescale_output(acc, rescale);
}

// Where tiles are in the ring of stages, and the parity of the mbarriers' phases there.
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage < STAGES) return;
    stage = 0;
    parity ^= 1;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp16x3(
    const __grid_constant__ TensorMap q_map,  // of hi and lo: boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,  // boxes of BLOCK_N rows
    const int* __restrict__ q_exponents, const int* __restrict__ kv_exponents,
    float* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int* __restrict__ schedule,      // [rounds, blocks, 4], see next_tile
    const int rounds, const AttentionParams params MOD_PARAMETERS) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), KV_smem = Q_smem + KV_AT;
  const unsigned q_full = Q_smem + BARRIERS_AT;  // one for each consumer
  const unsigned q_empty = q_full + 8 * CONSUMERS;
  const unsigned full = q_empty + 8 * CONSUMERS, empty = full + 8 * STAGES;  // for each stage
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(q_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 1);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  Tile tile;
  int round = 0;
  const int4* const items = reinterpret_cast<const int4*>(schedule);
  int4 item = items[blockIdx.x];
  const auto next = [&] {
    const bool found =
        next_tile(tile, item, round, rounds, items, cu_seqlens_q, cu_seqlens_k, params);
    tile.begin = tile.begin / BLOCK_N * BLOCK_N;  // key tiles are those that have an exponent
    return found;
  };
  const auto mod_of_tile = [&] {
    return Mod{MOD_ARGUMENTS tile.sequence, tile.head, tile.kv_head, tile.q_len, tile.kv_len};
  };
  const auto keys_of_tile = [&] {
    return KeyTiles<-BLOCK_N>(
        mod_of_tile(), (tile.q_len - tile.rows) / BLOCK_M, last_tile_begin(tile), tile.begin);
  };

  // ---- producer: a thread for K and V, which take turns in the ring, and one for Q
  Ring ring;
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id > 1) return;
    for (int tiles = 0; next(); ++tiles) {
      const int hi = packed ? 0 : 2 * tile.sequence, lo = hi + 1;
      for (int i = 0; warp_id == 1 && i < CONSUMERS; ++i) {
        mbarrier_wait(q_empty + 8 * i, (tiles & 1) ^ 1);  // hazard: products still read Q
        mbarrier_arrive_expect_tx(q_full + 8 * i, 2 * Q_BYTES);
        const unsigned target = Q_smem + 2 * i * Q_BYTES;
        const int row = tile.row + 64 * i;
        tma_load_panels<64>(target, q_map, q_full + 8 * i, row, tile.head, hi);
        tma_load_panels<64>(target + Q_BYTES, q_map, q_full + 8 * i, row, tile.head, lo);
      }
      for (auto keys = keys_of_tile(); warp_id == 0 && keys.more(); keys.advance())
        for (int i = 0; i < 2; ++i, ring.advance()) {
          const TensorMap& map = i == 0 ? k_map : v_map;
          const unsigned barrier = full + 8 * ring.stage, target = KV_smem + ring.stage * KV_BYTES;
          const int row = tile.k_first + keys.first();
          mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);  // hazard: products read it
          mbarrier_arrive_expect_tx(barrier, KV_BYTES);
          tma_load_panels<BLOCK_N>(target, map, barrier, row, tile.kv_head, hi);
          tma_load_panels<BLOCK_N>(target + TILE_BYTES, map, barrier, row, tile.kv_head, lo);
        }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;  // of the tile's rows
  const bool leader = threadIdx.x % 128 == 0;                      // arrives for its warpgroup
  const unsigned long long q = wgmma_descriptor(Q_smem + 2 * consumer * Q_BYTES),
                           k = wgmma_descriptor(KV_smem);
  const unsigned long long v = wgmma_descriptor(KV_smem, BLOCK_N * 128);
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % CONSUMERS;  // named barriers
  Scores S;
  Weights P_hi, P_lo;
  Output acc, O_tile;
  Statistics m_i, l_i;  // l_i of this lane's keys only, until the epilogue

  const auto modify_and_mask = [&](const KeyTiles<-BLOCK_N>& keys, float scale) {
    const int first = keys.first();  // of the keys of S
    modify<2, BLOCK_N / 4>(
        mod_of_tile(), scale, 1.0f,
        [&](int i, int j) -> float& { return S[4 * (j / 2) + 2 * i + j % 2]; },
        [&](int i) { return tile.first_pos + warp_row + g + 8 * i; },
        [&](int j) { return first + 2 * t + j / 2 * 8 + j % 2; }, keys.partial());
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params);
    }
  };
  const auto take_turn = [&] {
    if (PINGPONG) named_barrier_sync(my_turn, 256);
  };
  const auto pass_turn = [&] {
    if (PINGPONG) named_barrier_arrive(next_turn, 256);
  };
  if (consumer == CONSUMERS - 1) pass_turn();  // the first turn is the first consumer's

  for (int tiles = 0; next(); ++tiles) {
    const int first_row = tile.q_len - tile.rows, row_tile = first_row / Q_ROWS + consumer;
    const int q_exponent = tile.rows <= Q_ROWS * consumer  // this warpgroup has no row
                               ? 0
                               : q_exponents[exponent_index(
                                     Q_ROWS, row_tile, tile.head, params.heads, tile.sequence,
                                     tile.row - first_row, params.N, params.sequences)];
    const int2* const exponents = reinterpret_cast<const int2*>(kv_exponents) +
                                  exponent_index(
                                      BLOCK_N, 0, tile.kv_head, params.kv_heads, tile.sequence,
                                      tile.k_first, params.N_kv, params.sequences);
    const float m_first = first_maximum(mod_of_tile()) - WEIGHT_EXPONENT;
    m_i[0] = m_i[1] = m_first;
    l_i[0] = l_i[1] = t == 0 ? first_sum(mod_of_tile()) * power_of_two(WEIGHT_EXPONENT) : 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    mbarrier_wait(q_full + 8 * consumer, tiles & 1);

    for (auto keys = keys_of_tile(); keys.more(); keys.advance()) {
      // ---- scores. Their tile's scale becomes part of the softmax's: not 0, as 0 times -inf is NaN
      const int2 exponent =
          keys.first() < tile.kv_len ? exponents[keys.first() / BLOCK_N] : make_int2(0, 0);
      const int unscale = min(max(-(q_exponent + exponent.x), -126), 127);
      const float scale = fminf(fmaxf(params.softmax_scale * power_of_two(unscale), 1e-37f), 3e38f);
      const float softmax_scale_log2 = scale_log2_of(scale);
      mbarrier_wait(full + 8 * ring.stage, ring.parity);
      take_turn();
      start_qk(S, q, k + ring.stage * (KV_BYTES / 16));
      pass_turn();
      wgmma_wait<0>();
      wgmma_registers(S);
      if (leader) mbarrier_arrive(empty + 8 * ring.stage);
      ring.advance();

      // ---- weights, in two parts
      modify_and_mask(keys, scale);
      online_softmax_rescale(S, m_i, l_i, acc, softmax_scale_log2);
      online_softmax_weights(S, m_i, l_i, softmax_scale_log2, 0, BLOCK_N / 8);
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          split(
              S[4 * n + 2 * i], S[4 * n + 2 * i + 1], P_hi[n / 2][n % 2 * 2 + i],
              P_lo[n / 2][n % 2 * 2 + i]);

      // ---- O of these keys
      mbarrier_wait(full + 8 * ring.stage, ring.parity);
      if (packed && keys.first() + BLOCK_N > tile.kv_len) {  // the next sequence's rows
        unsigned char* const tile_smem = dynamic_smem + KV_AT + ring.stage * KV_BYTES;
        clear_rows<128>(tile_smem, tile.kv_len - keys.first());
        clear_rows<128>(tile_smem + TILE_BYTES, tile.kv_len - keys.first());
        named_barrier_sync(8, 128 * CONSUMERS);  // hazard: products could read rows not cleared
      }
      take_turn();
      start_pv(O_tile, P_hi, P_lo, v + ring.stage * (KV_BYTES / 16));
      pass_turn();
      wgmma_wait<0>();
      wgmma_registers(O_tile);
      if (leader) mbarrier_arrive(empty + 8 * ring.stage);
      ring.advance();
      const float of_tile = power_of_two(-exponent.y);
#pragma unroll
      for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = fmaf(of_tile, O_tile[i], acc[i]);
    }

    // ---- epilogue: the rows' sums; divide once
    if (leader) mbarrier_arrive(q_empty + 8 * consumer);
    Statistics inverse;
    finish_rows(tile, warp_row, m_i, l_i, inverse, lse, packed, params);
    float* const out = O + (packed ? 0 : tile.sequence) * params.o.batch +
                       (long long)(tile.row + warp_row + g) * params.o.row +
                       tile.head * params.o.head + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (warp_row + g + 8 * i >= tile.rows) continue;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *reinterpret_cast<float2*>(out + 8 * i * params.o.row + 8 * n) =
            make_float2(acc[4 * n + 2 * i] * inverse[i], acc[4 * n + 2 * i + 1] * inverse[i]);
    }
  }
}
