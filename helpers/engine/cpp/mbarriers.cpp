// mbarriers: words of shared memory that count arrivals of threads and bytes of copies, phase after phase.
//
// The word is not a GPU's, whose contents are undocumented: the arrivals that the phase still waits for (20 bits), those that
// every phase expects (20), the bytes that it waits for (22, signed), and on top the phase, modulo 2.
//
// A copy by TMA arrives as late as it may: when no thread of the block can go on without it, or when one tests without
// waiting. Its bytes count then, and the data are in shared memory when the phase ends. So who reads without a wait, or
// with a wait for another phase, reads poison.
#include "worker.h"

namespace {

constexpr uint64_t COUNT = (1u << 20) - 1, PHASE = 1ull << 63;
constexpr int EXPECTED = 20, BYTES = 40;

uint64_t state_of(const char* word) { return __atomic_load_n((const uint64_t*)word, __ATOMIC_RELAXED); }

// Of a state: the bytes that its phase waits for, less than 0 where too many have come.
int64_t bytes_of(uint64_t state) { return (int64_t)(state << 1) >> (BYTES + 1); }

// Bytes come and go in any order, so that their number may be negative for a while; the phase is no part of it.
uint64_t with_bytes(uint64_t state, int64_t bytes) {
  return (((state & ~PHASE) + ((uint64_t)bytes << BYTES)) & ~PHASE) | (state & PHASE);
}

// Who has arrived at an mbarrier since it was initialised, for the report of a deadlock: by warp and place.
struct Arrivals {
  const char* file;
  int line;
  const void* caller;
  bool of_bytes;  // copies that were sent to it
  unsigned warp, lanes, lanes_now;
  uint64_t count, phase;  // lanes_now: of those, in this phase
};
struct History {
  const char* word = nullptr;
  uint64_t ended = 0;  // phases
  std::vector<Arrivals> arrivals;
};
// By block, as blocks that wait for others are set aside, and by the mbarrier's number.
thread_local std::unordered_map<uint64_t, std::vector<History>> histories;

History& history_of(Worker& w, const Mbarrier& b) {
  std::vector<History>& all = histories[w.block];
  if (all.size() <= b.number) all.resize(b.number + 1);
  all[b.number].word = b.word;
  return all[b.number];
}

void note_arrival(
    Worker& w, const Mbarrier& b, unsigned thread, bool of_bytes, uint64_t count, const char* file, int line,
    const void* caller) {
  History& history = history_of(w, b);
  const unsigned warp = thread / WARP, lane = 1u << (thread % WARP);
  Arrivals* found = nullptr;
  for (Arrivals& a : history.arrivals)
    if (a.caller == caller && a.warp == warp && a.of_bytes == of_bytes) found = &a;
  if (!found) {
    history.arrivals.push_back({file, line, caller, of_bytes, warp, 0, 0, 0, 0});
    found = &history.arrivals.back();
  }
  if (found->phase != history.ended) found->phase = history.ended, found->lanes_now = 0;
  found->lanes |= lane;
  found->lanes_now |= lane;
  found->count += count;
}

Mbarrier& mbarrier_at(Worker& w, char* word) {
  for (Mbarrier& known : w.mbarriers)
    if (known.word == word) return known;
  w.mbarriers.emplace_back();
  Mbarrier& b = w.mbarriers.back();
  b.word = word;
  b.number = (unsigned)w.mbarriers.size() - 1;
  return b;
}

// Of the phase that runs, or of one before it.
inline void trace_mbarrier(
    Worker& w, const Mbarrier& b, EngineTraceKind kind, unsigned thread, const void* caller, int64_t value,
    int64_t before = 0) {
  if (is_traced) trace(w, kind, thread, caller, b.number, value, (int64_t)history_of(w, b).ended + before);
}

// The counted copies complete, and the waiting threads go on.
void end_phase(Worker& w, Mbarrier& b) {
  for (TensorCopy& copy : b.counted) {
    land(w, copy);
    if (checking()) {
      check_tensor_landed(copy.shared, copy.room, b.number);
      check_event(EVENT_LANDED, copy.thread, b.number, copy.bytes, copy.caller);
    }
    trace_mbarrier(w, b, TRACE_LANDED, copy.thread, copy.caller, copy.bytes, -1);
  }
  if (checking()) {
    unsigned left = 0;
    for (const TensorCopy& copy : b.pending) left += copy.bytes;
    check_phase_end(b.number, left, b.pending.empty() ? nullptr : b.pending.front().caller);
  }
  b.counted.clear();
  trace_mbarrier(w, b, TRACE_PHASE, NOBODY, nullptr, 0, -1);
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber& f = w.fibers[i];
    if (f.mbarrier != b.word || ((state_of(b.word) ^ f.phase) & PHASE) == 0) continue;
    f.mbarrier = nullptr;
    f.phase_over = true;
    w.ready[i / WARP] |= 1u << (i % WARP);
  }
}

// A phase for which nothing is pending ends, and the next one begins.
void change(Worker& w, Mbarrier& b, uint64_t after) {
  const bool ends = (after & COUNT) == 0 && bytes_of(after) == 0;
  if (ends) after = ((after & ~COUNT) | (after >> EXPECTED & COUNT)) ^ PHASE;
  __atomic_store_n((uint64_t*)b.word, after, __ATOMIC_RELAXED);
  ++w.progress;
  w.idle = 0;
  if (!ends) return;
  ++history_of(w, b).ended;
  end_phase(w, b);
}

// The oldest copy that is under way to the mbarrier arrives there. False: no copy is under way.
bool deliver(Worker& w, Mbarrier& b) {
  if (b.pending.empty()) return false;
  b.counted.push_back(std::move(b.pending.front()));
  b.pending.pop_front();
  const TensorCopy& copy = b.counted.back();
  note_arrival(w, b, copy.thread, true, copy.bytes, "", 0, copy.caller);
  change(w, b, with_bytes(state_of(b.word), -(int64_t)b.counted.back().bytes));
  return true;
}

// No thread can run: a copy that a thread waits for arrives.
bool deliver_copies(Worker& w) {
  for (unsigned i = 0; i < w.n_threads; ++i)
    if (w.fibers[i].mbarrier && deliver(w, mbarrier_at(w, w.fibers[i].mbarrier))) return true;
  return false;
}

// A copy that no thread waits for yet arrives: now and then, if another order is selected.
void deliver_some(Worker& w) {
  for (Mbarrier& b : w.mbarriers)
    if (w.order >> 40 & 1 && deliver(w, b)) return;
}

// No thread can run and nothing is under way: try_wait may return without the end of the phase, and what threads do then
// may help. False: it has not helped three times over.
bool time_out_waits(Worker& w) {
  if (w.progress != w.last_progress) w.timeouts = 0;
  w.last_progress = w.progress;
  if (w.timeouts++ == 3) return false;
  bool any = false;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber& f = w.fibers[i];
    if (!f.mbarrier) continue;
    f.mbarrier = nullptr;
    f.phase_over = false;
    w.ready[i / WARP] |= 1u << (i % WARP);
    any = true;
  }
  return any;
}

// The block has ended, and copies of it are still under way.
void leave_mbarriers(Worker& w) {
  for (Mbarrier& b : w.mbarriers) {
    if (checking()) {
      for (const TensorCopy& copy : b.counted)
        check_tensor_left(copy.shared, copy.room, true, copy.thread, copy.caller);
      for (const TensorCopy& copy : b.pending)
        check_tensor_left(copy.shared, copy.room, true, copy.thread, copy.caller);
    }
  }
  w.mbarriers.clear();
  histories.erase(w.block);
}

[[noreturn]] void fail_at_barrier(const char* message, const char* file, int line, const void* caller) {
  EngineFailure failure = failure_from(here(), STATED, file, line, caller);
  copy_text(failure.message, sizeof failure.message, message);
  fail(here(), failure);
}

bool is_over(const char* word, uint64_t phase) { return ((state_of(word) ^ phase) & PHASE) != 0; }

}  // namespace

extern "C" {

void engine_mbarrier_init(void* word, unsigned count, const char* file, int line) {
  if (count == 0 || count > COUNT) engine_fail("mbarrier.init takes a count from 1 to 1,048,575", file, line);
  Worker& w = here();
  if (checking())
    check_mbarrier_write(word, __builtin_return_address(0), __builtin_frame_address(0));  // a wild one faults below
  __atomic_store_n((uint64_t*)word, count | (uint64_t)count << EXPECTED, __ATOMIC_RELAXED);
  Critical guard(w);
  Mbarrier& b = mbarrier_at(w, (char*)word);
  b.pending.clear();
  b.counted.clear();
  history_of(w, b) = History();
  ++w.progress;
  if (checking()) check_mbarrier_init(b.number, word, __builtin_return_address(0));
  trace(w, TRACE_INIT, w.current->lane.linear, __builtin_return_address(0), b.number, count, (int64_t)word);
}

void engine_mbarrier_inval(void* word) { __atomic_store_n((uint64_t*)word, 0, __ATOMIC_RELAXED); }

unsigned long long engine_mbarrier_arrive(
    void* word, unsigned count, unsigned bytes, int drop, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  Mbarrier& b = mbarrier_at(w, (char*)word);
  uint64_t before = state_of(b.word);
  // An arrival for the next phase: the copies of this one have come by now, or the kernel relies on it.
  while (before != ~0ull && count > (before & COUNT) && deliver(w, b)) before = state_of(b.word);
  if (count > (before & COUNT) || before == ~0ull)
    fail_at_barrier(
        before == ~0ull ? "nobody has initialised this mbarrier"
                        : "more threads arrive at an mbarrier than a phase of it expects, or nobody has initialised it",
        file, line, __builtin_return_address(0));
  if (checking()) {
    check_mbarrier_use(b.number, __builtin_return_address(0), false);
    check_mbarrier_arrive(b.number);
    check_event(EVENT_ARRIVE, w.current->lane.linear, b.number, bytes, __builtin_return_address(0));
  }
  if (bytes) trace_mbarrier(w, b, TRACE_EXPECT, w.current->lane.linear, __builtin_return_address(0), bytes);
  trace_mbarrier(w, b, TRACE_ARRIVE, w.current->lane.linear, __builtin_return_address(0), count);
  note_arrival(w, b, w.current->lane.linear, false, count, file, line, __builtin_return_address(0));
  change(w, b, with_bytes(before, bytes) - count - (drop ? (uint64_t)count << EXPECTED : 0));
  return before;
}

void engine_mbarrier_bytes(void* word, long long bytes, const char* file, int line) {
  Worker& w = here();
  const uint64_t before = state_of((char*)word);
  if (before == ~0ull) fail_at_barrier("nobody has initialised this mbarrier", file, line, __builtin_return_address(0));
  Critical guard(w);
  Mbarrier& b = mbarrier_at(w, (char*)word);
  trace_mbarrier(w, b, TRACE_EXPECT, w.current->lane.linear, __builtin_return_address(0), bytes);
  change(w, b, with_bytes(before, bytes));
}

int engine_mbarrier_wait(void* word, unsigned long long phase, int may_block, const char* file, int line) {
  Worker& w = here();
  if (state_of((char*)word) == ~0ull)
    fail_at_barrier("nobody has initialised this mbarrier", file, line, __builtin_return_address(0));
  Critical guard(w);
  Fiber& f = *w.current;
  Mbarrier& b = mbarrier_at(w, (char*)word);
  if (checking()) check_mbarrier_use(b.number, __builtin_return_address(0), false);
  bool over = is_over(b.word, phase);
  const bool tells = checking() && f.lane.linear % WARP == 0;
  void* const caller = __builtin_return_address(0);
  if (tells && !over) check_event(EVENT_WAIT, f.lane.linear, b.number, phase >> 63, caller);
  const int64_t awaited = is_traced ? (int64_t)history_of(w, b).ended - over : 0;
  if (over || may_block) trace(w, TRACE_WAIT, f.lane.linear, caller, b.number, phase >> 63, awaited);
  if (!over && may_block) {
    f.mbarrier = b.word;
    f.phase = phase;
    f.file = file;
    f.line = line;
    f.caller = caller;
    set_waiting(w, f);
    schedule(w);
    over = f.phase_over;
  } else if (!over) {
    if (!deliver(w, b)) let_others_run(w);
    over = is_over(b.word, phase);
  }
  if (over && checking()) check_mbarrier_wait(b.number);
  if (over && tells) check_event(EVENT_WAITED, f.lane.linear, b.number, phase >> 63, caller);
  if (over) trace(w, TRACE_WAITED, f.lane.linear, caller, b.number, phase >> 63, awaited);
  return over;
}

}  // extern "C"
