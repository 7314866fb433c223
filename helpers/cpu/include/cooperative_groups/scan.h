// inclusive_scan and exclusive_scan(group, value, op): op over the values of the lower ranks.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <typename Group, typename Value, typename Op>
inline auto inclusive_scan(const Group& group, Value&& value, Op&& op, ENGINE_HERE) ->
    typename engine::Decayed<Value>::type {
  static_assert(
      __is_base_of(lane_group, Group), "a scan takes a tile or a coalesced group: tiled_partition<32>(block)");
  typedef typename engine::Decayed<Value>::type Type;
  auto all = group.template engine_gather<Type>("cg::inclusive_scan", value, file, line);
  for (unsigned i = 1; i <= group.thread_rank(); ++i) all.values[0] = op(all.values[0], all.values[i]);
  return all.values[0];
}
template <typename Group, typename Value>
inline auto inclusive_scan(const Group& group, Value&& value, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  return inclusive_scan(group, value, plus<typename engine::Decayed<Value>::type>(), file, line);
}

// Rank 0 has nothing before it: it gets a value made by {}, which is zero for numbers.
template <typename Group, typename Value, typename Op>
inline auto exclusive_scan(const Group& group, Value&& value, Op&& op, ENGINE_HERE) ->
    typename engine::Decayed<Value>::type {
  static_assert(
      __is_base_of(lane_group, Group), "a scan takes a tile or a coalesced group: tiled_partition<32>(block)");
  typedef typename engine::Decayed<Value>::type Type;
  auto all = group.template engine_gather<Type>("cg::exclusive_scan", value, file, line);
  if (group.thread_rank() == 0) return {};
  for (unsigned i = 1; i < group.thread_rank(); ++i) all.values[0] = op(all.values[0], all.values[i]);
  return all.values[0];
}
template <typename Group, typename Value>
inline auto exclusive_scan(const Group& group, Value&& value, ENGINE_HERE) -> typename engine::Decayed<Value>::type {
  return exclusive_scan(group, value, plus<typename engine::Decayed<Value>::type>(), file, line);
}

}  // namespace cooperative_groups
