// Cooperative groups: sets of threads with a rank, a size, a barrier and, inside a warp, collectives.
#pragma once
#include "cuda_fp16.h"  // as NVIDIA's does
#include "cuda_runtime.h"

namespace engine {

// The bits of `value` at the places of `mask`, moved together: a vote by lane becomes a vote by rank.
static inline unsigned pack_bits(unsigned value, unsigned mask) {
  unsigned packed = 0;
  for (int rank = 0; mask; mask &= mask - 1, ++rank) packed |= (value >> __builtin_ctz(mask) & 1u) << rank;
  return packed;
}

static inline int nth_lane(unsigned mask, unsigned rank) {
  for (; rank; --rank) mask &= mask - 1;
  return __builtin_ctz(mask);
}

// Every lane gets the values of all, by rank, and does the rest itself: a functor of the source then runs in its own
// thread, with that thread's indices and errors.
template <typename Value>
struct Gathered {
  Value values[32];
};
template <typename Value>
void run_gather(Collective* const* lanes, unsigned mask) {
  typedef Exchange<Value, Gathered<Value>> Part;
  Part* first = static_cast<Part*>(lanes[__builtin_ctz(mask)]);
  int count = 0;
  for_lanes(mask, [&](int lane) { first->out.values[count++] = static_cast<Part*>(lanes[lane])->in; });
  for_lanes(mask & (mask - 1), [&](int lane) {
    Part* part = static_cast<Part*>(lanes[lane]);
    for (int rank = 0; rank < count; ++rank) part->out.values[rank] = first->out.values[rank];
  });
}

template <typename Type>
struct Decayed {
  typedef Type type;
};
template <typename Type>
struct Decayed<const Type> {
  typedef Type type;
};
template <typename Type>
struct Decayed<Type&> {
  typedef typename Decayed<Type>::type type;
};
template <typename Type>
struct Decayed<Type&&> {
  typedef typename Decayed<Type>::type type;
};

}  // namespace engine

namespace cooperative_groups {

// ---------------------------------------------------------------- any group, its kind known when it runs

class thread_group;
inline thread_group tiled_partition(const thread_group& parent, unsigned tile_size, ENGINE_HERE);

class thread_group {
 public:
  unsigned long long size() const;
  unsigned long long num_threads() const { return size(); }
  unsigned long long thread_rank() const;
  void sync(ENGINE_HERE) const;

 protected:
  enum class Kind { block, cluster, grid, lanes };
  Kind kind;
  unsigned mask, tile_rank, tile_count;  // of lanes: which ones, and which part of their parent they are
  thread_group(Kind kind_, unsigned mask_ = 0, unsigned rank = 0, unsigned count = 1)
      : kind(kind_), mask(mask_), tile_rank(rank), tile_count(count) {}
  friend thread_group tiled_partition(const thread_group& parent, unsigned tile_size, const char* file, int line);
};

// ---------------------------------------------------------------- the block and the grid

class thread_block : public thread_group {
 public:
  static void sync(ENGINE_HERE) { __syncthreads(file, line); }
  static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned num_threads() { return size(); }
  static unsigned thread_rank() { return engine_lane()->linear; }
  static dim3 group_index() { return blockIdx; }
  static dim3 thread_index() { return threadIdx; }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }

  // All of the waiting is done at the wait: a correct kernel cannot notice.
  struct arrival_token {};
  arrival_token barrier_arrive() const { return arrival_token(); }
  void barrier_wait(arrival_token&&, ENGINE_HERE) const { __syncthreads(file, line); }

 private:
  thread_block() : thread_group(Kind::block) {}
  friend thread_block this_thread_block();
};
inline thread_block this_thread_block() { return thread_block(); }

// What a GPU needs for tiles of several warps, and the engine does not.
template <unsigned MaxBlockSize = 1024>
struct block_tile_memory {
  unsigned char engine_unused[MaxBlockSize / 32 * 16];
};
template <unsigned MaxBlockSize>
inline thread_block this_thread_block(block_tile_memory<MaxBlockSize>&) {
  return this_thread_block();
}

// The blocks of a cluster.
class cluster_group : public thread_group {
 public:
  struct arrival_token {};
  static arrival_token barrier_arrive(ENGINE_HERE) {
    engine_cluster_arrive(1, file, line);
    return arrival_token();
  }
  static void barrier_wait(ENGINE_HERE) { engine_cluster_wait(1, file, line); }
  static void barrier_wait(arrival_token&&, ENGINE_HERE) { engine_cluster_wait(1, file, line); }
  static void sync(ENGINE_HERE) {
    engine_cluster_arrive(1, file, line);
    engine_cluster_wait(1, file, line);
  }

  static dim3 dim_blocks() { return engine_lane()->cluster_size; }
  static dim3 group_dim() { return dim_blocks(); }
  static dim3 dim_threads() {
    const dim3 blocks = dim_blocks();
    return dim3(blocks.x * blockDim.x, blocks.y * blockDim.y, blocks.z * blockDim.z);
  }
  static dim3 block_index() {
    const dim3 blocks = dim_blocks();
    return dim3(blockIdx.x % blocks.x, blockIdx.y % blocks.y, blockIdx.z % blocks.z);
  }
  static dim3 thread_index() {
    const dim3 block = block_index();
    return dim3(
        block.x * blockDim.x + threadIdx.x, block.y * blockDim.y + threadIdx.y, block.z * blockDim.z + threadIdx.z);
  }
  static unsigned num_blocks() {
    const dim3 blocks = dim_blocks();
    return blocks.x * blocks.y * blocks.z;
  }
  static unsigned block_rank() {
    const dim3 blocks = dim_blocks(), block = block_index();
    return (block.z * blocks.y + block.y) * blocks.x + block.x;
  }
  static unsigned num_threads() { return num_blocks() * thread_block::size(); }
  static unsigned size() { return num_threads(); }
  static unsigned thread_rank() { return block_rank() * thread_block::size() + thread_block::thread_rank(); }

  // An address in this block's shared memory, as that of another block of the cluster.
  template <typename T>
  static T* map_shared_rank(T* address, int rank, ENGINE_HERE) {
    return (T*)engine_map_shared((const void*)address, (unsigned)rank, "cluster.map_shared_rank", file, line);
  }
  static unsigned query_shared_rank(const void* address, ENGINE_HERE) {
    return engine_shared_rank(address, "cluster.query_shared_rank", file, line);
  }

 private:
  cluster_group() : thread_group(Kind::cluster) {}
  friend cluster_group this_cluster();
};
inline cluster_group this_cluster() { return cluster_group(); }

class grid_group : public thread_group {
 public:
  bool is_valid() const { return engine_cooperative() != 0; }
  static void sync(ENGINE_HERE) { engine_grid_sync(file, line); }

  // All of the waiting is done at the wait: a correct kernel cannot notice.
  struct arrival_token {};
  arrival_token barrier_arrive() const { return arrival_token(); }
  void barrier_wait(arrival_token&&, ENGINE_HERE) const { engine_grid_sync(file, line); }

  static unsigned long long num_blocks() { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
  static unsigned long long block_rank() {
    return ((unsigned long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  }
  static unsigned long long size() { return num_blocks() * thread_block::size(); }
  static unsigned long long num_threads() { return size(); }
  static unsigned long long thread_rank() { return block_rank() * thread_block::size() + thread_block::thread_rank(); }
  static dim3 dim_blocks() { return gridDim; }
  static unsigned long long num_clusters() { return num_blocks() / cluster_group::num_blocks(); }
  static dim3 dim_clusters() {
    const dim3 blocks = cluster_group::dim_blocks();
    return dim3(gridDim.x / blocks.x, gridDim.y / blocks.y, gridDim.z / blocks.z);
  }
  static dim3 cluster_index() {
    const dim3 blocks = cluster_group::dim_blocks();
    return dim3(blockIdx.x / blocks.x, blockIdx.y / blocks.y, blockIdx.z / blocks.z);
  }
  static unsigned long long cluster_rank() {
    const dim3 clusters = dim_clusters(), at = cluster_index();
    return ((unsigned long long)at.z * clusters.y + at.y) * clusters.x + at.x;
  }
  static dim3 group_dim() { return gridDim; }
  static dim3 dim_threads() { return dim3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z); }
  static dim3 block_index() { return blockIdx; }
  static dim3 thread_index() {
    return dim3(
        blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
        blockIdx.z * blockDim.z + threadIdx.z);
  }

 private:
  grid_group() : thread_group(Kind::grid) {}
  friend grid_group this_grid();
};
inline grid_group this_grid() { return grid_group(); }

// ---------------------------------------------------------------- lanes of a warp

// What tiles and coalesced groups share. A rank counts the lanes of the mask from the lowest.
class lane_group : public thread_group {
 public:
  unsigned thread_rank() const { return (unsigned)__builtin_popcount(mask & ((1u << engine::lane_id()) - 1)); }
  unsigned meta_group_rank() const { return tile_rank; }
  unsigned meta_group_size() const { return tile_count; }
  void sync(ENGINE_HERE) const {
    engine::exchange<int, int>("group.sync", engine::run_nothing, mask, 0, 0, file, line);
  }

  template <typename Value>
  Value shfl(Value value, unsigned rank, ENGINE_HERE) const {
    return read("group.shfl", value, rank % lanes(), file, line);
  }
  template <typename Value>
  Value shfl_up(Value value, unsigned delta, ENGINE_HERE) const {
    unsigned rank = thread_rank();
    return read("group.shfl_up", value, delta > rank ? rank : rank - delta, file, line);
  }
  template <typename Value>
  Value shfl_down(Value value, unsigned delta, ENGINE_HERE) const {
    unsigned rank = thread_rank();
    return read("group.shfl_down", value, delta >= lanes() - rank ? rank : rank + delta, file, line);
  }
  int any(int predicate, ENGINE_HERE) const { return vote("group.any", predicate, file, line) != 0; }
  int all(int predicate, ENGINE_HERE) const { return vote("group.all", !predicate, file, line) == 0; }
  unsigned ballot(int predicate, ENGINE_HERE) const {
    return engine::pack_bits(vote("group.ballot", predicate, file, line), mask);
  }
  template <typename Value>
  unsigned match_any(Value value, ENGINE_HERE) const {
    return engine::pack_bits(match("group.match_any", value, file, line), mask);
  }
  template <typename Value>
  unsigned match_all(Value value, int& predicate, ENGINE_HERE) const {
    unsigned same = engine::pack_bits(match("group.match_all", value, file, line), mask);
    predicate = same == everyone();
    return predicate ? same : 0;
  }

  // For reduce.h, scan.h and the partitions, not part of CUDA's interface.
  template <typename Value>
  engine::Gathered<Value> engine_gather(const char* name, Value value, const char* file, int line) const {
    typedef engine::Gathered<Value> All;
    return engine::exchange<Value, All>(name, engine::run_gather<Value>, mask, value, 0, file, line);
  }
  unsigned engine_mask() const { return mask; }
  unsigned engine_vote(const char* name, int predicate, const char* file, int line) const {
    return vote(name, predicate, file, line);
  }
  template <typename Value>
  unsigned engine_match(const char* name, Value value, const char* file, int line) const {
    return match(name, value, file, line);
  }

 protected:
  lane_group(unsigned mask_, unsigned rank, unsigned count) : thread_group(Kind::lanes, mask_, rank, count) {}
  unsigned lanes() const { return (unsigned)__builtin_popcount(mask); }
  unsigned everyone() const { return 0xFFFFFFFFu >> (32 - lanes()); }
  template <typename Value>
  Value read(const char* name, Value value, unsigned rank, const char* file, int line) const {
    static_assert(sizeof(Value) <= 32, "a group moves values of at most 32 bytes");
    int source = engine::nth_lane(mask, rank);
    return engine::exchange<Value, Value>(name, engine::run_shuffle<Value>, mask, value, source, file, line);
  }
  unsigned vote(const char* name, int predicate, const char* file, int line) const {
    return engine::exchange<int, unsigned>(name, engine::run_ballot, mask, predicate, 0, file, line);
  }
  template <typename Value>
  unsigned match(const char* name, Value value, const char* file, int line) const {
    return engine::exchange<Value, unsigned>(name, engine::run_match<Value>, mask, value, 0, file, line);
  }
};

class coalesced_group : public lane_group {
 public:
  unsigned size() const { return lanes(); }
  unsigned num_threads() const { return lanes(); }
  // Not for a source to call: groups are made by the functions below.
  static coalesced_group engine_of(unsigned mask, unsigned rank, unsigned count) {
    return coalesced_group(mask, rank, count);
  }

 private:
  using lane_group::lane_group;
};
inline coalesced_group coalesced_threads(ENGINE_HERE) {
  return coalesced_group::engine_of(engine_activemask(file, line), 0, 1);
}

template <unsigned Size, typename Parent = void>
class thread_block_tile;

// Size lanes next to each other.
template <unsigned Size>
class thread_block_tile<Size, void> : public lane_group {
  static_assert(
      Size == 1 || Size == 2 || Size == 4 || Size == 8 || Size == 16 || Size == 32,
      "a tile has 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024 threads");

 public:
  static constexpr unsigned size() { return Size; }
  static constexpr unsigned num_threads() { return Size; }
  static unsigned thread_rank() { return engine::lane_id() % Size; }
  template <typename Value>
  Value shfl_xor(Value value, unsigned lane_mask, ENGINE_HERE) const {
    unsigned rank = thread_rank(), source = rank ^ lane_mask;
    return read("group.shfl_xor", value, source < Size ? source : rank, file, line);
  }

 protected:
  thread_block_tile(unsigned rank, unsigned count)
      : lane_group((0xFFFFFFFFu >> (32 - Size)) << (engine::lane_id() / Size * Size), rank, count) {}
  friend thread_block_tile<1, void> this_thread();
};
inline thread_block_tile<1, void> this_thread() { return thread_block_tile<1, void>(0, 1); }

}  // namespace cooperative_groups
#include "cooperative_groups/multi_warp_tile.h"
namespace cooperative_groups {

template <unsigned Size, typename Parent>
class thread_block_tile : public thread_block_tile<Size, void> {
 public:
  explicit thread_block_tile(const Parent& parent)
      : thread_block_tile<Size, void>(
            (unsigned)parent.thread_rank() / Size, ((unsigned)parent.size() + Size - 1) / Size) {}
};

// ---------------------------------------------------------------- partitions

template <unsigned Size>
inline thread_block_tile<Size, thread_block> tiled_partition(const thread_block& parent) {
  return thread_block_tile<Size, thread_block>(parent);
}
template <unsigned Size, unsigned ParentSize, typename Grandparent>
inline thread_block_tile<Size, thread_block_tile<ParentSize, Grandparent>> tiled_partition(
    const thread_block_tile<ParentSize, Grandparent>& parent) {
  static_assert(Size <= ParentSize, "a tile is not larger than the group it is cut from");
  return thread_block_tile<Size, thread_block_tile<ParentSize, Grandparent>>(parent);
}

// The size known only when it runs. The lanes of the parent are cut by rank.
inline coalesced_group tiled_partition(const coalesced_group& parent, unsigned tile_size, ENGINE_HERE) {
  if (tile_size == 0 || tile_size > 32 || (tile_size & (tile_size - 1)))
    engine_fail("tiled_partition() takes a tile of 1, 2, 4, 8, 16 or 32 threads", file, line);
  if (parent.size() <= tile_size) return parent;
  unsigned rank = parent.thread_rank() / tile_size, mask = 0;
  for (unsigned i = rank * tile_size; i < (rank + 1) * tile_size && i < parent.size(); ++i)
    mask |= 1u << engine::nth_lane(parent.engine_mask(), i);
  return coalesced_group::engine_of(mask, rank, (parent.size() + tile_size - 1) / tile_size);
}
inline thread_group tiled_partition(const thread_block& parent, unsigned tile_size, ENGINE_HERE) {
  unsigned warp = parent.thread_rank() / 32, left = parent.size() - warp * 32;
  coalesced_group lanes = coalesced_group::engine_of(left < 32 ? (1u << left) - 1 : 0xFFFFFFFFu, 0, 1);
  coalesced_group tile = tiled_partition(lanes, tile_size, file, line);
  return coalesced_group::engine_of(
      tile.engine_mask(), parent.thread_rank() / tile_size, (parent.size() + tile_size - 1) / tile_size);
}
inline thread_group tiled_partition(const thread_group& parent, unsigned tile_size, const char* file, int line) {
  if (parent.kind == thread_group::Kind::grid)
    engine_fail("tiled_partition() takes a block or a tile, not the grid", file, line);
  if (parent.kind == thread_group::Kind::cluster)
    engine_fail("tiled_partition() takes a block or a tile, not the cluster", file, line);
  if (parent.kind == thread_group::Kind::block) return tiled_partition(this_thread_block(), tile_size, file, line);
  coalesced_group lanes = coalesced_group::engine_of(parent.mask, parent.tile_rank, parent.tile_count);
  return tiled_partition(lanes, tile_size, file, line);
}

// The lanes of a group that agree with this one. (thread_block has no lanes: make a tile of it first.)
inline coalesced_group binary_partition(const lane_group& parent, bool predicate, ENGINE_HERE) {
  unsigned mask = parent.engine_mask(), yes = parent.engine_vote("binary_partition", predicate, file, line);
  if (yes == 0 || yes == mask) return coalesced_group::engine_of(mask, 0, 1);
  return coalesced_group::engine_of(predicate ? yes : mask & ~yes, predicate, 2);
}
template <typename Label>
inline coalesced_group labeled_partition(const lane_group& parent, Label label, ENGINE_HERE) {
  unsigned same = parent.engine_match("labeled_partition", label, file, line), first = same & -same;
  unsigned leaders = parent.engine_vote("labeled_partition", 1u << engine::lane_id() == first, file, line);
  return coalesced_group::engine_of(
      same, (unsigned)__builtin_popcount(leaders & (first - 1)), (unsigned)__builtin_popcount(leaders));
}
inline coalesced_group labeled_partition(const lane_group& parent, bool label, ENGINE_HERE) {
  return binary_partition(parent, label, file, line);
}

// ---------------------------------------------------------------- functions over groups

inline unsigned long long thread_group::size() const {
  return kind == Kind::block     ? thread_block::size()
         : kind == Kind::grid    ? grid_group::size()
         : kind == Kind::cluster ? cluster_group::size()
                                 : (unsigned long long)__builtin_popcount(mask);
}
inline unsigned long long thread_group::thread_rank() const {
  return kind == Kind::block     ? thread_block::thread_rank()
         : kind == Kind::grid    ? grid_group::thread_rank()
         : kind == Kind::cluster ? cluster_group::thread_rank()
                                 : (unsigned long long)__builtin_popcount(mask & ((1u << engine::lane_id()) - 1));
}
inline void thread_group::sync(const char* file, int line) const {
  if (kind == Kind::block) thread_block::sync(file, line);
  else if (kind == Kind::grid) grid_group::sync(file, line);
  else if (kind == Kind::cluster) cluster_group::sync(file, line);
  else engine::exchange<int, int>("group.sync", engine::run_nothing, mask, 0, 0, file, line);
}

template <typename Group>
inline void sync(const Group& group, ENGINE_HERE) {
  group.sync(file, line);
}
template <typename Group>
inline auto thread_rank(const Group& group) -> decltype(group.thread_rank()) {
  return group.thread_rank();
}
template <typename Group>
inline auto group_size(const Group& group) -> decltype(group.size()) {
  return group.size();
}

template <typename Group, typename Function, typename... Arguments>
inline void invoke_one(const Group& group, Function&& function, Arguments&&... arguments) {
  if (group.thread_rank() == 0) function(static_cast<Arguments&&>(arguments)...);
}
template <typename Group, typename Function, typename... Arguments>
inline auto invoke_one_broadcast(const Group& group, Function&& function, Arguments&&... arguments)
    -> decltype(function(static_cast<Arguments&&>(arguments)...)) {
  decltype(function(static_cast<Arguments&&>(arguments)...)) result{};
  if (group.thread_rank() == 0) result = function(static_cast<Arguments&&>(arguments)...);
  return group.shfl(result, 0);
}

template <typename Value>
struct plus {
  Value operator()(Value a, Value b) const { return a + b; }
};
template <typename Value>
struct less {
  Value operator()(Value a, Value b) const { return b < a ? b : a; }
};
template <typename Value>
struct greater {
  Value operator()(Value a, Value b) const { return a < b ? b : a; }
};
template <typename Value>
struct bit_and {
  Value operator()(Value a, Value b) const { return a & b; }
};
template <typename Value>
struct bit_or {
  Value operator()(Value a, Value b) const { return a | b; }
};
template <typename Value>
struct bit_xor {
  Value operator()(Value a, Value b) const { return a ^ b; }
};

}  // namespace cooperative_groups
