// Tiles of several warps: 64 to 1024 threads next to each other. Read by cooperative_groups.h.
#pragma once

namespace cooperative_groups {

template <unsigned Size>
class multi_warp_tile {
 public:
  static constexpr unsigned size() { return Size; }
  static constexpr unsigned num_threads() { return Size; }
  static unsigned thread_rank() { return engine_lane()->linear % Size; }
  unsigned meta_group_rank() const { return tile_rank; }
  unsigned meta_group_size() const { return tile_count; }
  void sync(ENGINE_HERE) const {
    if (threads() == thread_block::size()) __syncthreads(file, line);
    else engine_named_barrier(15 - engine_lane()->linear / Size % 16, threads(), 1, file, line);
  }
  int any(int predicate, ENGINE_HERE) const { return count(predicate, file, line) > 0; }
  int all(int predicate, ENGINE_HERE) const { return count(predicate, file, line) == threads(); }

  // For reduce.h and scan.h: f(the value of a rank, the number of ranks), once everybody has shown his value.
  template <typename Value, typename F>
  auto engine_with_all(const Value& value, F f, const char* file, int line) const {
    const unsigned first = engine_lane()->linear / Size * Size;
    engine_show(&value);
    sync(file, line);
    auto result =
        f([=](unsigned rank) -> const Value& { return *(const Value*)engine_shown(first + rank); }, threads());
    sync(file, line);  // the values are on their threads' stacks
    return result;
  }

 protected:
  multi_warp_tile(unsigned rank, unsigned count_) : tile_rank(rank), tile_count(count_) {}

 private:
  unsigned tile_rank, tile_count;

  // The last tile of a block may be smaller.
  unsigned threads() const {
    const unsigned left = thread_block::size() - engine_lane()->linear / Size * Size;
    return left < Size ? left : Size;
  }
  unsigned count(int predicate, const char* file, int line) const {
    return engine_with_all(
        predicate,
        [](auto of, unsigned n) {
          unsigned sum = 0;
          for (unsigned i = 0; i < n; ++i) sum += of(i) != 0;
          return sum;
        },
        file, line);
  }
};

#define ENGINE_TILE(SIZE)                                                              \
  template <>                                                                          \
  class thread_block_tile<SIZE, void> : public multi_warp_tile<SIZE> {                 \
   protected:                                                                          \
    thread_block_tile(unsigned rank, unsigned count) : multi_warp_tile(rank, count) {} \
  };
ENGINE_TILE(64)
ENGINE_TILE(128)
ENGINE_TILE(256)
ENGINE_TILE(512)
ENGINE_TILE(1024)
#undef ENGINE_TILE

}  // namespace cooperative_groups

namespace engine {
template <unsigned Size>
constexpr bool has_several_warps(const cooperative_groups::multi_warp_tile<Size>*) {
  return true;
}
constexpr bool has_several_warps(const void*) { return false; }
template <typename Group>
constexpr bool several_warps = has_several_warps((const Group*)nullptr);
}  // namespace engine
