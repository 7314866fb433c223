// What compiled kernels call: the functions of engine.h but for asynchronous copies and tensor cores.
//
// Each begins with a Critical wherever an interrupt would leave the block half changed. Whoever waits is taken out of
// the ready lanes first and then schedules; whoever completes a barrier makes the others ready.
#include "worker.h"

extern "C" {

__thread void* engine_worker = nullptr;

const engine::Lane* engine_lane() { return &this_worker()->current->lane; }

int engine_barrier(BarrierOp op, int predicate, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  if (w.arrived == 0) {
    w.barrier_sum = 0;
    w.barrier_line = line;
    w.barrier_mixed = false;
  } else if (line != w.barrier_line) {
    w.barrier_mixed = true;
  }
  w.barrier_sum += predicate ? 1 : 0;
  w.barrier_op = op;
  f.file = file;
  f.line = line;
  f.at_barrier = true;
  set_waiting(w, f);
  trace(w, TRACE_SYNC, f.lane.linear, __builtin_return_address(0));
  if (++w.arrived == w.n_threads - w.finished) complete_barrier(w);
  // Mostly the next lane of the warp goes on, and the rest of what `schedule` does has nothing to do.
  const unsigned ready = w.ready[w.warp];
  if (ready && !w.order && !checking() && !pool->cancelled.load(std::memory_order_relaxed)) {
    Fiber& to = w.fibers[w.warp * WARP + __builtin_ctz(ready)];
    if (&to != &f) {
      w.current = &to;
      enter(f.context, to);
    }
  } else {
    schedule(w);
  }
  f.at_barrier = false;
  trace(w, TRACE_SYNCED, f.lane.linear, __builtin_return_address(0));
  return w.barrier_result;  // of all threads, until the last of them has gone on and comes to another barrier
}

void engine_named_barrier(unsigned number, unsigned n_threads, int waits, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  const unsigned everyone = w.n_warps * WARP, warp = f.lane.linear / WARP;
  if (n_threads == w.n_threads) n_threads = everyone;  // a GPU counts whole warps
  if (number > 15 || n_threads % WARP || n_threads > everyone || !n_threads)
    fail(w, failure_at(w, WRONG_NAMED_BARRIER, file, line));
  f.file = file;
  f.line = line;
  if (waits) {
    f.named = (int)number;
    set_waiting(w, f);
  }
  if (!(w.named_open >> number & 1)) {
    w.named_open |= 1u << number;
    w.named_arrived[number] = w.named_warps[number] = 0;
    w.named_split &= ~(1u << number);
    w.named_expected[number] = n_threads;
  }
  // Lanes that have left the kernel count with their warp: with this one, or, in a barrier of the whole block, with any.
  for (unsigned i = n_threads == everyone ? 0 : warp; i <= (n_threads == everyone ? w.n_warps - 1 : warp); ++i) {
    if (w.named_warps[number] >> i & 1) continue;
    w.named_warps[number] |= 1u << i;
    w.named_lanes[number][i] = ~w.alive[i];
    w.named_arrived[number] += (unsigned)__builtin_popcount(~w.alive[i]);
  }
  w.named_lanes[number][warp] |= 1u << (f.lane.linear % WARP);
  if (!waits) w.named_split |= 1u << number;
  const bool tells = checking() && f.lane.linear % WARP == 0;
  if (checking()) check_named_arrival(number);
  if (tells)
    check_event(
        waits ? EVENT_BAR_SYNC : EVENT_BAR_ARRIVE, f.lane.linear, number, n_threads, __builtin_return_address(0));
  const EngineTraceKind arrival = waits ? TRACE_BAR_SYNC : TRACE_BAR_ARRIVE;
  trace(w, arrival, f.lane.linear, __builtin_return_address(0), number, n_threads);
  if (++w.named_arrived[number] == n_threads) complete_named(w, number);
  if (waits) schedule(w);
  if (waits && tells) check_event(EVENT_BAR_SYNCED, f.lane.linear, number, n_threads, __builtin_return_address(0));
  if (waits) trace(w, TRACE_BAR_SYNCED, f.lane.linear, __builtin_return_address(0), number, n_threads);
}

void engine_collective(Collective* mine) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  unsigned warp = f.lane.linear / WARP, lane = f.lane.linear % WARP;
  if (!(mine->mask >> lane & 1)) {
    EngineFailure failure = failure_at(w, NOT_IN_OWN_MASK, mine->file, mine->line);
    failure.lane = lane;
    failure.mask = mine->mask;
    copy_text(failure.name, sizeof failure.name, mine->name);
    fail(w, failure);
  }
  f.collective = mine;
  w.meeting[warp] |= 1u << lane;
  set_waiting(w, f);
  try_collective(w, warp, mine->mask);
  schedule(w);  // also where it is complete: then the lanes go on in their order, as at the start
}

void engine_no_such_lane(const Collective* mine, unsigned lane, unsigned source) {
  if (checking()) check_no_such_lane(*mine, lane, source);
}

unsigned engine_activemask(const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  f.file = file;
  f.line = line;
  f.at_activemask = true;
  set_waiting(w, f);
  schedule(w);
  return (unsigned)f.predicate;
}

// A thread that waits for another one by looking again and again must let it run: __nanosleep does.
void engine_yield() {
  Worker& w = here();
  Critical guard(w);
  let_others_run(w);
}

// A thread has looked at what others write, or failed to take what others hold. After so many times in a row at the
// same place it waits for them.
void engine_look(const void* address) {
  constexpr unsigned PATIENCE = 8;
  if (!this_worker()) return;
  Fiber& f = *here().current;
  if (f.watched != address) f.watched = address, f.looks = 0;
  if (++f.looks < PATIENCE) return;
  f.looks = 0;
  engine_yield();
}

void engine_exit() {
  Worker& w = here();
  w.critical++;
  end_fiber(w);
}

unsigned engine_carry(int set) {
  bool& carry = this_worker()->current->carry;
  if (set >= 0) carry = set;
  return carry;
}

int engine_is_shared(const void* pointer) {
  const Worker& w = here();
  auto inside = [&](const char* p) { return p >= w.shared && p <= w.shared + SHARED_WINDOW; };
  const char* p = (const char*)pointer;
  if (inside(p)) return true;
  // What lies past the window is no array of the kernel, unless the C library has placed them somewhere else.
  return w.static_base && !inside(w.static_base) && p >= w.static_base && p <= w.static_base + pool->launch.static_end;
}

// Shared memory has addresses of 32 bits of its own, as PTX sees them.
unsigned engine_shared_offset(const void* pointer, const char* file, int line) {
  Worker& w = here();
  const char* p = (const char*)pointer;
  const Block* const owner = owner_of(w, p);
  if (owner && p >= owner->shared && p <= owner->shared + SHARED_WINDOW) return (unsigned)(p - w.space);
  if (owner) return STATIC_OFFSET + (unsigned)(p - w.static_base);
  fail(w, failure_at(w, NO_SHARED_POINTER, file, line));
}

void* engine_shared_pointer(unsigned offset, unsigned bytes, const char* name, const char* file, int line) {
  Worker& w = here();
  if (offset % bytes == 0) {
    const unsigned inside = offset - (unsigned)(w.shared - w.space);  // of another block's it is large
    if (inside < SHARED_WINDOW) return w.shared + inside;
    if (w.static_base && offset >= STATIC_OFFSET && offset - STATIC_OFFSET < STATIC_BYTES)
      return w.static_base + (offset - STATIC_OFFSET);
  }
  EngineFailure failure = failure_at(w, offset % bytes ? SHARED_MISALIGNED : OUTSIDE_SHARED, file, line);
  copy_text(failure.name, sizeof failure.name, name);
  failure.address = offset;
  failure.count = bytes;
  fail(w, failure);
}

__thread char *engine_static_base = nullptr, *engine_own_shared = nullptr;
char* engine_static_shared() { return engine_static_base; }
void* engine_dynamic_shared() { return this_worker()->dynamic; }
unsigned engine_dynamic_shared_size() { return (unsigned)pool->launch.dynamic_shared; }

long long engine_clock() { return (long long)std::chrono::steady_clock::now().time_since_epoch().count(); }

int engine_printf(const char* format, ...) {
  Worker& w = here();
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text, sizeof text, format, arguments);  // a bad %s is the kernel's fault, so not critical yet
  va_end(arguments);
  Critical guard(w);
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (!pool->printed.empty() && pool->printed.back().first == w.block) pool->printed.back().second += text;
  else pool->printed.emplace_back(w.block, text);
  return length;
}

// The trace of the fiber that runs is full: the rest of its warp must catch up before it is merged.
void engine_pause() {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  set_waiting(w, f);
  w.paused[f.lane.linear / WARP] |= 1u << (f.lane.linear % WARP);
  schedule(w);
}

void engine_fail(const char* message, const char* file, int line) {
  EngineFailure failure = failure_from(here(), STATED, file, line, __builtin_return_address(0));
  copy_text(failure.message, sizeof failure.message, message);
  fail(here(), failure);
}

void engine_misaligned(const char* rule, const char* file, int line) {
  EngineFailure failure = failure_at(here(), MISALIGNED, file, line);
  copy_text(failure.message, sizeof failure.message, rule);
  fail(here(), failure);
}

}  // extern "C"
