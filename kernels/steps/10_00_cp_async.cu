// 10, where the climb begins: 07's attention with what 07 teaches in headers, to be read whole. A
// warp has 16 rows; cp.async copies tiles when they are needed, those of the last keys first.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block 2 BLOCK_M;
//          SHARED_BYTES of dynamic shared memory
// Shapes   as 07
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 07
#include "hopper_epilogue.cuh"  // lse, stores of a warpgroup's rows: as in 07
#include "hopper_softmax.cuh"   // masks, weights: as in 07
#include "hopper_tiles.cuh"     // sizes of tiles, which rows and keys they have: as in 05
#include "swizzle.cuh"          // swizzle: 07
#include "tile_io.cuh"          // tiles in panels: copies by TMA, rows of zeros

constexpr int THREADS = 128 * CONSUMERS;
constexpr unsigned K_AT = CONSUMERS * Q_BYTES, V_AT = K_AT + TILE_BYTES;
constexpr unsigned SHARED_BYTES = V_AT + TILE_BYTES;

// 16 i columns further in a tile of ROWS rows: panels of 64 columns, one after the other.
template <int ROWS>
__device__ __forceinline__ unsigned advance(unsigned address, int i) {
  return (address ^ i % 4 * 32) + i / 4 * ROWS * 128;
}

// Accumulators 4 n .. 4 n + 3: those of 8 columns.
template <int N>
__device__ __forceinline__ float (&atom(float (&d)[N], int n))[4] {
  return reinterpret_cast<float (&)[4]>(d[4 * n]);
}

// S = Q K^T by mma.sync for this warp's 16 rows.
template <typename T>
__device__ __forceinline__ void gemm_qk(Scores& S, unsigned q_lane, unsigned k_lane) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) S[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i) {
    unsigned a[4];
    ldmatrix_x4(a, advance<64>(q_lane, i));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, advance<BLOCK_N>(k_lane, i) + n * 16 * 128);
      mma_m16n8k16(T(), atom(S, 2 * n), a, b[0], b[1]);
      mma_m16n8k16(T(), atom(S, 2 * n + 1), a, b[2], b[3]);
    }
  }
}

// O += P V by mma.sync, 16 keys after 16 keys. V is transposed on the way.
template <typename T>
__device__ __forceinline__ void gemm_pv(Output& acc, const Weights& P, unsigned v_lane) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i)
#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, advance<BLOCK_N>(v_lane, n) + i * 16 * 128);
      mma_m16n8k16(T(), atom(acc, 2 * n), P[i], b[0], b[1]);
      mma_m16n8k16(T(), atom(acc, 2 * n + 1), P[i], b[2], b[3]);
    }
}

// All panels of ROWS rows by cp.async: all threads copy, swizzled as in 07. Only rows_left rows are
// read; elements past them, or past HEAD_DIM, become zeros.
template <int ROWS, typename T>
__device__ __forceinline__ void cp_async_panels(
    unsigned target, const T* __restrict__ source, const Strides& strides, int rows_left, int row,
    int head, int batch) {
  source += batch * strides.batch + head * strides.head + row * strides.row;
  for (int i = threadIdx.x; i < PANELS * ROWS * 8; i += 128 * CONSUMERS) {
    const int panel = i / (ROWS * 8), r = i / 8 % ROWS, c = i % 8;
    const int x = panel * PANEL_COLUMNS + 8 * c;
    const bool in_bounds = r < rows_left && x < HEAD_DIM;
    cp_async(
        target + panel * ROWS * 128 + swizzle<8>(r, c),
        source + (in_bounds ? r * strides.row + x : 0), in_bounds ? 16 : 0);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT,
                 V_smem = Q_smem + V_AT;
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  Tile tile;
  const bool has_rows = tile_of_block(tile, cu_seqlens_q, cu_seqlens_k, params);

  const int consumer = warpgroup, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = threadIdx.x / 32 * 16;  // of the tile's rows
  const unsigned q_lane =                      // the addresses that this lane passes to ldmatrix
      Q_smem + consumer * Q_BYTES + swizzle<8>(warp_row % 64 + lane_id % 16, lane_id / 16);
  const unsigned k_lane = K_smem + swizzle<8>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = V_smem + swizzle<8>(lane_id % 16, lane_id / 16);
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as in the accumulators' layout
  Scores S;
  Weights P;
  Output acc;
  Statistics m_i, l_i;  // m_i in units of log2; l_i of this lane's keys only, until the epilogue
  Statistics rescale, inverse;
  int first;  // of the keys of S

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
    for (int i = 0; i < CONSUMERS; ++i)
      cp_async_panels<64>(
          Q_smem + i * Q_BYTES, Q, params.q, tile.rows - 64 * i, tile.row + 64 * i, tile.head,
          batch);

    // ---- one key tile: scores, weights, output, one after the other
    for (first = last_tile_begin(tile); first >= tile.begin; first -= BLOCK_N) {
      __syncthreads();  // hazard: other warpgroups' products read K and V
      const int left = tile.kv_len - first, row = tile.k_first + first;
      cp_async_panels<BLOCK_N>(K_smem, K, params.k, left, row, tile.kv_head, batch);
      cp_async_panels<BLOCK_N>(V_smem, V, params.v, left, row, tile.kv_head, batch);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();  // hazard: products could read tiles before other threads' copies arrive
      gemm_qk<T>(S, q_lane, k_lane);
      mask_edges();
      maxima();
      rescale_output(acc, rescale);
      weights(0, GROUPS);
      to_operand<T>(P, S, 0, GROUPS);
      gemm_pv<T>(acc, P, v_lane);
    }
    finish_rows(tile, warp_row, m_i, l_i, inverse, lse, packed, params);
    store();
  }
}
