// mbarrier: a barrier that is a word of shared memory, for any set of threads and for bytes that copies bring. Beneath
// cuda::barrier and cuda::pipeline, and beneath TMA: the copies that arrive at one, and those back to global memory.
#pragma once
#include "memory.h"

namespace engine {
namespace ptx {
namespace mbarrier {

typedef unsigned long long State;
constexpr State COUNT = (1u << 20) - 1;  // of a state: the arrivals that its phase waits for

template <Space S, typename A>
ENGINE_INLINE void* at(A base, long long offset, const char* file, int line) {
  return pointer<S, 8, A>(base, offset, "mbarrier", file, line);
}

// Of a multicast: the blocks of the cluster that it goes to.
template <typename M>
ENGINE_INLINE unsigned mask_of(M mask, const char* file, int line) {
  if (!(unsigned short)mask) engine_fail(".multicast::cluster names no block", file, line);
  return (unsigned short)mask;
}

// Plain bytes. to, from, offset: of the operands in brackets. From: global memory, or this block's shared memory.
// blocks: of the cluster, which all get it; 0: one does.
template <Space From, typename Target, typename Source, typename Barrier>
ENGINE_INLINE void bulk_copy(
    Target target, long long to, Source source, long long from, unsigned bytes, Barrier barrier, long long offset,
    unsigned blocks, const char* file, int line) {
  if (bytes % 16 != 0) engine_fail("cp.async.bulk copies a multiple of 16 bytes", file, line);
  void* const place = pointer<Space::cluster, 16, Target>(target, to, "cp.async.bulk", file, line);
  const void* const origin = pointer<From, 16, Source>(source, from, "cp.async.bulk", file, line);
  engine_bulk_load(place, origin, bytes, at<Space::cluster>(barrier, offset, file, line), blocks, file, line);
}
template <typename Target, typename Source>
ENGINE_INLINE void bulk_store(
    Target target, long long to, Source source, long long from, unsigned bytes, const char* file, int line) {
  if (bytes % 16 != 0) engine_fail("cp.async.bulk copies a multiple of 16 bytes", file, line);
  void* const place = pointer<Space::generic, 16, Target>(target, to, "cp.async.bulk", file, line);
  engine_bulk_store(place, pointer<Space::shared, 16, Source>(source, from, "cp.async.bulk", file, line), bytes);
}
// A store of floats that are added to those of the array.
template <typename Target, typename Source>
ENGINE_INLINE void bulk_add(
    Target target, long long to, Source source, long long from, unsigned bytes, const char* file, int line) {
  constexpr const char* name = "cp.reduce.async.bulk";
  if (bytes % 16 != 0) engine_fail("cp.reduce.async.bulk adds a multiple of 16 bytes", file, line);
  void* const place = pointer<Space::generic, 16, Target>(target, to, name, file, line);
  engine_bulk_add(place, pointer<Space::shared, 16, Source>(source, from, name, file, line), bytes);
}

// A box of a tensor, by the map at an address. coordinates: the innermost first.
template <typename Map, typename Shared, typename Barrier, typename... C>
ENGINE_INLINE void tensor_load(
    Shared shared, long long to, Map map, long long map_offset, Barrier barrier, long long offset, unsigned blocks,
    const char* file, int line, C... coordinates) {
  const int first[] = {as<int>(coordinates)...};
  engine_tensor_load(
      (const void*)(number(map) + (uintptr_t)map_offset), first, sizeof...(C),
      (unsigned)(number(shared) + (uintptr_t)to), at<Space::cluster>(barrier, offset, file, line), blocks, file, line);
}
template <typename Map, typename Shared, typename... C>
ENGINE_INLINE void tensor_store(
    Map map, long long map_offset, Shared shared, long long from, const char* file, int line, C... coordinates) {
  const int first[] = {as<int>(coordinates)...};
  engine_tensor_store(
      (const void*)(number(map) + (uintptr_t)map_offset), first, sizeof...(C),
      (unsigned)(number(shared) + (uintptr_t)from), file, line);
}

// st.async of up to 16 bytes.
template <typename T, int N, typename Target, typename Barrier>
ENGINE_INLINE void store_async(
    Target target, long long to, Vector<T, N> values, Barrier barrier, long long offset, const char* file, int line) {
  Words data = {};
  __builtin_memcpy((void*)&data, (const void*)&values, sizeof values);
  void* const place = pointer<Space::cluster, sizeof values, Target>(target, to, "st.async", file, line);
  engine_store_async(place, data, sizeof values, at<Space::cluster>(barrier, offset, file, line), file, line);
}

}  // namespace mbarrier
}  // namespace ptx
}  // namespace engine
