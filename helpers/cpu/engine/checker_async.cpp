// Asynchronous copies in the books.
//
// A cp.async writes at some time between its issue and its wait. At its issue it is checked as a write is, so that a
// thread which may still be reading the old data is a race. Until the wait its target is in flight: nobody may touch
// it. With the wait it is a write of this thread at that time, so that other threads need a barrier after it.
#include "books.h"

void check_async_issue(void* target, unsigned bytes, void* caller, void* frame) {
  const unsigned thread = current.thread;
  access_first((uintptr_t)target, bytes, WRITE, PLAIN, (uintptr_t)caller, frame);
  settle_same_value(true);  // its value is not there yet to compare
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    cell.write = tag_of(IN_FLIGHT, thread, PLAIN);
    cell.read = cell.other_read = 0;  // compared with this write; the next access asks again
  });
}

void check_async_landed(void* target, unsigned bytes) {
  const Tag now = tag_of(books.epoch, current.thread, PLAIN);
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    if (cell.write == tag_of(IN_FLIGHT, thread_of(now), PLAIN)) cell.write = now;
  });
}

void check_async_left(void* target, unsigned bytes, void* caller) {
  check_async_landed(target, bytes);
  for (uint32_t i = 0; i < books.regions.size(); ++i) {
    const Region& r = books.regions[i];
    if ((uintptr_t)target < r.begin || (uintptr_t)target >= r.end) continue;
    report(ENGINE_NEVER_WAITED, i, (uintptr_t)target, bytes, (uintptr_t)caller, current.thread, true);
    return;
  }
}
