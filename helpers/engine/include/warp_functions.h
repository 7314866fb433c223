// Warp-wide operations: shuffles, votes, matches, reductions.
#pragma once
#include "../cpp/engine.h"
#include <string.h>

namespace engine {

static inline unsigned lane_id() { return engine_lane()->linear % 32; }

// One lane's part in a collective that turns an In of every lane into an Out of every lane.
template <typename In, typename Out>
struct Exchange : Collective {
  In in;
  Out out;
  int source;  // of a shuffle: the lane to read from
};

static inline void run_nothing(Collective* const*, unsigned) {}

template <typename In, typename Out>
static inline auto exchange(
    const char* name, void (*run)(Collective* const*, unsigned), unsigned mask, In in, int source, const char* file,
    int line) {
  Exchange<In, Out> mine;
  mine.name = name;
  mine.run = run;
  mine.mask = mask;
  mine.file = file;
  mine.line = line;
  mine.in = in;
  mine.source = source;
  mine.is_barrier = run == run_nothing;
  engine_collective(&mine);
  return mine.out;
}

template <typename F>
static inline auto for_lanes(unsigned mask, F f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

template <typename T>
void run_shuffle(Collective* const* lanes, unsigned mask) {
  for_lanes(mask, [&](int lane) {
    auto* mine = static_cast<Exchange<T, T>*>(lanes[lane]);
    auto* other = static_cast<Exchange<T, T>*>(lanes[mine->source]);
    if (other) {
      mine->out = other->in;
      return;
    }
    // A lane that takes no part has no value to give: what comes is poison, as its value is undefined on a GPU.
    memset((void*)&mine->out, 0xFF, sizeof(T));
    engine_no_such_lane(mine, (unsigned)lane, (unsigned)mine->source);
  });
}

template <typename T>
static inline T shuffle(const char* name, unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves values of at most 8 bytes");
  return exchange<T, T>(name, run_shuffle<T>, mask, value, source, file, line);
}

// Every lane gets the same answer, computed once from all the values: f(accumulated, value).
template <typename T, typename F>
auto run_fold(Collective* const* lanes, unsigned mask) {
  T total = static_cast<Exchange<T, T>*>(lanes[__builtin_ctz(mask)])->in;
  for_lanes(mask & (mask - 1), [&](int lane) { total = F()(total, static_cast<Exchange<T, T>*>(lanes[lane])->in); });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<T, T>*>(lanes[lane])->out = total; });
}

static inline void run_ballot(Collective* const* lanes, unsigned mask) {
  unsigned votes = 0;
  for_lanes(mask, [&](int lane) {
    votes |= (unsigned)(static_cast<Exchange<int, unsigned>*>(lanes[lane])->in != 0) << lane;
  });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned>*>(lanes[lane])->out = votes; });
}

static inline void run_all(Collective* const* lanes, unsigned mask) {
  unsigned every = 1;
  for_lanes(mask, [&](int lane) { every &= static_cast<Exchange<int, unsigned>*>(lanes[lane])->in != 0; });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned>*>(lanes[lane])->out = every; });
}

static inline void run_uniform(Collective* const* lanes, unsigned mask) {
  bool first = static_cast<Exchange<int, unsigned>*>(lanes[__builtin_ctz(mask)])->in != 0;
  unsigned same = 1;
  for_lanes(mask, [&](int lane) { same &= (static_cast<Exchange<int, unsigned>*>(lanes[lane])->in != 0) == first; });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned>*>(lanes[lane])->out = same; });
}

template <typename T>
void run_match(Collective* const* lanes, unsigned mask) {
  for_lanes(mask, [&](int lane) {
    auto* mine = static_cast<Exchange<T, unsigned>*>(lanes[lane]);
    mine->out = 0;
    for_lanes(mask, [&](int other) {
      if (memcmp(&mine->in, &static_cast<Exchange<T, unsigned>*>(lanes[other])->in, sizeof(T)) == 0)
        mine->out |= 1u << other;
    });
  });
}

template <typename T>
void run_match_all(Collective* const* lanes, unsigned mask) {
  const T& first = static_cast<Exchange<T, unsigned>*>(lanes[__builtin_ctz(mask)])->in;
  bool same = true;
  for_lanes(mask, [&](int lane) {
    same &= memcmp(&first, &static_cast<Exchange<T, unsigned>*>(lanes[lane])->in, sizeof(T)) == 0;
  });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<T, unsigned>*>(lanes[lane])->out = same ? mask : 0; });
}

// clang-format off
struct Add { template <typename T> auto operator()(T a, T b) const { return a + b; } };
struct Min { template <typename T> auto operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <typename T> auto operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <typename T> auto operator()(T a, T b) const { return a & b; } };
struct Or { template <typename T> auto operator()(T a, T b) const { return a | b; } };
struct Xor { template <typename T> auto operator()(T a, T b) const { return a ^ b; } };
// clang-format on

}  // namespace engine

static inline void __syncwarp(unsigned mask = 0xffffffffu, ENGINE_HERE) {
  engine::exchange<int, int>("__syncwarp", engine::run_nothing, mask, 0, 0, file, line);
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, ENGINE_HERE) {
  unsigned lane = engine::lane_id(), segment = lane & ~(unsigned)(width - 1);
  return engine::shuffle(
      "__shfl_sync", mask, value, (int)(segment | ((unsigned)source & (unsigned)(width - 1))), file, line);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id(), source = lane - (int)delta;
  return engine::shuffle("__shfl_up_sync", mask, value, source < (lane & ~(width - 1)) ? lane : source, file, line);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id();
  return engine::shuffle(
      "__shfl_down_sync", mask, value, (lane & (width - 1)) + (int)delta >= width ? lane : lane + (int)delta, file,
      line);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id(), source = lane ^ lane_mask;
  return engine::shuffle(
      "__shfl_xor_sync", mask, value, source >= (lane & ~(width - 1)) + width ? lane : source, file, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return engine::exchange<int, unsigned>("__ballot_sync", engine::run_ballot, mask, predicate, 0, file, line);
}
static inline int __any_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return (int)engine::exchange<int, unsigned>("__all_sync", engine::run_all, mask, predicate, 0, file, line);
}
static inline int __uni_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return (int)engine::exchange<int, unsigned>("__uni_sync", engine::run_uniform, mask, predicate, 0, file, line);
}
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value, ENGINE_HERE) {
  return engine::exchange<T, unsigned>("__match_any_sync", engine::run_match<T>, mask, value, 0, file, line);
}
template <typename T>
static inline unsigned __match_all_sync(unsigned mask, T value, int* predicate, ENGINE_HERE) {
  unsigned same =
      engine::exchange<T, unsigned>("__match_all_sync", engine::run_match_all<T>, mask, value, 0, file, line);
  *predicate = same != 0;
  return same;
}
static inline unsigned __activemask(ENGINE_HERE) { return engine_activemask(file, line); }

#define ENGINE_REDUCE(NAME, OP, T)                                                                     \
  static inline T NAME(unsigned mask, T value, ENGINE_HERE) {                                          \
    return engine::exchange<T, T>(#NAME, engine::run_fold<T, engine::OP>, mask, value, 0, file, line); \
  }
ENGINE_REDUCE(__reduce_add_sync, Add, unsigned)
ENGINE_REDUCE(__reduce_add_sync, Add, int)
ENGINE_REDUCE(__reduce_min_sync, Min, unsigned)
ENGINE_REDUCE(__reduce_min_sync, Min, int)
ENGINE_REDUCE(__reduce_max_sync, Max, unsigned)
ENGINE_REDUCE(__reduce_max_sync, Max, int)
ENGINE_REDUCE(__reduce_and_sync, And, unsigned)
ENGINE_REDUCE(__reduce_or_sync, Or, unsigned)
ENGINE_REDUCE(__reduce_xor_sync, Xor, unsigned)
#undef ENGINE_REDUCE
