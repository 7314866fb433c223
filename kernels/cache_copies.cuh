// The keys and values of a cache on their way into a warp's ring of stages, and new ones into the
// cache. Written out in 14's steps, explained in its notebook.

#pragma once
#include "e4m3_cache.cuh"
#include "stream_k.cuh"

#ifndef PAGED
#define PAGED 0  // 1: K and V lie in pages, which block_table finds; 2: not of a power of two keys
#endif

#ifndef READ_ONCE
#define READ_ONCE 0  // 1: what was copied leaves the L2 cache before all else does
#endif

// What the cache holds.
#if CACHE_E4M3
template <typename T>
using Cached = unsigned char;
#else
template <typename T>
using Cached = T;
#endif

// Where keys and values are.
template <typename T>
struct Cache {
  Cached<T>*K, *V;
  const T *K_new, *V_new;
  const int* block_table;
  const DecodeParams& params;
  const float *k_descale = nullptr, *v_descale = nullptr;  // of a cache in e4m3
  unsigned char* smem = nullptr;  // for it, too: where shared memory begins

  // What the bytes of a unit are multiplied by.
  __device__ __forceinline__ float descale(const float* of, int sequence, int kv_head) const {
    return of ? of[sequence * params.attention.kv_heads + kv_head] : 1.0f;
  }
};

// The copies of a warp: of its tiles of the block's stretch, in the order in which it needs them.
template <typename T>
struct Copies {
  // LANES copy a row, each a chunk of 16 bytes or, of long rows, two.
  static constexpr int CHUNKS_T = HEAD_DIM * CACHE_BYTES<T> / 16,
                       LANES = CHUNKS_T < 32 ? CHUNKS_T : 32;
  static constexpr int ROWS_AT_ONCE = 32 / LANES, PER_LANE = CHUNKS_T / LANES;
  const Cache<T>& cache;
  StreamK at;
  int tile;
  int page = 0;  // of key lane_id of the tile, looked up a tile ahead
  bool more = true;
  unsigned char *K_lane, *V_lane;  // the unit's first key, or that of page 0: this lane's chunk
  unsigned long long policy = 0;   // of the L2 cache, with READ_ONCE
  const unsigned k_row, v_row, k_page, v_page;  // bytes from one to the next

  __device__ __forceinline__ Copies(const Cache<T>& cache, const StreamK& stretch)
      : cache(cache),
        at(stretch),
        tile(stretch.first + int(threadIdx.x / 32) - WARPS),
        k_row(cache.params.attention.k.row * CACHE_BYTES<T>),
        v_row(cache.params.attention.v.row * CACHE_BYTES<T>),
        k_page(PAGED ? cache.params.attention.k.batch * CACHE_BYTES<T> : 0),
        v_page(PAGED ? cache.params.attention.v.batch * CACHE_BYTES<T> : 0) {
#if READ_ONCE
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    find_unit();
    advance();
  }

  // cp_async, by this policy.
  __device__ __forceinline__ void copy(unsigned target, const void* source, int bytes) const {
#if READ_ONCE
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
                 "l"(source), "r"(bytes), "l"(policy)
                 : "memory");
#else
    cp_async(target, source, bytes);
#endif
  }

  // This lane's chunk of the first row of the unit.
  template <typename Pointer>
  __device__ __forceinline__ unsigned char* of_unit(
      Pointer pointer, const Strides& strides, bool paged) const {
    const long long first = (paged ? 0 : at.sequence * strides.batch) + at.kv_head * strides.head;
    return (unsigned char*)(pointer + first) + 16 * (threadIdx.x % LANES);
  }
  __device__ __forceinline__ void find_unit() {
    K_lane = of_unit(cache.K, cache.params.attention.k, PAGED);
    V_lane = of_unit(cache.V, cache.params.attention.v, PAGED);
  }

  __device__ __forceinline__ void advance() {
    for (tile += WARPS; tile >= at.end; tile = at.first + threadIdx.x / 32) {
      if (!at.advance()) {
        more = false;
        return;
      }
      find_unit();
    }
    if (!PAGED) return;
    const int key = at.keys.first_key(tile) + threadIdx.x % 32 % BLOCK_N;
    const int* table = cache.block_table + at.sequence * (long long)cache.params.table_row;
    const int entry = PAGED == 2 ? key / cache.params.page_size : key >> cache.params.page_bits;
    page = at.keys.is_seen(key) ? table[entry] : 0;
  }

  // From the unit's first key, or from page 0, to a key.
  __device__ __forceinline__ unsigned long long offset(
      unsigned row, unsigned page_bytes, unsigned of_page, unsigned key) const {
    const unsigned in_page = PAGED == 2 ? key % cache.params.page_size
                             : PAGED    ? key & ((1u << cache.params.page_bits) - 1)
                                        : key;
    return (unsigned long long)of_page * page_bytes + (unsigned long long)in_page * row;
  }

  // Whether this lane's chunk c of a row of K or V is in memory; others become zeros.
  __device__ __forceinline__ static bool in_k(int c) {
    return has_chunk<K_COLUMNS, CACHE_BYTES<T>>(threadIdx.x % LANES + c * LANES);
  }
  __device__ __forceinline__ static bool in_v(int c) {
    return has_chunk<V_COLUMNS, CACHE_BYTES<T>>(threadIdx.x % LANES + c * LANES);
  }

  // Starts the copies of the next tile.
  __device__ __forceinline__ void issue(unsigned K_smem, unsigned V_smem) {
    if (!more) return;
    const int first_key = at.keys.first_key(tile);
    const int row = threadIdx.x % 32 / LANES;  // this lane's first; the others have its swizzle
    const unsigned to = swizzle<CHUNKS_T>(row, threadIdx.x % LANES);
    const bool whole = first_key >= at.keys.begin &&
                       first_key + BLOCK_N <= min(at.keys.end, at.keys.before) &&
                       (!PAGED || cache.params.page_bits >= 4);
    if (whole) {  // all of it is seen and was there before, and 16 keys are in one page
#pragma unroll
      for (int half = 0; half < BLOCK_N; half += 16) {
        const int of_half = PAGED ? __shfl_sync(0xffffffff, page, half) : 0;
        const unsigned char* k = K_lane + offset(k_row, k_page, of_half, first_key + half + row);
        const unsigned char* v = V_lane + offset(v_row, v_page, of_half, first_key + half + row);
#pragma unroll
        for (int i = 0; i < 16; i += ROWS_AT_ONCE)
#pragma unroll
          for (int c = 0; c < PER_LANE; ++c) {
            const unsigned there = (half + i) * CHUNKS_T * 16 + c * LANES * 16;
            const unsigned from = c * LANES * 16;
            copy(
                (K_smem + to ^ 16 * (i % 8)) + there, k + (unsigned long long)i * k_row + from,
                in_k(c) ? 16 : 0);
            copy(
                (V_smem + to ^ 16 * (i % 8)) + there, v + (unsigned long long)i * v_row + from,
                in_v(c) ? 16 : 0);
          }
      }
    } else {
      copy_by_row(K_smem, V_smem, first_key);
    }
    advance();
  }

  // The same of any tile. What no row sees becomes zeros: it may be NaN, or in a page that is not
  // there. New keys and values go into the cache as well, where no block reads them in this launch:
  // the tile of rows that has a token, which sees its own key, stores that key.
  __device__ __forceinline__ void copy_by_row(unsigned K_smem, unsigned V_smem, int first_key) {
    const DecodeParams& params = cache.params;
#pragma unroll 1
    for (int i = 0; i < BLOCK_N; i += ROWS_AT_ONCE) {
      const int row = i + threadIdx.x % 32 / LANES, key = first_key + row;
      const int key_page = PAGED ? __shfl_sync(0xffffffff, page, row) : 0;
      const bool is_seen = at.keys.is_seen(key), is_new = is_seen && key >= at.keys.before;
      const int token = key - at.keys.before;
      unsigned char* k = K_lane + offset(k_row, k_page, key_page, key);
      unsigned char* v = V_lane + offset(v_row, v_page, key_page, key);
      const unsigned char *from_k = k, *from_v = v;
      if (is_new) {
        from_k = of_unit(cache.K_new + token * params.k_new.row, params.k_new, false);
        from_v = of_unit(cache.V_new + token * params.v_new.row, params.v_new, false);
      }
      const bool keeps = is_new && token * at.rows.group / TILE_ROWS == blockIdx.y;
      if constexpr (CACHE_E4M3) {
        if (is_new) {
          store_quantised(row, k, from_k, keeps, in_k(0), K_smem, cache.k_descale);
          store_quantised(row, v, from_v, keeps, in_v(0), V_smem, cache.v_descale);
          continue;
        }
      }
#pragma unroll
      for (int c = 0; c < PER_LANE; ++c) {
        const unsigned to = swizzle<CHUNKS_T>(row, threadIdx.x % LANES + c * LANES);
        const unsigned from = c * LANES * 16;
        copy(K_smem + to, from_k + from, is_seen && in_k(c) ? 16 : 0);
        copy(V_smem + to, from_v + from, is_seen && in_v(c) ? 16 : 0);
        if (!keeps) continue;
        if (in_k(c))
          *reinterpret_cast<uint4*>(k + from) = *reinterpret_cast<const uint4*>(from_k + from);
        if (in_v(c))
          *reinterpret_cast<uint4*>(v + from) = *reinterpret_cast<const uint4*>(from_v + from);
      }
    }
  }

  // This lane's 16 new numbers of a row, as e4m3, into shared memory and, if it keeps them, the cache.
  // `from` is the lane's chunk of 8 numbers in a row of the cache's: here a lane has twice as many. in_row: the
  // lane's numbers are in memory; others become zeros.
  __device__ __forceinline__ void store_quantised(
      int row, unsigned char* to, const unsigned char* from, bool keeps, bool in_row, unsigned tile,
      const float* descale) {
    const int lane = threadIdx.x % LANES;
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (in_row)
      bytes = quantised<T>(from + 16 * lane, cache.descale(descale, at.sequence, at.kv_head));
    const unsigned there = tile - smem_address(cache.smem) + swizzle<CHUNKS_T>(row, lane);
    *reinterpret_cast<uint4*>(cache.smem + there) = bytes;
    if (keeps && in_row) *reinterpret_cast<uint4*>(to) = bytes;
  }
};
