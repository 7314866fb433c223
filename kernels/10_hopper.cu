// 10 hopper: FlashAttention-3. One warpgroup copies, two or three compute, and all do so at the same time.
//
// Since 07: TMA copies a tile by one instruction of one thread, swizzled and filled up with zeros on the way, and wgmma
// multiplies from shared memory by one asynchronous instruction of 128 threads. So the roles are split: a producer
// warpgroup starts copies and gives most of its registers to the consumers; mbarriers say which stages are full and
// which are empty. Tensor cores and exp2 work at the same time, for two reasons. A consumer starts S of the next keys
// before O of these, and computes the next weights while O is added up. And consumers take turns in starting products,
// so that one has products in flight while another computes weights (Shah, Bikshandi et al., 2024). Each block takes
// one tile of rows after the other, in one pipeline: after a tile's last keys come the first of the next tile.
//
// Launch   grid: as many blocks as multiprocessors, or as tiles; block 128 (1 + BLOCK_M / 64); SHARED_BYTES of dynamic
//          shared memory
// Shapes   as 07. Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes of 64 columns, and of BLOCK_M rows
//          of Q, BLOCK_N of K and V
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 07
#include "attention_params.cuh"
#include "hopper.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per tile: 64 for each consumer warpgroup
#endif
#ifndef BLOCK_N
#define BLOCK_N 128  // B_c, keys per tile
#endif
#ifndef STAGES
#define STAGES 2  // tiles of K, and of V, in shared memory
#endif
#ifndef Q_STAGES
#define Q_STAGES 2  // tiles of Q: the next one arrives while this one is in use
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 0  // not 0: m_i is updated only when a row's maximum exceeds it by more, in powers of 2
#endif
#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns in starting products
#endif
#ifndef WAIT_AT
#define WAIT_AT (BLOCK_N / 16)  // a step has the weights of 8 WAIT_AT keys before it waits for O
#endif
#ifndef EXACT_SHIFT
#define EXACT_SHIFT 0  // 1: for a softmax_scale so large that m_i's rounding is worth many powers of 2; see weight()
#endif
#ifndef SCALE_SIGN
#define SCALE_SIGN 1  // -1: for a negative softmax_scale; maxima are found before the scaling, so S is -Q K^T then
#endif
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float LOWEST = -3.402823466e38f;  // m_i before the first key: finite, because -inf - (-inf) would be NaN

constexpr int CONSUMERS = BLOCK_M / 64, THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : CONSUMERS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : CONSUMERS == 3 ? 160 : 112;
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // columns of the products; TMA fills up with zeros
constexpr int PANELS = (HEAD_DIM + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
constexpr unsigned Q_BYTES = PANELS * BLOCK_M * 128, TILE_BYTES = PANELS * BLOCK_N * 128;  // of a tile of K or V
constexpr unsigned K_AT = Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * TILE_BYTES,
                   BARRIERS_AT = V_AT + STAGES * TILE_BYTES;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * (2 * Q_STAGES + 4 * STAGES);
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "16-byte chunks; O must fit the registers");
static_assert(BLOCK_M % 64 == 0 && CONSUMERS >= 2 && CONSUMERS <= 4, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "what wgmma takes, and a step of P V has 16 keys");

using Statistics = float[2];  // of rows g and g + 8 of this thread's warp
using Scores = float[BLOCK_N / 2];
using Weights = unsigned[BLOCK_N / 16][4];  // P as the left operand of P V
using Output = float[HEAD_DIM_PADDED / 2];

// ---- the tiles of rows

struct Schedule {
  int row_tiles;  // of the longest sequence
  int sequences;
  int together;  // heads, of all sequences, whose tiles are neighbours in the order: their K and V fit the L2 cache
};

// A tile of rows. row: of the first one in Q and O. rows: how many its sequence has from there on. first_pos: the first
// row's position among the keys. Keys begin .. end - 1 are all that some row of the tile sees.
struct Tile {
  int head, sequence, row, rows, first_pos, k_first, kv_len, begin, end;
};

// The tile that this block computes in a round; false where there is none left. Longest-first (LPT) order among heads
// that are together: with a causal mask the last rows see the most keys. Every other round goes through the blocks
// backwards, so that the blocks get similar amounts of work.
__device__ __forceinline__ bool find_tile(
    Tile& tile, int round, const Schedule& schedule, const int* cu_seqlens_q, const int* cu_seqlens_k,
    const AttentionParams& params) {
  const int item = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const int heads = params.heads * schedule.sequences;
  if (item >= schedule.row_tiles * heads) return false;
  const int first_head = item / (schedule.together * schedule.row_tiles) * schedule.together;
  const int width = min(schedule.together, heads - first_head), place = item - first_head * schedule.row_tiles;
  const int first_row = (schedule.row_tiles - 1 - place / width) * BLOCK_M, head = first_head + place % width;
  tile.sequence = head / params.heads;
  tile.head = head - tile.sequence * params.heads;
  const bool packed = cu_seqlens_q != nullptr;
  const int q_first = packed ? cu_seqlens_q[tile.sequence] : 0;
  const int q_len = packed ? cu_seqlens_q[tile.sequence + 1] - q_first : params.N;
  tile.k_first = packed ? cu_seqlens_k[tile.sequence] : 0;
  tile.kv_len = packed ? cu_seqlens_k[tile.sequence + 1] - tile.k_first : params.N_kv;
  tile.row = q_first + first_row;
  tile.rows = q_len - first_row;  // none or fewer where the sequence is shorter than the longest
  // Row i is at key i + kv_len - q_len, so that the last row is at the last key.
  tile.first_pos = first_row + tile.kv_len - q_len;
  tile.begin = max(tile.first_pos - params.window_left, 0);
  tile.end = min(tile.first_pos + min(BLOCK_M, tile.rows) + params.window_right, tile.kv_len);
  if (tile.rows <= 0) tile.end = tile.begin;
  return true;
}

// The first key of the last key tile. A tile of rows starts there and goes down to `begin`.
__device__ __forceinline__ int last_keys(const Tile& tile) {
  return tile.begin + (tile.end - tile.begin - 1) / BLOCK_N * BLOCK_N;
}

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

// ---- what a consumer warpgroup computes

// S = Q K^T for its 64 rows, started. The next 16 columns are 32 bytes further, the next 64 one panel.
template <typename T>
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss<SCALE_SIGN>(
        T(), S, q + (i / 4 * BLOCK_M * 128 + i % 4 * 32) / 16, k + (i / 4 * BLOCK_N * 128 + i % 4 * 32) / 16, i > 0);
}

// O += P V, started. The next 16 keys are 16 rows further.
template <typename T>
__device__ __forceinline__ void start_pv(Output& O, const Weights& P, unsigned long long v) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i) wgmma_rs(T(), O, P[i], v + i * 16 * 128 / 16, true);
}

// One bit for each of a thread's keys 8 n and 8 n + 1 of 128: set for those before `limit`.
__device__ __forceinline__ unsigned keys_before(int limit) {
  const int keys = min(max(limit, 0), 128);
  return (1ull << (keys / 8 * 2 + min(keys % 8, 2))) - 1;
}

// A key that a row does not see scores -inf, so that its weight is exactly 0. row_pos, the position of the
// thread's first row among the keys, and end are relative to the thread's first key.
__device__ __forceinline__ void mask(Scores& S, int row_pos, int end, int left, int right) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int low = row_pos + 8 * i - left, high = min(row_pos + 8 * i + right + 1, end);
#pragma unroll
    for (int first = 0; first < BLOCK_N; first += 128) {
      const unsigned seen = keys_before(high - first) & ~keys_before(low - first);
#pragma unroll
      for (int n = first / 8; n < BLOCK_N / 8 && n < first / 8 + 16; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(seen >> (2 * (n - first / 8) + e) & 1)) S[4 * n + 2 * i + e] = NEG_INF;
    }
  }
}

// The maximum or the sum over the four lanes of a row.
template <typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
  return op(a, __shfl_xor_sync(0xffffffff, a, 2));
}

// The weight of a score, 2^(softmax_scale_log2 s - m_i), in one FFMA: its product is exact, while m_i, the same product
// for the row's largest s, is rounded. While |m_i| < 2^27 that is worth 2^4 at most, which fits float16. EXACT_SHIFT
// rounds both alike, so that no weight exceeds 1 at any scale.
__device__ __forceinline__ float weight(float s, float softmax_scale_log2, float m_i) {
  return exp2f(EXACT_SHIFT ? __fmul_rn(s, softmax_scale_log2) - m_i : fmaf(s, softmax_scale_log2, -m_i));
}

// The new maxima, and the factors by which everything so far has to be rescaled.
__device__ __forceinline__ void online_softmax_maxima(
    const Scores& S, Statistics& m_i, Statistics& l_i, Statistics& rescale, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeded = RESCALE_THRESHOLD == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    m_new[i] = fmaxf(m_i[i], s_max * softmax_scale_log2);
    rescale[i] = 1.0f;
    exceeded |= m_new[i] > m_i[i] + RESCALE_THRESHOLD;
  }
  if (RESCALE_THRESHOLD == 0 || __any_sync(0xffffffff, exceeded)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m_new[i] = row_allreduce(m_new[i], [](float a, float b) { return fmaxf(a, b); });
      rescale[i] = exp2f(m_i[i] - m_new[i]);  // 0 at the first key; 1 if the maximum stays
      m_i[i] = m_new[i];
      l_i[i] *= rescale[i];
    }
  }
}

// The weights of keys 8 FROM .. 8 TO - 1 in place of their scores, and their sums, of this lane's keys.
template <int FROM, int TO>
__device__ __forceinline__ void online_softmax_weights(
    Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sums[2] = {};  // two chains of additions instead of one that is twice as long
#pragma unroll
    for (int n = FROM; n < TO; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = S[4 * n + 2 * i + e];
        s = weight(s, softmax_scale_log2, m_i[i]);
        sums[e] += s;
      }
    l_i[i] += sums[0] + sums[1];
  }
}

__device__ __forceinline__ void start_rows(Statistics& m_i, Statistics& l_i) {
  m_i[0] = m_i[1] = LOWEST, l_i[0] = l_i[1] = 0.0f;
}

__device__ __forceinline__ void clear(Output& acc) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
}

__device__ __forceinline__ void rescale_output(Output& acc, const Statistics& rescale) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] *= rescale[i / 2 % 2];
}

// The weights of keys 8 FROM .. 8 TO - 1 at half the width. The accumulators of 2 x 8 keys have the layout that the left
// operand of 16 keys needs.
template <typename T, int FROM, int TO>
__device__ __forceinline__ void to_operand(Weights& P, const Scores& S) {
#pragma unroll
  for (int n = FROM; n < TO; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) P[n / 2][n % 2 * 2 + i] = pack(T(), S[4 * n + 2 * i], S[4 * n + 2 * i + 1]);
}

// Word i of lane t becomes word t of lane i, among the four lanes of a row.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = threadIdx.x & step;
      const unsigned other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + step], step);
      (upper ? words[i] : words[i + step]) = other;
    }
}

// O and lse of 16 rows of a warp, from row `warp_row` of the tile on. Four lanes exchange words, so that each stores 16
// bytes of a row.
template <typename T>
__device__ __forceinline__ void store_output(
    const Tile& tile, int warp_row, const Output& acc, const Statistics& m_i, const Statistics& l_i, T* O, float* lse,
    bool packed, const AttentionParams& params) {
  const int lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);  // a row that sees no key: 0, and lse = -inf
    const int r = warp_row + 8 * i + g;
    const bool in_bounds = r < tile.rows;
    if (lse && t == 0 && in_bounds) {
      const long long head_row = (long long)(packed ? 0 : tile.sequence) * params.heads + tile.head;
      lse[head_row * params.N + tile.row + r] = LN_2 * (m_i[i] + log2f(sum));
    }
    T* const out = O + tile.sequence * params.o.batch + (tile.row + r) * params.o.row + tile.head * params.o.head;
#pragma unroll
    for (int first = 0; first < HEAD_DIM_PADDED / 8; first += 4) {
      unsigned words[4] = {};
#pragma unroll
      for (int n = 0; n < 4 && first + n < HEAD_DIM_PADDED / 8; ++n)
        words[n] = pack(T(), acc[4 * (first + n) + 2 * i] * inverse, acc[4 * (first + n) + 2 * i + 1] * inverse);
      transpose_quad(words);
      if (in_bounds && 8 * (first + t) < HEAD_DIM)
        *reinterpret_cast<uint4*>(out + 8 * (first + t)) = uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper(
    const __grid_constant__ TensorMap q_map,  // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; null: not wanted
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each sequence of Q begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params, const Schedule schedule) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT, V_smem = Q_smem + V_AT;
  const unsigned q_full = Q_smem + BARRIERS_AT, q_empty = q_full + 8 * Q_STAGES;  // one for each stage
  const unsigned k_full = q_empty + 8 * Q_STAGES, k_empty = k_full + 8 * STAGES;
  const unsigned v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // tells the compiler that it is uniform
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Q_STAGES; ++stage)
      mbarrier_init(q_full + 8 * stage, 1), mbarrier_init(q_empty + 8 * stage, CONSUMERS);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(k_full + 8 * stage, 1), mbarrier_init(v_full + 8 * stage, 1);
      mbarrier_init(k_empty + 8 * stage, CONSUMERS), mbarrier_init(v_empty + 8 * stage, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: the others would wait for mbarriers that are not initialised
  Tile tile, done;

  // ---- producer: a thread for Q and K, another for V. Stages are filled in turn; `step` counts tiles of keys
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    if (threadIdx.x != 0 && threadIdx.x != 32) return;
    const bool loads_k = threadIdx.x == 0;
    const TensorMap& map = loads_k ? k_map : v_map;
    const unsigned smem = loads_k ? K_smem : V_smem, full = loads_k ? k_full : v_full, empty = full + 8 * STAGES;
    int step = 0, tiles = 0;
    for (int round = 0; find_tile(tile, round, schedule, cu_seqlens_q, cu_seqlens_k, params); ++round) {
      if (tile.begin >= tile.end) continue;
      const int batch = packed ? 0 : tile.sequence, kv_head = tile.head / (params.heads / params.kv_heads);
      if (loads_k) {
        const int stage = tiles % Q_STAGES;
        mbarrier_wait(q_empty + 8 * stage, (tiles / Q_STAGES & 1) ^ 1);  // hazard: products still read Q
        mbarrier_arrive_expect_tx(q_full + 8 * stage, Q_BYTES);
        for (int panel = 0; panel < PANELS; ++panel)
          tma_load(
              Q_smem + stage * Q_BYTES + panel * BLOCK_M * 128, q_map, q_full + 8 * stage, panel * PANEL_COLUMNS,
              tile.row, tile.head, batch);
      }
      ++tiles;
      for (int first = last_keys(tile); first >= tile.begin; first -= BLOCK_N, ++step) {
        const int stage = step % STAGES;
        mbarrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);  // hazard: products still read this stage
        mbarrier_arrive_expect_tx(full + 8 * stage, TILE_BYTES);
        for (int panel = 0; panel < PANELS; ++panel)
          tma_load(
              smem + stage * TILE_BYTES + panel * BLOCK_N * 128, map, full + 8 * stage, panel * PANEL_COLUMNS,
              tile.k_first + first, kv_head, batch);
      }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;  // of the tile's rows
  const bool leader = threadIdx.x % 128 == 0;                      // arrives for its warpgroup
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * 64 * 128), k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % CONSUMERS;          // named barriers
  const float softmax_scale_log2 = fmaxf(fabsf(params.softmax_scale), 1e-30f) * LOG2_E;  // 0 times -inf would be NaN
  Scores S;
  Weights P;
  Output acc;
  Statistics m_i, l_i, rescale;  // m_i in units of log2; l_i of this lane's keys only, until the epilogue
  int round = 0, first;          // first: of the keys of S

  // The next tile that sees a key. Tiles before it that see none get zeros, and lse = -inf.
  const auto next_tile = [&] {
    for (; find_tile(tile, round, schedule, cu_seqlens_q, cu_seqlens_k, params); ++round) {
      if (tile.begin < tile.end) {
        ++round, first = last_keys(tile);
        return true;
      }
      Output zeros = {};
      Statistics none = {NEG_INF, NEG_INF}, sums = {};
      store_output(tile, warp_row, zeros, none, sums, O, lse, packed, params);
    }
    return false;
  };
  const auto maxima = [&] {
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params.window_left, params.window_right);
    }
    online_softmax_maxima(S, m_i, l_i, rescale, softmax_scale_log2);
  };
  // Packed: rows of V past the end belong to the next sequence. Their weights are 0, but 0 times inf would be NaN.
  const auto clear_rows_past_the_end = [&](int stage, int parity) {
    if (!packed || first + BLOCK_N <= tile.kv_len) return;
    mbarrier_wait(v_full + 8 * stage, parity);
    for (int i = (tile.kv_len - first) * 8 + threadIdx.x - 128; i < BLOCK_N * 8; i += 128 * CONSUMERS)
      for (int panel = 0; panel < PANELS; ++panel)
        *reinterpret_cast<uint4*>(dynamic_smem + V_AT + stage * TILE_BYTES + panel * BLOCK_N * 128 + 16 * i) = uint4{};
    async_proxy_fence();
    named_barrier_sync(8, 128 * CONSUMERS);  // hazard: products read rows that another warpgroup has not cleared
  };

  if (!next_tile()) return;
  clear(acc);
  start_rows(m_i, l_i);
  mbarrier_wait(q_full, 0);
  mbarrier_wait(k_full, 0);
  wgmma_fence();
  start_qk<T>(S, q, k);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(S);
  if (leader) mbarrier_arrive(k_empty);
  if (leader && first == tile.begin) mbarrier_arrive(q_empty);
  if (PINGPONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);  // the first turn is the first's
  maxima();
  online_softmax_weights<0, BLOCK_N / 8>(S, m_i, l_i, softmax_scale_log2);
  to_operand<T, 0, BLOCK_N / 8>(P, S);
  clear_rows_past_the_end(0, 0);

  // ---- one step: S of the next key tile and O of this one are started together. While the products of O run, the
  // weights of the next key tile are computed. After the last key tile of a tile of rows, the next one is the first
  // key tile of the next tile of rows.
  int v_stage = 0, v_parity = 0;
  for (int step = 1, tiles = 0;; ++step) {
    done = tile;
    const bool ends = first == tile.begin;
    if (!ends) first -= BLOCK_N;
    if (ends && !next_tile()) break;
    tiles += ends;
    const int stage = step % STAGES, parity = step / STAGES & 1, q_stage = tiles % Q_STAGES;
    if (ends) mbarrier_wait(q_full + 8 * q_stage, tiles / Q_STAGES & 1);
    mbarrier_wait(k_full + 8 * stage, parity);
    if (PINGPONG) named_barrier_sync(my_turn, 256);
    wgmma_registers(S);
    wgmma_fence();
    start_qk<T>(S, q + q_stage * (Q_BYTES / 16), k + stage * (TILE_BYTES / 16));
    wgmma_commit();
    wgmma_registers(acc);
    rescale_output(acc, rescale);  // while the products of S run
    mbarrier_wait(v_full + 8 * v_stage, v_parity);
    wgmma_registers(acc);
    wgmma_fence();
    start_pv<T>(acc, P, v + v_stage * (TILE_BYTES / 16));
    wgmma_commit();
    if (PINGPONG) named_barrier_arrive(next_turn, 256);
    wgmma_wait<1>();
    wgmma_registers(S);
    const Statistics m_done = {m_i[0], m_i[1]}, l_done = {l_i[0], l_i[1]};
    if (ends) start_rows(m_i, l_i);
    maxima();
    online_softmax_weights<0, WAIT_AT>(S, m_i, l_i, softmax_scale_log2);
    // l_i is never negative. The condition keeps the compiler from moving the wait in front of these weights.
    if (leader && !(l_i[0] < 0.0f)) mbarrier_arrive(k_empty + 8 * stage);
    if (leader && first == tile.begin) mbarrier_arrive(q_empty + 8 * q_stage);
    wgmma_wait<0>();
    wgmma_registers(acc);
    if (leader) mbarrier_arrive(v_empty + 8 * v_stage);
    to_operand<T, 0, WAIT_AT>(P, S);
    online_softmax_weights<WAIT_AT, BLOCK_N / 8>(S, m_i, l_i, softmax_scale_log2);
    to_operand<T, WAIT_AT, BLOCK_N / 8>(P, S);
    v_stage = stage, v_parity = parity;
    if (ends) {
      store_output(done, warp_row, acc, m_done, l_done, O, lse, packed, params);
      clear(acc);
      clear_rows_past_the_end(v_stage, v_parity);
    }
  }
  rescale_output(acc, rescale);
  mbarrier_wait(v_full + 8 * v_stage, v_parity);
  wgmma_registers(acc);
  wgmma_fence();
  start_pv<T>(acc, P, v + v_stage * (TILE_BYTES / 16));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(acc);
  store_output(done, warp_row, acc, m_i, l_i, O, lse, packed, params);
}
