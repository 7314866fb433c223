// inclusive_scan and exclusive_scan(group, value, op): op over the values of the lower ranks.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

// op over the values of the first `count` ranks.
template <typename Type, typename Group, typename Op>
inline Type engine_scan(
    const Group& group, const Type& value, Op&& op, unsigned count, const char* name, const char* file, int line) {
  static_assert(
      __is_base_of(lane_group, Group) || engine::several_warps<Group>,
      "a scan takes a tile or a coalesced group: tiled_partition<32>(block)");
  if constexpr (engine::several_warps<Group>) {
    return group.engine_with_all(
        value,
        [&](auto of, unsigned) {
          Type sum = count ? of(0) : Type{};
          for (unsigned i = 1; i < count; ++i) sum = op(sum, of(i));
          return sum;
        },
        file, line);
  } else {
    auto all = group.template engine_gather<Type>(name, value, file, line);
    if (count == 0) return Type{};
    for (unsigned i = 1; i < count; ++i) all.values[0] = op(all.values[0], all.values[i]);
    return all.values[0];
  }
}

template <typename Group, typename Value, typename Op>
inline auto inclusive_scan(const Group& group, Value&& value, Op&& op, ENGINE_HERE) ->
    typename engine::Decayed<Value>::type {
  return engine_scan<typename engine::Decayed<Value>::type>(
      group, value, op, group.thread_rank() + 1, "cg::inclusive_scan", file, line);
}
template <typename Group, typename Value>
inline auto inclusive_scan(const Group& group, Value&& value, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  return inclusive_scan(group, value, plus<typename engine::Decayed<Value>::type>(), file, line);
}

// Rank 0 has nothing before it: it gets a value made by {}, which is zero for numbers.
template <typename Group, typename Value, typename Op>
inline auto exclusive_scan(const Group& group, Value&& value, Op&& op, ENGINE_HERE) ->
    typename engine::Decayed<Value>::type {
  return engine_scan<typename engine::Decayed<Value>::type>(
      group, value, op, group.thread_rank(), "cg::exclusive_scan", file, line);
}
template <typename Group, typename Value>
inline auto exclusive_scan(const Group& group, Value&& value, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  return exclusive_scan(group, value, plus<typename engine::Decayed<Value>::type>(), file, line);
}

}  // namespace cooperative_groups
