// reduce(group, value, op): every thread of a tile or coalesced group gets op over all values.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

// Halves are folded onto each other, as a GPU does with log2(size) shuffles: float sums round as they do there.
template <typename Group, typename Value, typename Op>
inline auto reduce(const Group& group, Value&& value, Op&& op, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  static_assert(
      __is_base_of(lane_group, Group), "reduce() takes a tile or a coalesced group: tiled_partition<32>(block)");
  auto all = group.template engine_gather<typename engine::Decayed<Value>::type>("cg::reduce", value, file, line);
  for (unsigned count = group.size(), half; count > 1; count = half) {
    half = (count + 1) / 2;
    for (unsigned i = 0; i + half < count; ++i) all.values[i] = op(all.values[i], all.values[i + half]);
  }
  return all.values[0];
}

}  // namespace cooperative_groups
