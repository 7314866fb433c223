// 10 hopper: FlashAttention-3. One warpgroup copies, two or three compute, and all do so at the same time.
//
// Since 07: TMA copies a tile by one instruction of one thread, swizzled and filled up with zeros on the way, and wgmma
// multiplies from shared memory by one asynchronous instruction of 128 threads. So the roles are split: a producer
// warpgroup starts copies and gives most of its registers to the consumers; mbarriers say which stages are full and
// which are empty. Tensor cores and exp2 work at the same time, for two reasons. A consumer starts S of the next keys
// and O of these together, and computes the next weights while O is added up. And consumers take turns in starting
// products, so that one has products in flight while another computes weights (Shah, Bikshandi et al., 2024). Each block
// takes one tile of rows after the other; S of the next tile's first keys is computed while O is stored.
//
// Launch   grid: as many blocks as multiprocessors, packed: as tiles; block 128 (1 + BLOCK_M / 64); SHARED_BYTES of
//          dynamic shared memory
// Shapes   as 07. Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes of 64 columns, and of 64 rows of Q,
//          BLOCK_N of K and V
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
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i is updated only when a row's maximum exceeds it by more, in powers of 2
#endif
#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns in starting products
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
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr int HEAD_DIM_PADDED = (HEAD_DIM + 15) / 16 * 16;  // columns of the products; TMA fills up with zeros
constexpr int PANELS = (HEAD_DIM + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
constexpr unsigned PANEL_BYTES = 64 * 128, Q_BYTES = PANELS * PANEL_BYTES;  // Q, and O, of one consumer: 64 rows
constexpr unsigned TILE_BYTES = PANELS * BLOCK_N * 128;                     // of a tile of K or V
constexpr unsigned O_AT = CONSUMERS * Q_BYTES, K_AT = O_AT + CONSUMERS * PANEL_BYTES, V_AT = K_AT + STAGES * TILE_BYTES;
constexpr unsigned BARRIERS_AT = V_AT + STAGES * TILE_BYTES;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * (2 * CONSUMERS + 4 * STAGES);
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "16-byte chunks; O must fit the registers");
static_assert(BLOCK_M % 64 == 0 && CONSUMERS >= 2 && CONSUMERS <= 3, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "what wgmma takes, and a step of P V has 16 keys");

using Statistics = float[2];  // of rows g and g + 8 of this thread's warp
using Scores = float[BLOCK_N / 2];
using Weights = unsigned[BLOCK_N / 16][4];  // P as the left operand of P V
using Output = float[HEAD_DIM_PADDED / 2];

// ---- the tiles of rows

// A tile of rows. row: of the first one in Q and O. rows: how many its sequence has from there on. first_pos: the first
// row's position among the keys. Keys begin .. end - 1 are all that some row of the tile sees; end may be too small.
struct Tile {
  int head, kv_head, sequence, row, rows, first_pos, k_first, kv_len, begin, end;
};

// The next tile of this block; false where there is none left. schedule: [rounds][blocks] of (sequence, head, head of K
// and V, first row), made by the host: longest tiles first, so that all blocks have similar amounts of work. `item` is
// loaded one round ahead.
__device__ __forceinline__ bool next_tile(
    Tile& tile, int4& item, int& round, int rounds, const int4* schedule, const int* cu_seqlens_q,
    const int* cu_seqlens_k, const AttentionParams& params) {
  while (round < rounds) {
    const int first_row = item.w;
    tile.sequence = item.x, tile.head = item.y, tile.kv_head = item.z;
    if (++round < rounds) item = schedule[round * gridDim.x + blockIdx.x];
    if (first_row < 0) continue;
    const bool packed = cu_seqlens_q != nullptr;
    const int q_first = packed ? cu_seqlens_q[tile.sequence] : 0;
    const int q_len = packed ? cu_seqlens_q[tile.sequence + 1] - q_first : params.N;
    tile.k_first = packed ? cu_seqlens_k[tile.sequence] : 0;
    tile.kv_len = packed ? cu_seqlens_k[tile.sequence + 1] - tile.k_first : params.N_kv;
    tile.row = q_first + first_row, tile.rows = q_len - first_row;
    if (tile.rows <= 0) continue;  // a sequence that is shorter than the longest
    // Row i is at key i + kv_len - q_len, so that the last row is at the last key.
    tile.first_pos = first_row + tile.kv_len - q_len;
    tile.begin = max(tile.first_pos - params.window_left, 0);
    tile.end = min(tile.first_pos + min(BLOCK_M, tile.rows) + params.window_right, tile.kv_len);
    return true;
  }
  return false;
}

// The first key of the last key tile. A tile of rows starts there and goes down to `begin`. Rows that see no key get one
// key tile, all masked: their sum is 0.
__device__ __forceinline__ int last_keys(const Tile& tile) {
  return tile.begin + (max(tile.end - tile.begin, 1) - 1) / BLOCK_N * BLOCK_N;
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
        T(), S, q + (i / 4 * PANEL_BYTES + i % 4 * 32) / 16, k + (i / 4 * BLOCK_N * 128 + i % 4 * 32) / 16, i > 0);
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
// rounds both alike, so that no weight exceeds 1 at any scale. volatile: it must not move behind a wait for products.
__device__ __forceinline__ float weight(float s, float softmax_scale_log2, float m_i) {
  const float x = EXACT_SHIFT ? __fmul_rn(s, softmax_scale_log2) - m_i : fmaf(s, softmax_scale_log2, -m_i);
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Whether a score of the warp's rows exceeds m_i by so much that weights could overflow (FlashAttention-4's lazy rescale).
// As integers, floats have the same order unless both are negative: then the result is too low, and 0 stands for it. So
// one instruction (VIMNMX3) compares two scores with the highest one so far.
__device__ __forceinline__ bool exceeds_maxima(const Scores& S, const Statistics& m_i, float softmax_scale_log2) {
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int highest = __float_as_int(S[2 * i]);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      highest = max(max(highest, __float_as_int(S[4 * n + 2 * i])), __float_as_int(S[4 * n + 2 * i + 1]));
    exceeds |= fmaxf(__int_as_float(highest), 0.0f) * softmax_scale_log2 > m_i[i] + RESCALE_THRESHOLD;
  }
  return __any_sync(0xffffffff, exceeds);
}

// The new maxima, and the factors by which everything so far has to be rescaled.
__device__ __forceinline__ void online_softmax_maxima(
    const Scores& S, Statistics& m_i, Statistics& l_i, Statistics& rescale, float softmax_scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    s_max = row_allreduce(s_max, [](float a, float b) { return fmaxf(a, b); });
    const float m_new = fmaxf(m_i[i], s_max * softmax_scale_log2);
    rescale[i] = exp2f(m_i[i] - m_new);  // 0 at the first key; 1 if the maximum stays
    m_i[i] = m_new;
    l_i[i] *= rescale[i];
  }
}

// The weights of keys 8 from .. 8 to - 1 in place of their scores, and their sums, of this lane's keys.
__device__ __forceinline__ void online_softmax_weights(
    Scores& S, const Statistics& m_i, Statistics& l_i, float softmax_scale_log2, int from, int to) {
#pragma unroll
  for (int n = from; n < to; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) S[4 * n + 2 * i + e] = weight(S[4 * n + 2 * i + e], softmax_scale_log2, m_i[i]);
      l_i[i] += S[4 * n + 2 * i] + S[4 * n + 2 * i + 1];
    }
}

__device__ __forceinline__ void rescale_output(Output& acc, const Statistics& rescale) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] *= rescale[i / 2 % 2];
}

// The weights of keys 8 from .. 8 to - 1 at half the width. The accumulators of 2 x 8 keys have the layout that the left
// operand of 16 keys needs.
template <typename T>
__device__ __forceinline__ void to_operand(Weights& P, const Scores& S, int from, int to) {
#pragma unroll
  for (int n = from; n < to; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) P[n / 2][n % 2 * 2 + i] = pack(T(), S[4 * n + 2 * i], S[4 * n + 2 * i + 1]);
}

// lse of a warp's 16 rows, from row `warp_row` of the tile on, and the factors that make weighted means of O.
__device__ __forceinline__ void finish_rows(
    const Tile& tile, int warp_row, const Statistics& m_i, const Statistics& l_i, Statistics& inverse, float* lse,
    bool packed, const AttentionParams& params) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
    inverse[i] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);  // a row that sees no key: zeros, and lse = -inf
    const int r = warp_row + 8 * i + threadIdx.x % 32 / 4;
    if (lse && threadIdx.x % 4 == 0 && r < tile.rows) {
      const long long head_row = (long long)(packed ? 0 : tile.sequence) * params.heads + tile.head;
      lse[head_row * params.N + tile.row + r] = LN_2 * (m_i[i] + log2f(sum));
    }
  }
}

// O of a warp's 16 rows. 64 columns at a time go through `staged`, the warp's 16 rows of 128 bytes in shared memory,
// swizzled: stmatrix writes the fragments, then 8 lanes copy each row.
template <typename T>
__device__ __forceinline__ void store_output(
    const Tile& tile, int warp_row, const Output& acc, const Statistics& inverse, unsigned char* staged, T* O,
    bool packed, const AttentionParams& params) {
  const int lane_id = threadIdx.x % 32;
  const int chunk = lane_id % 8;  // of 16 bytes, of the row that this lane copies
  const int row = warp_row + lane_id / 8, batch = packed ? 0 : tile.sequence;
  T* const out = O + batch * params.o.batch + (tile.row + row) * params.o.row + tile.head * params.o.head + 8 * chunk;
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    __syncwarp();  // hazard: other lanes still copy the panel before
#pragma unroll
    for (int n = 8 * panel; n < 8 * panel + 8 && n < HEAD_DIM_PADDED / 8; n += 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack(T(), acc[4 * n + 2 * i] * inverse[i % 2], acc[4 * n + 2 * i + 1] * inverse[i % 2]);
      stmatrix_x4(
          smem_address(staged) + lane_id % 16 * 128 + ((n % 8 + lane_id / 16) ^ lane_id % 8) * 16, words[0], words[1],
          words[2], words[3]);
    }
    __syncwarp();  // hazard: other lanes have not stored their rows yet
#pragma unroll
    for (int r = 0; r < 16; r += 4)
      if (row + r < tile.rows && 64 * panel + 8 * chunk < HEAD_DIM)
        *reinterpret_cast<uint4*>(out + r * params.o.row + 64 * panel) =
            *reinterpret_cast<const uint4*>(staged + (lane_id / 8 + r) * 128 + (chunk ^ (lane_id / 8 + r) % 8) * 16);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,  // boxes of BLOCK_N rows
    T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; null: not wanted
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each sequence of Q begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int* __restrict__ schedule,      // [rounds, blocks, 4], see next_tile
    const int rounds, const AttentionParams params) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT, V_smem = Q_smem + V_AT;
  const unsigned q_full = Q_smem + BARRIERS_AT, q_empty = q_full + 8 * CONSUMERS;  // one for each consumer
  const unsigned k_full = q_empty + 8 * CONSUMERS, k_empty = k_full + 8 * STAGES;  // one for each stage
  const unsigned v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // tells the compiler that it is uniform
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(q_full + 8 * i, 1), mbarrier_init(q_empty + 8 * i, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(k_full + 8 * stage, 1), mbarrier_init(v_full + 8 * stage, 1);
      mbarrier_init(k_empty + 8 * stage, CONSUMERS), mbarrier_init(v_empty + 8 * stage, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: the others would wait for mbarriers that are not initialised
  Tile tile, done;
  int round = 0;
  const int4* const items = reinterpret_cast<const int4*>(schedule);
  int4 item = items[blockIdx.x];
  const auto next = [&] { return next_tile(tile, item, round, rounds, items, cu_seqlens_q, cu_seqlens_k, params); };

  // ---- producer: a thread for K, one for V and one for Q. Stages are filled in turn; `step` counts tiles of keys
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id == 3) return;
    const TensorMap& map = warp_id == 0 ? k_map : v_map;
    const unsigned smem = warp_id == 0 ? K_smem : V_smem, full = warp_id == 0 ? k_full : v_full;
    const unsigned empty = full + 8 * STAGES;
    for (int step = 0, tiles = 0; next(); ++tiles) {
      const int batch = packed ? 0 : tile.sequence;
      for (int i = 0; warp_id == 2 && i < CONSUMERS; ++i) {
        mbarrier_wait(q_empty + 8 * i, (tiles & 1) ^ 1);  // hazard: products still read Q
        mbarrier_arrive_expect_tx(q_full + 8 * i, Q_BYTES);
        for (int panel = 0; panel < PANELS; ++panel)
          tma_load(
              Q_smem + i * Q_BYTES + panel * PANEL_BYTES, q_map, q_full + 8 * i, panel * PANEL_COLUMNS,
              tile.row + 64 * i, tile.head, batch);
      }
      for (int first = last_keys(tile); warp_id != 2 && first >= tile.begin; first -= BLOCK_N, ++step) {
        const int stage = step % STAGES;
        mbarrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);  // hazard: products still read this stage
        mbarrier_arrive_expect_tx(full + 8 * stage, TILE_BYTES);
        for (int panel = 0; panel < PANELS; ++panel)
          tma_load(
              smem + stage * TILE_BYTES + panel * BLOCK_N * 128, map, full + 8 * stage, panel * PANEL_COLUMNS,
              tile.k_first + first, tile.kv_head, batch);
      }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;  // of the tile's rows
  const bool leader = threadIdx.x % 128 == 0;                      // arrives for its warpgroup
  unsigned char* const staged = dynamic_smem + O_AT + (threadIdx.x / 32 - 4) * 16 * 128;
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * Q_BYTES), k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % CONSUMERS;          // named barriers
  const float softmax_scale_log2 = fmaxf(fabsf(params.softmax_scale), 1e-30f) * LOG2_E;  // 0 times -inf would be NaN
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as accumulators have them
  Scores S;
  Weights P;
  Output acc;
  Statistics m_i, l_i, rescale, inverse;  // m_i in units of log2; l_i of this lane's keys only, until the epilogue
  int first, step = 0, tiles = 0;         // first: of the keys of S

  const auto start_scores = [&](int stage) {
    wgmma_registers(S);
    wgmma_fence();
    start_qk<T>(S, q, k + stage * (TILE_BYTES / 16));
    wgmma_commit();
  };
  const auto start_output = [&](int stage) {
    wgmma_registers(acc);
    wgmma_fence();
    start_pv<T>(acc, P, v + stage * (TILE_BYTES / 16));
    wgmma_commit();
  };
  const auto mask_scores = [&] {
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params.window_left, params.window_right);
    }
  };
  const auto maxima = [&] { online_softmax_maxima(S, m_i, l_i, rescale, softmax_scale_log2); };
  const auto store = [&] { store_output(done, warp_row, acc, inverse, staged, O, packed, params); };
  const auto weights = [&](int from, int to) { online_softmax_weights(S, m_i, l_i, softmax_scale_log2, from, to); };

  if (!next()) return;
  mbarrier_wait(q_full + 8 * consumer, 0);
  mbarrier_wait(k_full, 0);
  start_scores(0);
  wgmma_wait<0>();
  if (PINGPONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);  // the first turn is the first's
  for (;;) {
    // ---- a tile's first keys: S is there
    m_i[0] = m_i[1] = LOWEST, l_i[0] = l_i[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    wgmma_registers(S);
    if (leader) mbarrier_arrive(k_empty + 8 * (step % STAGES));
    first = last_keys(tile);
    mask_scores();
    maxima();
    bool rescaled = false;  // of what is in acc, so far nothing
    weights(0, GROUPS);
    to_operand<T>(P, S, 0, GROUPS);
    // Packed: rows of V past the end belong to the next sequence. Their weights are 0, but 0 times inf would be NaN.
    if (packed && first + BLOCK_N > tile.kv_len) {
      mbarrier_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
      for (int i = max(tile.kv_len - first, 0) * 8 + threadIdx.x - 128; i < BLOCK_N * 8; i += 128 * CONSUMERS)
        for (int panel = 0; panel < PANELS; ++panel)
          *reinterpret_cast<uint4*>(dynamic_smem + V_AT + step % STAGES * TILE_BYTES + panel * BLOCK_N * 128 + 16 * i) =
              uint4{};
      async_proxy_fence();
      named_barrier_sync(8, 128 * CONSUMERS);  // hazard: products read rows that another warpgroup has not cleared
    }

    // ---- one step: S of the next key tile and O of this one are started together. While the products of O run, the
    // weights of the next key tile are computed.
    for (first -= BLOCK_N; first >= tile.begin; first -= BLOCK_N) {
      const int v_stage = step % STAGES, v_parity = step / STAGES & 1;
      ++step;
      const int stage = step % STAGES;
      mbarrier_wait(k_full + 8 * stage, step / STAGES & 1);
      if (PINGPONG) named_barrier_sync(my_turn, 256);
      start_scores(stage);
      wgmma_registers(acc);
      if (rescaled) rescale_output(acc, rescale);  // while the products of S run
      mbarrier_wait(v_full + 8 * v_stage, v_parity);
      start_output(v_stage);
      if (PINGPONG) named_barrier_arrive(next_turn, 256);
      wgmma_wait<1>();
      wgmma_registers(S);
      if (leader) mbarrier_arrive(k_empty + 8 * stage);
      mask_scores();
      rescaled = exceeds_maxima(S, m_i, softmax_scale_log2);
      if (rescaled) maxima();
      weights(0, GROUPS / 2);
      wgmma_wait<0>();
      wgmma_registers(acc);
      if (leader) mbarrier_arrive(v_empty + 8 * v_stage);
      to_operand<T>(P, S, 0, GROUPS / 2);
      weights(GROUPS / 2, GROUPS);
      to_operand<T>(P, S, GROUPS / 2, GROUPS);
    }

    // ---- the last keys' O, and S of the next tile's first keys, which run while O is stored
    if (leader) mbarrier_arrive(q_empty + 8 * consumer);
    if (rescaled) rescale_output(acc, rescale);
    done = tile;
    finish_rows(done, warp_row, m_i, l_i, inverse, lse, packed, params);  // before O is there: others' products run
    if (!next()) break;
    const int v_stage = step % STAGES;
    mbarrier_wait(v_full + 8 * v_stage, step / STAGES & 1);
    start_output(v_stage);
    ++step, ++tiles;
    mbarrier_wait(q_full + 8 * consumer, tiles & 1);
    mbarrier_wait(k_full + 8 * (step % STAGES), step / STAGES & 1);
    start_scores(step % STAGES);
    wgmma_wait<1>();
    wgmma_registers(acc);
    if (leader) mbarrier_arrive(v_empty + 8 * v_stage);
    store();
    wgmma_wait<0>();
  }
  mbarrier_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
  start_output(step % STAGES);
  wgmma_wait<0>();
  wgmma_registers(acc);
  store();
}
