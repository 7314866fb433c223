// Memory for device arrays, and pages for whoever in the engine needs them.
//
// An array ends where a guard of GUARD_BYTES begins, and has one in front: an access past either end is a fault at once
// and not other data. Sizes are rounded up to 256 bytes, as CuPy aligns, so some slack lies before the guard.
// Its bytes differ for each array, so that reading past one array and storing past another is noticed as well.
#include "worker.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace {

char* map_pages(size_t bytes, int protection, bool reserved) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserved ? 0 : MAP_NORESERVE);
  void* p = mmap(nullptr, bytes, protection, flags, -1, 0);
  return p == MAP_FAILED ? nullptr : (char*)p;
}

// Of an array with so many bytes: the bytes up to the guard, and those of the pages they end.
struct Rounded {
  size_t data, pages;
  explicit Rounded(size_t bytes) {
    const size_t page = page_bytes();
    data = (bytes + 255) / 256 * 256;
    pages = (data + page - 1) / page * page;
  }
};

// What lies beside an array, byte by byte: odd numbers, so that the sum of two is never a third; of elements of two bytes
// and more, quiet NaNs. Arrays whose numbers differ by less than 31 differ in each element.
struct Slack {
  unsigned number;  // twice an array's own, and 1 for elements of one byte

  unsigned char at(ptrdiff_t i) const {  // i: relative to the array's first byte
    const unsigned own = number >> 1, place = (unsigned)(number & 1 ? i : i >> 1);
    const unsigned digit = place & 1 ? 3 * own + own / 31 : own;
    const bool high = i & 1 && !(number & 1);
    return high ? (own + place) & 2 ? 0xFF : 0x7F : 0xC1 + 2 * ((digit + (place >> 1)) % 31);
  }
};

// malloc and new in kernels. Apart from the C library's: a kernel may be torn away at any of its instructions, and a
// lock of the C library's would stay locked. As large as CUDA's default heap.
struct DeviceHeap {
  std::mutex mutex;
  std::unordered_map<void*, size_t> sizes;
  size_t used = 0;
};
constexpr size_t HEAP_BYTES = 8 << 20;

DeviceHeap& device_heap() {
  static DeviceHeap* heap = new DeviceHeap;  // never destroyed: what kernels have allocated outlives every launch
  return *heap;
}

}  // namespace

extern "C" {

void* engine_malloc(size_t bytes) {
  if (!this_worker()) return malloc(bytes);  // a constructor, when the module is loaded
  Critical guard(here());
  DeviceHeap& heap = device_heap();
  std::lock_guard<std::mutex> lock(heap.mutex);
  const size_t rounded = (std::max<size_t>(bytes, 1) + 15) / 16 * 16;
  if (rounded < bytes || rounded > HEAP_BYTES - heap.used) return nullptr;
  void* p = malloc(rounded);
  if (!p) return nullptr;
  memset(p, POISON, rounded);
  heap.sizes[p] = rounded;
  heap.used += rounded;
  return p;
}

void engine_free(void* p, const char* name, const void* returns_to) {
  if (!p) return;
  if (!this_worker()) return free(p);
  Critical guard(here());
  DeviceHeap& heap = device_heap();
  {
    std::lock_guard<std::mutex> lock(heap.mutex);
    auto found = heap.sizes.find(p);
    if (found != heap.sizes.end()) {
      heap.used -= found->second;
      heap.sizes.erase(found);
      free(p);
      return;
    }
  }
  char message[160];
  snprintf(
      message, sizeof message, "%s of a pointer that no malloc() or new of a kernel gave, or that is free already",
      name);
  fail_at_call(here(), message, returns_to);
}

void engine_stop(const char* message, const void* returns_to) { fail_at_call(here(), message, returns_to); }

// What a kernel calls by the names of the C library: its own assembly says so, see compiler.py. That library's would end
// Python, or leave a lock locked in a kernel that is torn away. (abort() comes back as a signal.)
#define ENGINE_OWN_STOP(NAME)                                                                           \
  void engine_own_##NAME(int) {                                                                         \
    engine_stop("the kernel called " #NAME "(): a kernel ends by return", __builtin_return_address(0)); \
  }
#define ENGINE_OWN_NEW(SYMBOL) \
  void* engine_own_##SYMBOL(size_t bytes) { return engine_malloc(bytes); }
#define ENGINE_OWN_DELETE(SYMBOL, WORDS) \
  void engine_own_##SYMBOL(void* p) { engine_free(p, WORDS, __builtin_return_address(0)); }
ENGINE_OWN_STOP(exit)
ENGINE_OWN_STOP(_Exit)
ENGINE_OWN_STOP(quick_exit)
ENGINE_OWN_NEW(malloc)
ENGINE_OWN_NEW(_Znwm)
ENGINE_OWN_NEW(_Znam)
ENGINE_OWN_DELETE(free, "free()")
ENGINE_OWN_DELETE(_ZdlPv, "delete")
ENGINE_OWN_DELETE(_ZdaPv, "delete[]")
ENGINE_OWN_DELETE(_ZdlPvm, "delete")
ENGINE_OWN_DELETE(_ZdaPvm, "delete[]")

// Poisoned memory, and next to it the slack of the array's number; null: no memory is left.
void* engine_allocate(size_t bytes, unsigned number) {
  const Rounded rounded(bytes);
  const size_t data = rounded.data, pages = rounded.pages;
  if (data < bytes || pages < data || pages + 2 * GUARD_BYTES < pages) return nullptr;  // it went past 2^64
  char* base = map_pages(pages + 2 * GUARD_BYTES, PROT_NONE, true);
  if (!base) return nullptr;
  char* window = base + GUARD_BYTES;
  if (mprotect(window, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, pages + 2 * GUARD_BYTES);
    return nullptr;
  }
  memset(window, POISON, pages);
  unsigned char* const begin = (unsigned char*)window + pages - data;
  const Slack slack{number};
  for (ptrdiff_t i = (ptrdiff_t)(data - pages); i < 0; ++i) begin[i] = slack.at(i);
  for (ptrdiff_t i = bytes; i < (ptrdiff_t)data; ++i) begin[i] = slack.at(i);
  return begin;
}

// The first byte beside an array that is not its slack any more, relative to `begin`, or 0 where all of it is. It is
// mended.
int64_t engine_overrun(unsigned char* begin, size_t bytes, unsigned number) {
  const Rounded rounded(bytes);
  const Slack slack{number};
  int64_t found = 0;
  const auto mend = [&](ptrdiff_t from, ptrdiff_t to) {
    for (ptrdiff_t i = from; i < to; ++i) {
      if (begin[i] == slack.at(i)) continue;
      if (!found) found = i;
      begin[i] = slack.at(i);
    }
  };
  mend(bytes, rounded.data);
  mend((ptrdiff_t)(rounded.data - rounded.pages), 0);
  return found;
}

void engine_release(void* begin, size_t bytes) {
  const Rounded rounded(bytes);
  munmap((char*)begin + rounded.data - rounded.pages - GUARD_BYTES, rounded.pages + 2 * GUARD_BYTES);
}

}  // extern "C"
