// Memory for device arrays, and pages for whoever in the engine needs them.
//
// An array ends where a guard of GUARD_BYTES begins, and has one in front: an access past either end is a fault at once
// and not somebody else's data. Sizes are rounded up to 256 bytes, as CuPy aligns, so some slack lies before the guard.
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

size_t page_bytes() {
  static const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return page;
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

// malloc and new in kernels. Apart from the C library's: a kernel may be torn away at any of its instructions, and a
// lock of the C library's would stay locked. As large as CUDA's heap is, if nobody asks for more.
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
  if (!this_worker) return malloc(bytes);  // a constructor, when the module is loaded
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
  if (!this_worker) return free(p);
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

// Poisoned memory; null: there is none.
void* engine_allocate(size_t bytes) {
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
  return window + pages - data;
}

// The first byte of the slack that is not poison any more, relative to `begin`, or 0 where all of it is. It is poisoned
// again.
int64_t engine_overrun(char* begin, size_t bytes) {
  const Rounded rounded(bytes);
  char* pieces[2][2] = {{begin + bytes, begin + rounded.data}, {begin + rounded.data - rounded.pages, begin}};
  int64_t found = 0;
  for (auto& piece : pieces) {
    char *p = piece[0], *end = piece[1];
    while (p < end && *(unsigned char*)p == POISON) ++p;
    if (p == end) continue;
    if (!found) found = p - begin;
    memset(p, POISON, end - p);
  }
  return found;
}

void engine_release(void* begin, size_t bytes) {
  const Rounded rounded(bytes);
  munmap((char*)begin + rounded.data - rounded.pages - GUARD_BYTES, rounded.pages + 2 * GUARD_BYTES);
}

}  // extern "C"
