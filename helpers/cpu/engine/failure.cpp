// How a block is given up from inside: the failure in words, and the way out of its fibers to the worker.
//
// Apart from the scheduler, because most of it is spelling. Nothing here returns to the kernel: fibers are left where
// they are, so no destructor runs in them, and whatever holds memory is emptied by hand first.
#include "worker.h"

namespace {

void copy_text(char* to, size_t bytes, const char* from) { snprintf(to, bytes, "%s", from ? from : ""); }

// The failure of the lowest block is the one that is told, so a failing launch says the same every time.
void record(const EngineFailure& failure) {
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->failure.kind != NONE && failure.block >= pool->failure.block) return;
  pool->failure = failure;
  pool->stop_at = failure.block;  // atomic, as workers look at it between blocks without the mutex
}

[[noreturn]] void leave_block(Worker& w) {
  w.in_fiber = false;
  Context scrap;  // the fiber is never entered again
  switch_to(scrap, w.main);
  __builtin_unreachable();
}

[[noreturn]] void fail(Worker& w, const char* file, int line, std::string message) {
  w.critical++;  // an interrupt in here would leave the pool's mutex locked for ever
  EngineFailure f;
  memset(&f, 0, sizeof f);
  f.kind = MESSAGE;
  f.block = w.block;
  f.thread = w.current ? w.current->lane.linear : 0;
  f.line = line;
  copy_text(f.file, sizeof f.file, file);
  copy_text(f.message, sizeof f.message, message.c_str());
  record(f);
  std::string().swap(message);  // no destructor runs after this
  leave_block(w);
}

std::string name_of(const Fiber& f) {
  char text[96];
  snprintf(text, sizeof text, "thread (%u,%u,%u)", f.lane.thread_index.x, f.lane.thread_index.y, f.lane.thread_index.z);
  return text;
}

std::string place(const char* file, int line) { return std::string(file ? file : "?") + ":" + std::to_string(line); }

// No fiber can run and not all have ended: say who waits where, and for whom in vain.
[[noreturn]] void diagnose_stuck(Worker& w) {
  const Fiber *at_barrier = nullptr, *at_collective = nullptr, *at_named = nullptr, *finished = nullptr;
  unsigned n_barrier = 0, n_finished = 0;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    const Fiber& f = w.fibers[i];
    if (f.finished) {
      n_finished++;
      if (!finished) finished = &f;
    } else if (f.at_barrier) {
      n_barrier++;
      if (!at_barrier) at_barrier = &f;
    } else if (f.collective && !at_collective) at_collective = &f;
    else if (f.named >= 0 && !at_named) at_named = &f;
  }
  // A warp that waits for a lane says more than a barrier that waits for that warp, so it comes first.
  if (at_collective) {
    const Collective& c = *at_collective->collective;
    unsigned warp = at_collective->lane.linear / WARP, missing = 0;  // missing: lanes that wait elsewhere
    for (unsigned lane = 0; lane < WARP; ++lane) {
      unsigned i = warp * WARP + lane;
      if (!(c.mask >> lane & 1) || i >= w.n_threads || w.fibers[i].finished) continue;
      const Collective* other = w.fibers[i].collective;
      if (!other || other->mask != c.mask || other->run != c.run) missing |= 1u << lane;
    }
    std::string elsewhere;
    if (missing) {
      const unsigned lane = (unsigned)__builtin_ctz(missing);
      const Fiber& f = w.fibers[warp * WARP + lane];
      const Collective* other = f.collective;
      elsewhere = ": lane " + std::to_string(lane) + " waits in " + (other ? other->name : "__syncthreads()") + " at " +
                  (other ? place(other->file, other->line) : place(f.file, f.line));
    }
    char text[512];
    snprintf(
        text, sizeof text,
        "deadlock in warp %u: %s waits at %s in %s with mask 0x%08x, and lanes 0x%08x of that mask never come%s", warp,
        name_of(*at_collective).c_str(), place(c.file, c.line).c_str(), c.name, c.mask, missing, elsewhere.c_str());
    std::string().swap(elsewhere);  // no destructor runs after this
    w.current = const_cast<Fiber*>(at_collective);
    fail(w, c.file, c.line, text);
  }
  if (at_named) {
    w.current = const_cast<Fiber*>(at_named);
    fail(
        w, at_named->file, at_named->line,
        "deadlock: " + name_of(*at_named) + " waits in bar.sync " + std::to_string(at_named->named) + " at " +
            place(at_named->file, at_named->line) + ", where " + std::to_string(w.named_arrived[at_named->named]) +
            " threads have arrived, and no more will come");
  }
  std::string text = "barrier divergence: " + std::to_string(n_barrier) + " of " + std::to_string(w.n_threads) +
                     " threads wait in __syncthreads() at " + place(at_barrier->file, at_barrier->line) + ", but " +
                     std::to_string(n_finished) + " have left the kernel and will never come (the first is " +
                     name_of(*finished) +
                     "). Every thread of a block must reach every barrier: guard the work, "
                     "not the barrier";
  w.current = const_cast<Fiber*>(at_barrier);
  fail(w, at_barrier->file, at_barrier->line, std::move(text));
}

// Where the current fiber was when the watchdog had waited long enough.
void note_expired(Worker& w, EngineFailure& f, uintptr_t pc) {
  memset(&f, 0, sizeof f);
  f.kind = EXPIRED;
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
