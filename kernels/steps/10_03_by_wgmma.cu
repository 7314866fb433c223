// 10, step 3, products by wgmma: four warps multiply 64 rows of Q by a tile of K in shared memory. Of
// the second product, P comes from registers, V from shared memory, transposed on the way. It reads V
// through the async proxy, so rows that the block has cleared need a fence.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 2 BLOCK_M;
//          SHARED_BYTES of dynamic shared memory
// Shapes   as 07; Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}, boxes of 64 columns
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 07
#include "hopper_epilogue.cuh"  // lse, stores of a warpgroup's rows: as in 07
#include "hopper_softmax.cuh"   // masks, weights: as in 07
#include "hopper_tiles.cuh"     // sizes of tiles, which rows and keys they have: as in 05
#include "tile_io.cuh"          // tiles in panels: copies by TMA, rows of zeros

constexpr int THREADS = 128 * CONSUMERS;
constexpr unsigned K_AT = CONSUMERS * Q_BYTES, V_AT = K_AT + TILE_BYTES;
constexpr unsigned BARRIERS_AT = V_AT + TILE_BYTES;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * 3;

// Issues S = Q K^T for the warpgroup's 64 rows, 16 columns of Q and K at a time.
template <typename T>
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  wgmma_registers(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(T(), S, advance_columns(q, i, 64), advance_columns(k, i, BLOCK_N), i > 0);
  wgmma_commit();
}

// Issues O += P V, 16 keys at a time.
template <typename T>
__device__ __forceinline__ void start_pv(Output& O, const Weights& P, unsigned long long v) {
  wgmma_registers(O);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i) wgmma_rs(T(), O, P[i], advance_rows(v, i), true);
  wgmma_commit();
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,  // boxes of BLOCK_N rows
    T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT,
                 V_smem = Q_smem + V_AT;
  const unsigned q_full = Q_smem + BARRIERS_AT, k_full = q_full + 8, v_full = k_full + 8;
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    mbarrier_init(q_full, 1);
    mbarrier_init(k_full, 1);
    mbarrier_init(v_full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  Tile tile;
  const bool has_rows = tile_of_block(tile, cu_seqlens_q, cu_seqlens_k, params);

  const int consumer = warpgroup, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16;  // of the tile's rows
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * Q_BYTES),
                           k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as in the accumulators' layout
  Scores S;
  Weights P;
  Output acc;
  Statistics m_i, l_i;  // m_i in units of log2; l_i of this lane's keys only, until the epilogue
  Statistics rescale, inverse;
  int first, step = 0;  // first: of the keys of S

  const auto mask_edges = [&] {
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params);
    }
  };
  const auto maxima = [&] { online_softmax_maxima(S, m_i, l_i, rescale, softmax_scale_log2); };
  const auto store = [&] { store_fragments(tile, warp_row, acc, inverse, O, packed, params); };
  const auto weights = [&](int from, int to) {
    online_softmax_weights(S, m_i, l_i, softmax_scale_log2, from, to);
  };

  if (has_rows) {
    m_i[0] = m_i[1] = M_INIT;
    l_i[0] = l_i[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    const int batch = packed ? 0 : tile.sequence;
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(q_full, CONSUMERS * Q_BYTES);
      for (int i = 0; i < CONSUMERS; ++i)
        tma_load_panels<64, PANELS>(
            Q_smem + i * Q_BYTES, q_map, q_full, tile.row + 64 * i, tile.head, batch);
    }
    mbarrier_wait(q_full, 0);

    // ---- one key tile: scores, weights, output, one after the other
    for (first = last_tile_begin(tile); first >= tile.begin; first -= BLOCK_N, ++step) {
      __syncthreads();  // hazard: other warpgroups' products read K and V
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(k_full, TILE_BYTES);
        mbarrier_arrive_expect_tx(v_full, TILE_BYTES);
        for (int panel = 0; panel < PANELS; ++panel) {
          const unsigned to = panel * BLOCK_N * 128, x = panel * PANEL_COLUMNS;
          tma_load(K_smem + to, k_map, k_full, x, tile.k_first + first, tile.kv_head, batch);
          tma_load(V_smem + to, v_map, v_full, x, tile.k_first + first, tile.kv_head, batch);
        }
      }
      mbarrier_wait(k_full, step & 1);
      start_qk<T>(S, q, k);
      wgmma_wait<0>();
      wgmma_registers(S);
      mask_edges();
      maxima();
      rescale_output(acc, rescale);
      weights(0, GROUPS);
      to_operand<T>(P, S, 0, GROUPS);
      mbarrier_wait(v_full, step & 1);
      if (packed && first + BLOCK_N > tile.kv_len) {  // the tile has rows of the next sequence
        clear_rows<BLOCK_N, PANELS>(
            dynamic_smem + V_AT, tile.kv_len - first, threadIdx.x, 128 * CONSUMERS);
        __syncthreads();  // hazard: products could read rows not cleared yet
      }
      start_pv<T>(acc, P, v);
      wgmma_wait<0>();
      wgmma_registers(acc);
    }
    finish_rows(tile, warp_row, m_i, l_i, inverse, lse, packed, params);
    store();
  }
}
