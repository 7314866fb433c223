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
  bool of_bytes;                          // copies that were sent to it
  unsigned rank, warp, lanes, lanes_now;  // rank: of the threads' block in the cluster
  uint64_t count, phase;                  // lanes_now: of those, in this phase
};
struct History {
  const char* word = nullptr;
  uint64_t ended = 0;  // phases
  std::vector<Arrivals> arrivals;
};
// By block, as blocks that wait for others are set aside, and by the mbarrier's number.
thread_local std::unordered_map<uint64_t, std::vector<History>> histories;

History& history_of(const Block& owner, const Mbarrier& b) {
  std::vector<History>& all = histories[owner.block];
  if (all.size() <= b.number) all.resize(b.number + 1);
  all[b.number].word = b.word;
  return all[b.number];
}

// owner: whose mbarrier it is. rank, thread: who arrives.
void note_arrival(
    const Block& owner, const Mbarrier& b, unsigned rank, unsigned thread, bool of_bytes, uint64_t count,
    const char* file, int line, const void* caller) {
  History& history = history_of(owner, b);
  const unsigned warp = thread / WARP, lane = 1u << (thread % WARP);
  Arrivals* found = nullptr;
  for (Arrivals& a : history.arrivals)
    if (a.caller == caller && a.rank == rank && a.warp == warp && a.of_bytes == of_bytes) found = &a;
  if (!found) {
    history.arrivals.push_back({file, line, caller, of_bytes, rank, warp, 0, 0, 0, 0});
    found = &history.arrivals.back();
  }
  if (found->phase != history.ended) found->phase = history.ended, found->lanes_now = 0;
  found->lanes |= lane;
  found->lanes_now |= lane;
  found->count += count;
}

Mbarrier& mbarrier_at(Block& owner, char* word) {
  for (Mbarrier& known : owner.mbarriers)
    if (known.word == word) return known;
  owner.mbarriers.emplace_back();
  Mbarrier& b = owner.mbarriers.back();
  b.word = word;
  b.number = (unsigned)owner.mbarriers.size() - 1;
  return b;
}

// An event at an mbarrier, in its block's trace; what a thread of another block did there has no thread. Of the phase that
// runs, or of one before it.
inline void trace_mbarrier(
    const Block& owner, const Mbarrier& b, EngineTraceKind kind, unsigned rank, unsigned thread, const void* caller,
    int64_t value, int64_t before = 0) {
  if (!is_traced) return;
  const int64_t phase = (int64_t)history_of(owner, b).ended + before;
  trace_in(owner.block, kind, rank == owner.rank ? thread : NOBODY, caller, b.number, value, phase);
}

// The counted copies complete, and the waiting threads of the block that has the mbarrier go on.
void end_phase(Block& owner, Mbarrier& b) {
  for (TensorCopy& copy : b.counted) {
    land(copy);
    if (checking()) {
      check_tensor_landed(copy.shared, copy.room, b.number, owner.rank);
      check_event(EVENT_LANDED, copy.thread, b.number, copy.bytes, copy.caller);
    }
    trace_mbarrier(owner, b, TRACE_LANDED, copy.rank, copy.thread, copy.caller, copy.bytes, -1);
  }
  if (checking()) {
    unsigned left = 0;
    for (const TensorCopy& copy : b.pending) left += copy.bytes;
    check_phase_end(b.number, owner.rank, left, b.pending.empty() ? nullptr : b.pending.front().caller);
  }
  b.counted.clear();
  trace_mbarrier(owner, b, TRACE_PHASE, owner.rank, NOBODY, nullptr, 0, -1);
  for (unsigned i = 0; i < owner.n_threads; ++i) {
    Fiber& f = owner.fibers[i];
    if (f.mbarrier != b.word || ((state_of(b.word) ^ f.phase) & PHASE) == 0) continue;
    f.mbarrier = nullptr;
    f.phase_over = true;
    owner.ready[i / WARP] |= 1u << (i % WARP);
  }
}

// A phase for which nothing is pending ends, and the next one begins.
void change(Block& owner, Mbarrier& b, uint64_t after) {
  const bool ends = (after & COUNT) == 0 && bytes_of(after) == 0;
  if (ends) after = ((after & ~COUNT) | (after >> EXPECTED & COUNT)) ^ PHASE;
  __atomic_store_n((uint64_t*)b.word, after, __ATOMIC_RELAXED);
  ++owner.progress;
  owner.idle = 0;
  if (!ends) return;
  ++history_of(owner, b).ended;
  end_phase(owner, b);
}

// The oldest copy that is under way to the mbarrier arrives there. False: no copy is under way.
bool deliver(Block& owner, Mbarrier& b) {
  if (b.pending.empty()) return false;
  b.counted.push_back(std::move(b.pending.front()));
  b.pending.pop_front();
  const TensorCopy& copy = b.counted.back();
  note_arrival(owner, b, copy.rank, copy.thread, true, copy.bytes, "", 0, copy.caller);
  change(owner, b, with_bytes(state_of(b.word), -(int64_t)b.counted.back().bytes));
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
  if (w.timeouts++ >= 3) return false;
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

// A copy is on its way to an mbarrier.
void send(Worker& w, Block& to, Mbarrier& b, TensorCopy&& copy) {
  memset(copy.shared, POISON, copy.room);
  b.pending.push_back(std::move(copy));
  ++to.progress;
  w.idle = 0;
}

// The block has ended, and copies of it are still under way.
void leave_mbarriers(Worker& w) {
  for (Mbarrier& b : w.mbarriers) {
    if (checking()) {
      for (const TensorCopy& copy : b.counted)
        check_tensor_left(copy.shared, copy.room, true, copy.thread, copy.rank, copy.caller);
      for (const TensorCopy& copy : b.pending)
        check_tensor_left(copy.shared, copy.room, true, copy.thread, copy.rank, copy.caller);
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

// The block of the cluster that has an mbarrier. Null where that has ended: nothing comes of it on a GPU, though CUDA asks
// for a block to stay until others are done with its shared memory, and a checked run reports it.
Block* owner_of_mbarrier(Worker& w, const void* word, const void* caller) {
  Block* const owner = owner_of(w, word);
  if (owner && owner->ended) {
    if (checking()) check_peer_gone(word, caller);
    return nullptr;
  }
  return owner ? owner : &w;
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
  Block* const has_it = owner_of_mbarrier(w, word, __builtin_return_address(0));
  if (!has_it) return 0;
  (void)state_of((char*)word);  // a wild one faults here, where that is the kernel's
  Critical guard(w);
  Block& owner = *has_it;
  Mbarrier& b = mbarrier_at(owner, (char*)word);
  uint64_t before = state_of(b.word);
  // An arrival for the next phase: the copies of this one have come by now, or the kernel relies on it.
  while (before != ~0ull && count > (before & COUNT) && deliver(owner, b)) before = state_of(b.word);
  if (count > (before & COUNT) || before == ~0ull)
    fail_at_barrier(
        before == ~0ull ? "nobody has initialised this mbarrier"
                        : "more threads arrive at an mbarrier than a phase of it expects, or nobody has initialised it",
        file, line, __builtin_return_address(0));
  if (checking()) {
    check_mbarrier_use(b.number, owner.rank, __builtin_return_address(0), false);
    check_mbarrier_arrive(b.number, owner.rank, __builtin_return_address(0));
    check_event(EVENT_ARRIVE, w.current->lane.linear, b.number, bytes, __builtin_return_address(0));
  }
  void* const caller = __builtin_return_address(0);
  if (bytes) trace_mbarrier(owner, b, TRACE_EXPECT, w.rank, w.current->lane.linear, caller, bytes);
  trace_mbarrier(owner, b, TRACE_ARRIVE, w.rank, w.current->lane.linear, caller, count);
  note_arrival(owner, b, w.rank, w.current->lane.linear, false, count, file, line, caller);
  change(owner, b, with_bytes(before, bytes) - count - (drop ? (uint64_t)count << EXPECTED : 0));
  return before;
}

void engine_mbarrier_bytes(void* word, long long bytes, const char* file, int line) {
  Worker& w = here();
  Block* const owner = owner_of_mbarrier(w, word, __builtin_return_address(0));
  if (!owner) return;
  const uint64_t before = state_of((char*)word);
  if (before == ~0ull) fail_at_barrier("nobody has initialised this mbarrier", file, line, __builtin_return_address(0));
  Critical guard(w);
  Mbarrier& b = mbarrier_at(*owner, (char*)word);
  trace_mbarrier(*owner, b, TRACE_EXPECT, w.rank, w.current->lane.linear, __builtin_return_address(0), bytes);
  change(*owner, b, with_bytes(before, bytes));
}

int engine_mbarrier_wait(void* word, unsigned long long phase, int may_block, const char* file, int line) {
  Worker& w = here();
  if (state_of((char*)word) == ~0ull)
    fail_at_barrier("nobody has initialised this mbarrier", file, line, __builtin_return_address(0));
  Critical guard(w);
  if (Block* const owner = owner_of(w, word); owner && owner != &w)
    fail_at_barrier(
        "a thread can wait for an mbarrier of its own block alone, and this one is in the shared memory of another "
        "block",
        file, line, __builtin_return_address(0));
  Fiber& f = *w.current;
  Mbarrier& b = mbarrier_at(w, (char*)word);
  if (checking()) check_mbarrier_use(b.number, w.rank, __builtin_return_address(0), false);
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
  if (over && checking()) check_mbarrier_wait(b.number, caller);
  if (over && tells) check_event(EVENT_WAITED, f.lane.linear, b.number, phase >> 63, caller);
  if (over) trace(w, TRACE_WAITED, f.lane.linear, caller, b.number, phase >> 63, awaited);
  return over;
}

}  // extern "C"
