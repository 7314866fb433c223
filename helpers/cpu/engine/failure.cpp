// How a block is given up from inside: the failure with its details, and the way out of its fibers to the worker.
//
// The words are Python's (failures.py). Nothing here returns to the kernel: fibers are left where
// they are, so no destructor runs in them, and whatever holds memory is emptied by hand first.
#include "worker.h"

namespace {

void copy_text(char* to, size_t bytes, const char* from) { snprintf(to, bytes, "%s", from ? from : ""); }

// The failure of the lowest block is the one that is told, so a failing launch says the same every time.
void record(const EngineFailure& failure) {
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->failure.reason != NONE && failure.block >= pool->failure.block) return;
  pool->failure = failure;
  pool->stop_at = failure.block;  // atomic, as workers look at it between blocks without the mutex
}

[[noreturn]] void leave_block(Worker& w) {
  w.in_fiber = false;
  Context scrap;  // the fiber is never entered again
  switch_to(scrap, w.main);
  __builtin_unreachable();
}

// Of the fiber that runs, with a line of the source; the caller fills in what its reason needs.
EngineFailure failure_at(const Worker& w, FailureReason reason, const char* file, int line) {
  EngineFailure f;
  memset(&f, 0, sizeof f);
  f.reason = reason;
  f.block = w.block;
  f.thread = w.current ? w.current->lane.linear : 0;
  f.line = line;
  copy_text(f.file, sizeof f.file, file);
  return f;
}

[[noreturn]] void fail(Worker& w, const EngineFailure& failure) {
  w.critical++;  // an interrupt in here would leave the pool's mutex locked for ever
  record(failure);
  leave_block(w);
}

// STATED, in a function that the kernel called and that does not know its line.
[[noreturn]] void fail_at_call(Worker& w, const char* message, const void* returns_to) {
  EngineFailure failure = failure_at(w, STATED, "", 0);
  copy_text(failure.message, sizeof failure.message, message);
  failure.place = place_in_kernel((uintptr_t)returns_to - 1);
  fail(w, failure);
}

void set_other_place(EngineFailure& f, const char* file, int line) {
  copy_text(f.other_file, sizeof f.other_file, file);
  f.other_line = line;
}

// No fiber can run and not all have ended: say who waits where, and for whom in vain.
[[noreturn]] void diagnose_stuck(Worker& w) {
  Fiber *at_collective = nullptr, *at_named = nullptr;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber& f = w.fibers[i];
    if (f.collective && !at_collective) at_collective = &f;
    else if (f.named >= 0 && !at_named) at_named = &f;
  }
  // A warp that waits for a lane says more than a barrier that waits for that warp, so it comes first.
  if (at_collective) {
    const Collective& c = *at_collective->collective;
    w.current = at_collective;
    EngineFailure failure = failure_at(w, LANES_NEVER_COME, c.file, c.line);
    copy_text(failure.name, sizeof failure.name, c.name);
    failure.mask = c.mask;
    const unsigned warp = at_collective->lane.linear / WARP;
    for (unsigned lane = 0; lane < WARP; ++lane) {  // those that wait elsewhere
      unsigned i = warp * WARP + lane;
      if (!(c.mask >> lane & 1) || i >= w.n_threads || w.fibers[i].finished) continue;
      const Collective* other = w.fibers[i].collective;
      if (!other || other->mask != c.mask || other->run != c.run) failure.lanes |= 1u << lane;
    }
    if (failure.lanes) {
      failure.other_lane = (unsigned)__builtin_ctz(failure.lanes);
      const Fiber& f = w.fibers[warp * WARP + failure.other_lane];
      const Collective* other = f.collective;
      copy_text(failure.other_name, sizeof failure.other_name, other ? other->name : "__syncthreads()");
      set_other_place(failure, other ? other->file : f.file, other ? other->line : f.line);
    }
    fail(w, failure);
  }
  // A barrier of the block cannot be what is left: it lets its threads go as soon as all who live have come.
  w.current = at_named;
  EngineFailure failure = failure_at(w, NAMED_BARRIER_STARVED, at_named->file, at_named->line);
  failure.number = (unsigned)at_named->named;
  failure.count = w.named_arrived[at_named->named];
  fail(w, failure);
}

// Where the current fiber was when the watchdog had waited long enough.
void note_expired(Worker& w, EngineFailure& f, uintptr_t pc) {
  memset(&f, 0, sizeof f);
  f.reason = EXPIRED;
  f.block = w.block;
  f.thread = w.current->lane.linear;
  f.place = place_in_kernel(pc);
}

// The launch was cancelled while the engine's own code ran: as on_interrupt would have left the kernel.
[[noreturn]] void leave_cancelled(Worker& w) {
  if (pool->expired.load()) {
    note_expired(w, w.fault, (uintptr_t)&leave_cancelled);
    record(w.fault);
  }
  leave_block(w);
}

}  // namespace
