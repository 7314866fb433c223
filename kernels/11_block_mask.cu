// 11 block_mask: which tiles of keys a tile of rows needs, and in which of them mask_mod hides a key
// from a row. 05, 07 and 10 skip the others, and ask mask_mod only where it matters. For the
// backward (BY_KEYS) the same of tiles of rows, for each tile of keys.
//
// A warp looks at a tile until it has seen both a pair that is hidden and one that is not.
//
// Launch   grid (tiles of the longest sequence, heads, sequences), or 1 where mask_mod does not ask
//          for the head or the batch; block THREADS
// Shapes   entries [sequences, heads, tiles, width]: how many follow, then 2 tile + partial for each
//          tile of the other side, rising; at least one, so that each tile of rows has work
#include "attention_params.cuh"
#include "hooks.cuh"

#ifndef BLOCK_M
#define BLOCK_M 64  // rows of a tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 64  // keys of a tile
#endif
#ifndef THREADS
#define THREADS 512  // per block
#endif
#ifndef BY_KEYS
#define BY_KEYS 0  // 1: lists of tiles of rows, one for each tile of keys
#endif

constexpr int WARPS = THREADS / 32, STEP = 8;  // rows between two looks
static_assert(THREADS % 32 == 0, "a warp looks at a tile");
enum Kind { EMPTY, FULL, PARTIAL };

// What the warp finds out about a tile, a lane for each key. Pairs outside of the window or the
// sequence do not count: the kernels see to them.
__device__ Kind
kind_of(int first_row, int first_key, const Hooks& hooks, const AttentionParams& params) {
  bool seen = false, hidden = false;
  const int shift = hooks.kv_len - hooks.q_len,
            last_row = min(first_row + BLOCK_M, hooks.q_len) - 1;
  for (int first = first_key; first < min(first_key + BLOCK_N, hooks.kv_len); first += 32) {
    const int key = first + threadIdx.x % 32;
    const bool exists = key < min(first_key + BLOCK_N, hooks.kv_len);
    for (int row = first_row; row <= last_row; row += STEP) {
#pragma unroll
      for (int i = 0; i < STEP; ++i) {
        const int q_idx = min(row + i, last_row) + shift, distance = key - q_idx;
        if (exists && -distance <= params.window_left && distance <= params.window_right) {
          const bool sees = !is_hidden(hooks, q_idx, key);
          seen |= sees;
          hidden |= !sees;
        }
      }
      if (__any_sync(0xffffffff, seen) && __any_sync(0xffffffff, hidden)) return PARTIAL;
    }
  }
  return __any_sync(0xffffffff, seen) ? FULL : EMPTY;
}

extern "C" __global__ void __launch_bounds__(THREADS) make_block_mask(
    int* __restrict__ entries,
    const int width,                       // 1 + tiles of the other side
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params HOOK_PARAMETERS) {
  // ---- the tile, head and sequence of this block
  const int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const bool packed = cu_seqlens_q != nullptr;
  const int q_len = packed ? cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence] : params.N;
  const int kv_len = packed ? cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence] : params.N_kv;
  const Hooks hooks = {
      HOOK_ARGUMENTS sequence, head, head / (params.heads / params.kv_heads), q_len, kv_len};
  entries += ((long long)(sequence * gridDim.y + head) * gridDim.x + tile) * width;
  const int of_sequence =
      BY_KEYS ? (q_len + BLOCK_M - 1) / BLOCK_M : (kv_len + BLOCK_N - 1) / BLOCK_N;
  const int others = min(of_sequence, width - 1);  // more, if max_seqlen_k is too small
  if (tile * (BY_KEYS ? BLOCK_N : BLOCK_M) >= (BY_KEYS ? kv_len : q_len)) return;

  // ---- a warp for each tile of the other side; one thread writes down what they have found
  __shared__ Kind kinds[WARPS];
  const int warp_id = threadIdx.x / 32;
  int count = 0;
  for (int first = 0; first < others; first += WARPS) {
    const int other = first + warp_id, row_tile = BY_KEYS ? other : tile,
              key_tile = BY_KEYS ? tile : other;
    const Kind kind =
        other < others ? kind_of(row_tile * BLOCK_M, key_tile * BLOCK_N, hooks, params) : EMPTY;
    if (threadIdx.x % 32 == 0) kinds[warp_id] = kind;
    __syncthreads();  // hazard: kinds could be read before all warps have written theirs
    for (int i = 0; threadIdx.x == 0 && i < WARPS; ++i)
      if (kinds[i] != EMPTY) entries[++count] = 2 * (first + i) + (kinds[i] == PARTIAL);
    __syncthreads();  // hazard: kinds could be overwritten before they are written down
  }

  // ---- how many they are
  if (threadIdx.x != 0) return;
  if (count == 0) entries[++count] = 1;  // tile 0, of which nothing is seen
  entries[0] = count;
}
