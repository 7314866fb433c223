// cp.async: a thread's copies wait in a queue of its own and land when it waits for their group, not before.
//
// A GPU may let them land at any time in between. The latest time is the one at which a kernel that forgets the wait
// reads old data, so that its mistake shows.
#include "worker.h"

namespace {

// The first `n` copies of a thread arrive.
void land(Fiber& f, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const AsyncCopy& copy = f.copies[i];
    memcpy(copy.target, &copy.data, copy.bytes);
    if (checking()) check_async_landed(copy.target, copy.bytes);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + n);
}

// A thread has ended and not waited for these.
void leave_copies(Fiber& f) {
  if (checking())
    for (const AsyncCopy& copy : f.copies) check_async_left(copy.target, copy.bytes, copy.caller);
  f.copies.clear();
}

}  // namespace

extern "C" {

void engine_async_copy(void* target, engine::Words data, unsigned bytes) {
  Worker& w = here();
  void* caller = __builtin_return_address(0);
  if (checking()) check_async_issue(target, bytes, caller, __builtin_frame_address(0));
  // A wild target faults here, where its line is known, and as a write. An atomic of nothing, because a plain read and
  // write back could undo what another block writes at the same time.
  const volatile char nothing = 0;
  __atomic_fetch_or((char*)target, nothing, __ATOMIC_RELAXED);
  Critical guard(w);
  Fiber& f = *w.current;
  f.copies.push_back({(char*)target, data, bytes, f.groups, caller});
  trace(w, TRACE_ASYNC, f.lane.linear, caller, 0, bytes);
}

void engine_async_commit() {
  Fiber& f = *here().current;
  trace(here(), TRACE_ASYNC_COMMIT, f.lane.linear, __builtin_return_address(0), (unsigned)f.groups);
  f.groups++;
}

void engine_async_wait(unsigned pending) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  size_t n = 0;
  while (n < f.copies.size() && (pending == ~0u || f.copies[n].group + (uint64_t)pending < f.groups)) ++n;
  int64_t landed = 0;
  for (size_t i = 0; i < n && is_traced; ++i) landed += f.copies[i].bytes;
  trace(w, TRACE_ASYNC_WAIT, f.lane.linear, __builtin_return_address(0), 0, landed);
  if (n) land(f, n);
}

}  // extern "C"
