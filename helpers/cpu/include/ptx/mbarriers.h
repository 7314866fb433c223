// mbarrier: a barrier that is a word of shared memory, for any set of threads and for bytes that copies bring. Beneath
// cuda::barrier and cuda::pipeline.
//
// The word is not a GPU's, which nobody may look into: the arrivals that the phase still waits for (20 bits), those that
// every phase expects (20), the bytes that it waits for (22, signed), and on top the phase, modulo 2. It changes by
// atomics with a fence before, and is read with one after; from them a checked run knows the order.
#pragma once
#include "memory.h"

namespace engine {
namespace ptx {
namespace mbarrier {

typedef unsigned long long State;
constexpr State COUNT = (1u << 20) - 1, PHASE = 1ull << 63;
constexpr int EXPECTED = 20, BYTES = 40;

template <Space S, typename A>
ENGINE_INLINE State* at(A base, long long offset, const char* file, int line) {
  return (State*)pointer<S, 8, A>(base, offset, "mbarrier", file, line);
}

// `next` is the state after; a phase for which nothing is pending ends there and the next one begins.
template <typename F>
ENGINE_INLINE State change(State* word, F next) {
  __threadfence_block();
  State before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
  do {
    after = next(before);
    if ((after & COUNT) == 0 && (after << 1 >> (BYTES + 1)) == 0)
      after = ((after & ~COUNT) | (after >> EXPECTED & COUNT)) ^ PHASE;
  } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

// Bytes come and go in any order, so that their number may be negative for a while; the phase is no part of it.
ENGINE_INLINE State with_bytes(State state, State bytes) {
  return (((state & ~PHASE) + (bytes << BYTES)) & ~PHASE) | (state & PHASE);
}

ENGINE_INLINE void init(State* word, unsigned count, const char* file, int line) {
  if (count == 0 || count > COUNT) engine_fail("mbarrier.init takes a count from 1 to 1,048,575", file, line);
  __atomic_store_n(word, count | (State)count << EXPECTED, __ATOMIC_RELAXED);
}
ENGINE_INLINE void inval(State* word) { __atomic_store_n(word, 0, __ATOMIC_RELAXED); }

// bytes: that the phase waits for from here on. drop: later phases do without these arrivals.
ENGINE_INLINE State arrive(State* word, unsigned count, unsigned bytes, bool drop, const char* file, int line) {
  return change(word, [=](State state) {
    if (count > (state & COUNT))
      engine_fail(
          "more threads arrive at an mbarrier than a phase of it expects, or nobody has initialised it", file, line);
    return with_bytes(state, bytes) - count - (drop ? (State)count << EXPECTED : 0);
  });
}
ENGINE_INLINE void expect_bytes(State* word, unsigned bytes) {
  change(word, [=](State state) { return with_bytes(state, bytes); });
}
ENGINE_INLINE void complete_bytes(State* word, unsigned bytes) {
  change(word, [=](State state) { return with_bytes(state, 0 - (State)bytes); });
}

// Whether the phase of a parity (bit 63) is over. Who must wait lets others run first: somebody will ask again.
ENGINE_INLINE bool is_over(State* word, State phase) {
  bool over = ((__atomic_load_n(word, __ATOMIC_RELAXED) ^ phase) & PHASE) != 0;
  if (!over) {
    engine_yield();
    over = ((__atomic_load_n(word, __ATOMIC_RELAXED) ^ phase) & PHASE) != 0;
  }
  if (over) __threadfence_block();
  return over;
}

// cp.async.bulk with an mbarrier: the bytes are copied at once, by the thread that asks for it.
template <typename Target, typename Source, typename Barrier>
ENGINE_INLINE void bulk_copy(
    Target target, long long to, Source source, long long from, unsigned bytes, Barrier barrier, long long offset,
    const char* file, int line) {
  if (bytes % 16 != 0) engine_fail("cp.async.bulk copies a multiple of 16 bytes", file, line);
  char* const place = (char*)pointer<Space::shared, 16, Target>(target, to, "cp.async.bulk", file, line);
  const char* const origin =
      (const char*)pointer<Space::generic, 16, Source>(source, from, "cp.async.bulk", file, line);
  for (unsigned i = 0; i < bytes; i += 16) *(Words*)(place + i) = *(const Words*)(origin + i);
  complete_bytes(at<Space::shared>(barrier, offset, file, line), bytes);
}
template <typename Target, typename Source>
ENGINE_INLINE void bulk_store(
    Target target, long long to, Source source, long long from, unsigned bytes, const char* file, int line) {
  if (bytes % 16 != 0) engine_fail("cp.async.bulk copies a multiple of 16 bytes", file, line);
  char* const place = (char*)pointer<Space::generic, 16, Target>(target, to, "cp.async.bulk", file, line);
  const char* const origin = (const char*)pointer<Space::shared, 16, Source>(source, from, "cp.async.bulk", file, line);
  for (unsigned i = 0; i < bytes; i += 16) *(Words*)(place + i) = *(const Words*)(origin + i);
}

}  // namespace mbarrier
}  // namespace ptx
}  // namespace engine
