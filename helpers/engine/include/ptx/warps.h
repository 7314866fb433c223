// What the lanes of a warp do together. The PTX ISA says which lane a shuffle reads, with clamp and segments in one word.
#pragma once
#include "operands.h"

namespace engine {
namespace ptx {

enum class Shuffle { up, down, bfly, idx };

template <Shuffle Mode>
ENGINE_INLINE unsigned shfl(
    unsigned value, unsigned by, unsigned clamp_and_segments, unsigned mask, bool& inside, ENGINE_HERE) {
  const int lane = (int)lane_id(), segments = clamp_and_segments >> 8 & 31, clamp = clamp_and_segments & 31;
  const int first = lane & segments, last = first | (clamp & ~segments), b = by & 31;
  const int source = Mode == Shuffle::up     ? lane - b
                     : Mode == Shuffle::down ? lane + b
                     : Mode == Shuffle::bfly ? lane ^ b
                                             : first | (b & ~segments);
  inside = Mode == Shuffle::up ? source >= last : source <= last;
  return shuffle("shfl.sync", mask, value, inside ? source : lane, file, line);
}
template <Shuffle Mode>
ENGINE_INLINE unsigned shfl(unsigned value, unsigned by, unsigned clamp_and_segments, unsigned mask, ENGINE_HERE) {
  bool inside;
  return shfl<Mode>(value, by, clamp_and_segments, mask, inside, file, line);
}

ENGINE_INLINE unsigned elect(unsigned mask, bool& leader, ENGINE_HERE) {
  exchange<int, int>("elect.sync", run_nothing, mask, 0, 0, file, line);
  const unsigned first = (unsigned)__builtin_ctz(mask);
  leader = lane_id() == first;
  return first;
}
template <typename Op, typename T>
ENGINE_INLINE T redux(T value, unsigned mask, ENGINE_HERE) {
  return exchange<T, T>("redux.sync", run_fold<T, Op>, mask, value, 0, file, line);
}
template <typename T>
ENGINE_INLINE unsigned match_all(T value, bool& same, unsigned mask, ENGINE_HERE) {
  int all;
  const unsigned found = __match_all_sync(mask, value, &all, file, line);
  same = all != 0;
  return found;
}

}  // namespace ptx
}  // namespace engine
