// Barriers, special registers, and how a thread ends.
#pragma once
#include "operands.h"

namespace engine {
namespace ptx {

ENGINE_INLINE unsigned block_threads() {
  const dim3& size = engine_lane()->block_size;
  return size.x * size.y * size.z;
}

// Of all threads, it is __syncthreads. wait: not for bar.arrive.
ENGINE_INLINE void bar_sync(unsigned number, unsigned threads, bool wait, ENGINE_HERE) {
  if (number == 0 && wait && threads == block_threads()) __syncthreads(file, line);
  else engine_named_barrier(number, threads, wait, file, line);
}

ENGINE_INLINE unsigned warp_id() {  // a GPU promises only that it differs between the warps of an SM
  return engine_lane()->linear / 32;
}
ENGINE_INLINE unsigned sm_id() {  // a block is an SM of its own here
  const Lane& l = *engine_lane();
  return (l.block_index.z * l.grid_size.y + l.block_index.y) * l.grid_size.x + l.block_index.x;
}
ENGINE_INLINE unsigned sm_count() {
  const dim3& size = engine_lane()->grid_size;
  return size.x * size.y * size.z;
}
// Of a cluster: its place in the grid, how many there are, its sizes in blocks; a block's place in it.
ENGINE_INLINE uint3 cluster_size() { return engine_lane()->cluster_size; }
ENGINE_INLINE uint3 cluster_index() {
  const Lane& l = *engine_lane();
  const dim3& size = l.cluster_size;
  return {l.block_index.x / size.x, l.block_index.y / size.y, l.block_index.z / size.z};
}
ENGINE_INLINE uint3 cluster_count() {
  const Lane& l = *engine_lane();
  const dim3& size = l.cluster_size;
  return {l.grid_size.x / size.x, l.grid_size.y / size.y, l.grid_size.z / size.z};
}
ENGINE_INLINE uint3 cluster_block_index() {
  const Lane& l = *engine_lane();
  const dim3& size = l.cluster_size;
  return {l.block_index.x % size.x, l.block_index.y % size.y, l.block_index.z % size.z};
}
ENGINE_INLINE unsigned cluster_blocks() {
  const uint3 size = cluster_size();
  return size.x * size.y * size.z;
}
ENGINE_INLINE unsigned cluster_rank() {
  const uint3 size = cluster_size(), at = cluster_block_index();
  return (at.z * size.y + at.y) * size.x + at.x;
}
ENGINE_INLINE void cluster_arrive(bool orders, ENGINE_HERE) { engine_cluster_arrive(orders, file, line); }
ENGINE_INLINE void cluster_wait(bool orders, ENGINE_HERE) { engine_cluster_wait(orders, file, line); }

ENGINE_INLINE unsigned lanes_below() { return (1u << lane_id()) - 1; }

}  // namespace ptx
}  // namespace engine
