// reduce(group, value, op): every thread of a tile or coalesced group gets op over all values.
#pragma once
#include "../cooperative_groups.h"
#include "../cuda_bf16.h"

namespace cooperative_groups {

// Halves are folded onto each other, as a GPU does with log2(size) shuffles: float sums round as they do there. In a
// tile of several warps each warp does so, and then their results.
template <typename Value, typename Op>
inline Value engine_fold(Value* values, unsigned count, Op&& op) {
  for (unsigned half; count > 1; count = half) {
    half = (count + 1) / 2;
    for (unsigned i = 0; i + half < count; ++i) values[i] = op(values[i], values[i + half]);
  }
  return values[0];
}
template <typename Group, typename Value, typename Op>
inline auto reduce(const Group& group, Value&& value, Op&& op, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  typedef typename engine::Decayed<Value>::type Type;
  static_assert(
      __is_base_of(lane_group, Group) || engine::several_warps<Group>,
      "reduce() takes a tile or a coalesced group: tiled_partition<32>(block)");
  if constexpr (engine::several_warps<Group>) {
    const Type mine = value;
    return group.engine_with_all(
        mine,
        [&](auto of, unsigned n) {
          Type warps[32], lanes[32];
          unsigned filled = 0;
          for (unsigned first = 0; first < n; first += 32, ++filled) {
            const unsigned count = n - first < 32 ? n - first : 32;
            for (unsigned i = 0; i < count; ++i) lanes[i] = of(first + i);
            warps[filled] = engine_fold(lanes, count, op);
          }
          return engine_fold(warps, filled, op);
        },
        file, line);
  } else {
    auto all = group.template engine_gather<Type>("cg::reduce", value, file, line);
    return engine_fold(all.values, group.size(), op);
  }
}

}  // namespace cooperative_groups
