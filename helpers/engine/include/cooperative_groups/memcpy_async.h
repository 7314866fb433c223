// memcpy_async(group, ...) and wait(group): here each thread copies its share at once, and the wait is a barrier.
// A kernel that forgets the wait still reads shares that other threads have not copied yet.
#pragma once
#include "../cooperative_groups.h"

#ifdef ENGINE_LIBRARIES
#include <cuda/__barrier/aligned_size.h>
#else
namespace cuda {
// A number of bytes that is promised to be a multiple of Alignment, as are the addresses.
template <size_t Alignment>
struct aligned_size_t {
  size_t value;
  explicit constexpr aligned_size_t(size_t bytes) : value(bytes) {}
  constexpr operator size_t() const { return value; }
};
}  // namespace cuda
#endif

namespace cooperative_groups {

// The bytes in chunks of 16, dealt to the threads in turn.
template <typename Group, typename Element, typename Bytes>
ENGINE_INLINE void memcpy_async(const Group& group, Element* target, const Element* source, const Bytes& bytes) {
  size_t total = (size_t)bytes, stride = (size_t)group.size() * 16;
  for (size_t at = (size_t)group.thread_rank() * 16; at < total; at += stride) {
    if (total - at >= 16)
      __builtin_memcpy((char*)target + at, (const char*)source + at, 16);  // one access, and checked
    else memcpy((char*)target + at, (const char*)source + at, total - at);
  }
}
// The same in elements: as many as both sides have.
template <typename Group, typename Element, typename TargetCount, typename SourceCount>
ENGINE_INLINE void memcpy_async(
    const Group& group, Element* target, const TargetCount& target_count, const Element* source,
    const SourceCount& source_count) {
  size_t count = (size_t)target_count < (size_t)source_count ? (size_t)target_count : (size_t)source_count;
  memcpy_async(group, target, source, count * sizeof(Element));
}

template <typename Group>
inline void wait(const Group& group, ENGINE_HERE) {
  group.sync(file, line);
}
template <unsigned Stages, typename Group>
inline void wait_prior(const Group& group, ENGINE_HERE) {
  group.sync(file, line);
}

}  // namespace cooperative_groups
