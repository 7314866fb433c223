// The keys and values of a cache on their way into a warp's ring of stages, and new ones into the
// cache. Written out in 14's steps, explained in its notebook. To be included after PAGED.

#pragma once
#include "stretches.cuh"

// Where keys and values are.
template <typename T>
struct Cache {
  T *K, *V;
  const T *K_new, *V_new;
  const int* block_table;
  const DecodeParams& params;

  // A key in its page, from the cache's beginning.
  __device__ __forceinline__ long long offset(
      const Strides& strides, int page, int key, int kv_head) const {
    return page * strides.batch + (key & ((1 << params.page_bits) - 1)) * strides.row +
           kv_head * strides.head;
  }
  __device__ __forceinline__ long long new_offset(
      const Strides& strides, const Stretch& at, int key) const {
    return at.sequence * strides.batch + (key - at.keys.before) * strides.row +
           at.kv_head * strides.head;
  }
};

// The copies of a warp: of its tiles of the block's stretch, in the order in which it needs them.
template <typename T>
struct Copies {
  const Cache<T>& cache;
  Stretch at;
  int tile;
  int page;  // of key lane_id of the tile, looked up a tile ahead
  bool more = true;

  __device__ __forceinline__ Copies(const Cache<T>& cache, const Stretch& stretch)
      : cache(cache), at(stretch), tile(stretch.first + int(threadIdx.x / 32) - WARPS) {
    advance();
  }

  __device__ __forceinline__ int first_key() const { return at.keys.first_key(tile); }

  __device__ __forceinline__ void advance() {
    for (tile += WARPS; tile >= at.end; tile = at.first + threadIdx.x / 32)
      if (!at.advance()) {
        more = false;
        return;
      }
    if (!PAGED) {
      page = at.sequence;
      return;
    }
    const int key = first_key() + threadIdx.x % 32 % BLOCK_N;
    const int* table = cache.block_table + at.sequence * (long long)cache.params.table_row;
    page = at.keys.is_seen(key) ? table[key >> cache.params.page_bits] : 0;
  }

  // Where this lane's chunks of the rows of a tile are; LANES copy a row.
  static constexpr int CHUNKS_T = ROW_CHUNKS<T>, LANES = CHUNKS_T < 32 ? CHUNKS_T : 32;
  template <typename Visit>
  __device__ __forceinline__ void for_rows(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < BLOCK_N; i += 32 / LANES) {
      const int row = i + threadIdx.x % 32 / LANES, key = first_key() + row;
      visit(row, key, PAGED ? __shfl_sync(0xffffffff, page, row) : page);
    }
  }

  // Starts the copies of the next tile. What no row sees becomes zeros: it may be NaN, or in a page
  // that is not there.
  __device__ __forceinline__ void issue(unsigned K_smem, unsigned V_smem) {
    if (!more) return;
    const Strides &k = cache.params.attention.k, &v = cache.params.attention.v;
    const int chunk = threadIdx.x % LANES;
    for_rows([&](int row, int key, int key_page) {
      const bool is_new = key >= at.keys.before;  // where it is seen, and then there are new keys
      const T* from_k = is_new ? cache.K_new + cache.new_offset(cache.params.k_new, at, key)
                               : cache.K + cache.offset(k, key_page, key, at.kv_head);
      const T* from_v = is_new ? cache.V_new + cache.new_offset(cache.params.v_new, at, key)
                               : cache.V + cache.offset(v, key_page, key, at.kv_head);
      const int bytes = at.keys.is_seen(key) ? 16 : 0;
#pragma unroll
      for (int c = chunk; c < CHUNKS_T; c += LANES) {
        cp_async(K_smem + swizzle<CHUNKS_T>(row, c), from_k + c * ELEMENTS, bytes);
        cp_async(V_smem + swizzle<CHUNKS_T>(row, c), from_v + c * ELEMENTS, bytes);
      }
    });
    if (cache.K_new && first_key() + BLOCK_N > at.keys.before) append();
    advance();
  }

  // New keys and values go into the cache, where no block reads them in this launch. The tile of rows
  // that has a token, which sees its own key, stores that key.
  static constexpr int ELEMENTS = 16 / sizeof(T);  // of a chunk
  __device__ __forceinline__ void append() const {
    const auto copy = [&](T* to, const T* from) {
      for (int c = threadIdx.x % LANES; c < CHUNKS_T; c += LANES)
        reinterpret_cast<uint4*>(to)[c] = reinterpret_cast<const uint4*>(from)[c];
    };
    const DecodeParams& params = cache.params;
    const int group = params.attention.heads / params.attention.kv_heads;
    for_rows([&](int row, int key, int key_page) {
      if (key < at.keys.before || !at.keys.is_seen(key)) return;
      if ((key - at.keys.before) * group / TILE_ROWS != blockIdx.y) return;
      copy(
          cache.K + cache.offset(params.attention.k, key_page, key, at.kv_head),
          cache.K_new + cache.new_offset(params.k_new, at, key));
      copy(
          cache.V + cache.offset(params.attention.v, key_page, key, at.kv_head),
          cache.V_new + cache.new_offset(params.v_new, at, key));
    });
  }
};
