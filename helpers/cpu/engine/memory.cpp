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

}  // namespace

extern "C" {

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
