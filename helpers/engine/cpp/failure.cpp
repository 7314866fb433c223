// How a block is given up from inside: the failure with its details, and the way out of its fibers to the worker.
//
// The words are Python's (failures.py). Nothing here returns to the kernel: fibers are left where
// they are, so no destructor runs in them, and containers that hold memory are emptied by hand first.
#include "worker.h"

namespace {

void copy_text(char* to, size_t bytes, const char* from) { snprintf(to, bytes, "%s", from ? from : ""); }

// Of a deadlock: what each thread waits for, a line each, see tell_waits. Of the failure to be recorded next; of the one
// that has been recorded, under the pool's mutex.
thread_local std::string waits;
std::string recorded_waits;

// The failure of the lowest block is reported, so a failing launch reports the same every time.
void record(const EngineFailure& failure) {
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->failure.reason != NONE && failure.block >= pool->failure.block) return;
  pool->failure = failure;
  recorded_waits.swap(waits);
  waits.clear();
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

// The same with the place in the code, by which Python finds the caller of a header's function.
EngineFailure failure_from(const Worker& w, FailureReason reason, const char* file, int line, const void* caller) {
  EngineFailure f = failure_at(w, reason, file, line);
  f.place = place_in_kernel((uintptr_t)caller - 1);
  return f;
}

[[noreturn]] void fail(Worker& w, const EngineFailure& failure) {
  w.critical++;  // an interrupt in here would leave the pool's mutex locked for ever
  record(failure);
  leave_block(w);
}

// STATED, in a function that the kernel called and whose line is not known.
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

// Where a fiber waits, as one line of a list: empty where it does not. Of
// @line/place@ Python makes the line where a header's function is called, by the place in the code; of #address# the
// mbarrier's name.
std::string waiting_place(Worker& w, const Fiber& f) {
  char text[200] = "", at[64];
  const int line = f.collective ? f.collective->line : f.line;
  snprintf(at, sizeof at, "line %d", line);
  if (f.mbarrier || f.group_name || f.at_cluster)
    snprintf(at, sizeof at, "line @%d/%llx@", line, (unsigned long long)place_in_kernel((uintptr_t)f.caller - 1));
  if (f.collective) {
    snprintf(text, sizeof text, "%s, %s", f.collective->name, at);
  } else if (f.mbarrier) {
    snprintf(
        text, sizeof text, "#%llx#, parity %d, %s", (unsigned long long)(uintptr_t)f.mbarrier, (int)(f.phase >> 63),
        at);
  } else if (f.group_name) {
    snprintf(text, sizeof text, "%s %u, %s", f.group_name, f.group_value, at);
  } else if (f.named >= 0) {
    snprintf(
        text, sizeof text, "bar.sync %d (%u of %u threads have come), %s", f.named, w.named_arrived[f.named],
        w.named_expected[f.named], at);
  } else if (f.at_cluster) {
    snprintf(text, sizeof text, "barrier.cluster, %s", at);
  } else if (f.at_barrier) {
    snprintf(text, sizeof text, "__syncthreads(), %s", at);
  }
  return text;
}

// All waiting threads, neighbours in the same place together, and the warps that have left the kernel.
void list_waiting(Worker& w, EngineFailure& failure) {
  std::string all;
  auto place_of = [&](unsigned thread) {
    const Fiber& f = w.fibers[thread];
    return f.finished ? std::string() : waiting_place(w, f);
  };
  auto has_left = [&](unsigned warp) { return w.alive[warp] == 0; };
  for (unsigned i = 0; i < w.n_threads;) {
    const std::string place = place_of(i);
    const bool left = has_left(i / WARP);
    unsigned end = i + 1;
    while (end < w.n_threads && place_of(end) == place && has_left(end / WARP) == left) ++end;
    const unsigned first = i / WARP, last = (end - 1) / WARP;
    const bool whole = i % WARP == 0 && (end % WARP == 0 || end == w.n_threads), many = end - i > (whole ? WARP : 1);
    if (left || !place.empty()) {
      char who[64];
      const char* const unit = whole ? "warp" : "thread";
      if (many) snprintf(who, sizeof who, "%ss %u to %u: ", unit, whole ? first : i, whole ? last : end - 1);
      else snprintf(who, sizeof who, "%s %u: ", unit, whole ? first : i);
      all += (all.empty() ? "" : "; ") + (who + (left ? many ? "have left the kernel" : "has left the kernel" : place));
    }
    i = end;
  }
  copy_text(failure.message, sizeof failure.message, all.c_str());
}

void tell(std::string& all, const char* format, ...) {
  char text[700];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  all += text;
}

// What a thread waits for, as fields between tabs: kind, object, value, line, place in the code, file.
std::string wait_of(const Fiber& f) {
  std::string fields;
  auto place = [&](int line, const void* caller, const char* file) {
    tell(fields, "%d\t%llx\t%s", line, caller ? (unsigned long long)place_in_kernel((uintptr_t)caller - 1) : 0, file);
  };
  if (f.finished) return "left\t\t\t0\t0\t";
  if (f.collective) {
    tell(fields, "lanes\t%s\t%x\t", f.collective->name, f.collective->mask);
    place(f.collective->line, nullptr, f.collective->file);
  } else if (f.mbarrier) {
    tell(fields, "mbarrier\t%llx\t%d\t", (unsigned long long)(uintptr_t)f.mbarrier, (int)(f.phase >> 63));
    place(f.line, f.caller, f.file);
  } else if (f.group_name) {
    tell(fields, "group\t%s\t%u\t", f.group_name, f.group_value);
    place(f.line, f.caller, f.file);
  } else if (f.named >= 0) {
    tell(fields, "named\t%d\t0\t", f.named);
    place(f.line, nullptr, f.file);
  } else if (f.at_cluster) {
    tell(fields, "cluster\t\t0\t");
    place(f.line, f.caller, f.file);
  } else if (f.at_barrier) {
    tell(fields, "block\t\t0\t");
    place(f.line, nullptr, f.file);
  } else {
    return "runs\t\t\t0\t0\t";
  }
  return fields;
}

// All that is known of who waits for whom, for waits.py, which makes sentences of it.
void tell_waits(Worker& w) {
  waits.clear();
  auto threads_of = [](Block& b, const std::string& kind) {
    for (unsigned i = 0; i < b.n_threads;) {
      const std::string fields = wait_of(b.fibers[i]);
      unsigned end = i + 1;
      while (end < b.n_threads && wait_of(b.fibers[end]) == fields) ++end;
      tell(waits, "%s\t%u\t%u\t%s\n", kind.c_str(), i, end - 1, fields.c_str());
      i = end;
    }
  };
  threads_of(w, "threads");
  for (unsigned rank = 0; rank < w.cluster.size; ++rank)
    if (rank != w.rank) threads_of(member(w, rank), "peer\t" + std::to_string(rank));
  const ClusterBarrier& barrier = member(w, 0).cluster_barrier;
  tell(waits, "cluster\t%u\t%u\t%u\n", w.rank, barrier.arrived, barrier.alive);
  for (const Mbarrier& b : w.mbarriers) {
    const uint64_t state = state_of(b.word);
    if (state == ~0ull) continue;  // not initialised
    const History& history = history_of(w, b);
    const unsigned long long word = (unsigned long long)(uintptr_t)b.word;
    tell(
        waits, "mbarrier\t%llx\t%u\t%u\t%lld\t%d\t%llu\n", word, (unsigned)(state & COUNT),
        (unsigned)(state >> EXPECTED & COUNT), (long long)bytes_of(state), (int)(state >> 63),
        (unsigned long long)history.ended);
    for (const Arrivals& a : history.arrivals)
      tell(
          waits, "arrived\t%llx\t%u\t%u\t%x\t%x\t%llu\t%d\t%d\t%llx\t%s\n", word, a.rank, a.warp, a.lanes,
          a.phase == history.ended ? a.lanes_now : 0, (unsigned long long)a.count, (int)a.of_bytes, a.line,
          (unsigned long long)place_in_kernel((uintptr_t)a.caller - 1), a.file);
  }
  for (unsigned open = w.named_open; open; open &= open - 1) {
    const unsigned number = (unsigned)__builtin_ctz(open);
    tell(waits, "named\t%u\t%u\t%u", number, w.named_arrived[number], w.named_expected[number]);
    for (unsigned warp = 0; warp < w.n_warps; ++warp)
      tell(waits, "\t%x", w.named_warps[number] >> warp & 1 ? w.named_lanes[number][warp] : 0);
    tell(waits, "\n");
  }
  for (unsigned i = 0; i * GROUP < w.n_threads; ++i)
    tell(
        waits, "group\t%u\t%u\t%u\t%d\t%u\n", i, w.warpgroups[i].arrived, w.warpgroups[i].registers,
        (int)w.warpgroups[i].is_short, w.pool);
}

// No fiber can run and not all have ended: report which threads wait where, and for which others in vain.
[[noreturn]] void diagnose_stuck(Worker& w) {
  // Of a cluster, a block tells it that waits for more than barrier.cluster.
  auto only_for_cluster = [](const Block& b) {
    for (unsigned i = 0; i < b.n_threads; ++i)
      if (!b.fibers[i].finished && !b.fibers[i].at_cluster) return false;
    return true;
  };
  for (unsigned rank = 0; rank < w.cluster.size && only_for_cluster(w); ++rank)
    if (!member(w, rank).ended && !only_for_cluster(member(w, rank))) change_to(w, rank);
  tell_waits(w);
  Fiber *at_collective = nullptr, *at_named = nullptr, *at_mbarrier = nullptr, *in_group = nullptr,
        *at_cluster = nullptr;
  // Where all have arrived and the bytes are not those that were expected, that is what is wrong.
  auto lacks_bytes = [](const Fiber& f) {
    const uint64_t state = state_of(f.mbarrier);
    return (state & COUNT) == 0 && bytes_of(state) != 0;
  };
  auto is_short = [&](const Fiber& f) { return w.warpgroups[f.lane.linear / GROUP].is_short; };
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber& f = w.fibers[i];
    if (f.collective && !at_collective) at_collective = &f;
    else if (f.mbarrier && (!at_mbarrier || (lacks_bytes(f) && !lacks_bytes(*at_mbarrier)))) at_mbarrier = &f;
    else if (f.group_name && (!in_group || (is_short(f) && !is_short(*in_group)))) in_group = &f;
    else if (f.named >= 0 && !at_named) at_named = &f;
    else if (f.at_cluster && !at_cluster) at_cluster = &f;
  }
  if (in_group && is_short(*in_group))
    at_collective = at_mbarrier = nullptr;  // others wait for the threads that wait for registers
  // A warp that waits for a lane says more than a barrier that waits for that warp, so it comes first.
  if (at_collective) {
    const Collective& c = *at_collective->collective;
    w.current = at_collective;
    EngineFailure failure = failure_at(w, LANES_NEVER_COME, c.file, c.line);
    copy_text(failure.name, sizeof failure.name, c.name);
    failure.mask = c.mask;
    failure.static_base = (uint64_t)w.static_base;
    failure.dynamic_base = (uint64_t)w.dynamic;
    failure.dynamic_size = pool->launch.dynamic_shared;
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
      const char* const name = other          ? other->name
                               : f.mbarrier   ? "a wait for an mbarrier"
                               : f.group_name ? f.group_name
                               : f.named >= 0 ? "bar.sync"
                               : f.at_cluster ? "barrier.cluster"
                                              : "__syncthreads()";
      copy_text(failure.other_name, sizeof failure.other_name, name);
      set_other_place(failure, other ? other->file : f.file, other ? other->line : f.line);
    }
    fail(w, failure);
  }
  auto begin = [&](Fiber* f, FailureReason reason) {
    w.current = f;
    EngineFailure failure = failure_at(w, reason, f->file, f->line);
    if (f->mbarrier || f->group_name || f->at_cluster) failure.place = place_in_kernel((uintptr_t)f->caller - 1);
    failure.static_base = (uint64_t)w.static_base;
    failure.dynamic_base = (uint64_t)w.dynamic;
    failure.dynamic_size = pool->launch.dynamic_shared;
    list_waiting(w, failure);
    return failure;
  };
  if (at_mbarrier) {
    EngineFailure failure = begin(at_mbarrier, MBARRIER_STARVED);
    const uint64_t state = state_of(at_mbarrier->mbarrier);
    failure.address = (uint64_t)at_mbarrier->mbarrier;
    failure.number = (unsigned)(at_mbarrier->phase >> 63);
    failure.count = (unsigned)(state & COUNT);
    failure.other_count = (unsigned)(int)bytes_of(state);
    fail(w, failure);
  }
  if (in_group) {
    const Warpgroup& g = w.warpgroups[in_group->lane.linear / GROUP];
    EngineFailure failure = begin(in_group, g.is_short ? REGISTERS_STARVED : WARPGROUP_STARVED);
    copy_text(failure.name, sizeof failure.name, in_group->group_name);
    failure.number = in_group->group_value;
    failure.count = g.is_short ? w.pool : g.arrived;
    failure.other_count = g.registers;
    fail(w, failure);
  }
  if (!at_named && at_cluster) {
    EngineFailure failure = begin(at_cluster, CLUSTER_STARVED);
    failure.count = member(w, 0).cluster_barrier.arrived;
    failure.other_count = member(w, 0).cluster_barrier.alive;
    fail(w, failure);
  }
  // A barrier of the block cannot be what is left: it releases its threads as soon as all live ones have arrived.
  EngineFailure failure = begin(at_named, NAMED_BARRIER_STARVED);
  failure.number = (unsigned)at_named->named;
  failure.count = w.named_arrived[at_named->named];
  failure.other_count = w.named_expected[at_named->named];
  fail(w, failure);
}

// Where the current fiber was when the watchdog had waited long enough.
void note_expired(Worker& w, EngineFailure& f, uintptr_t pc) {
  memset(&f, 0, sizeof f);
  f.reason = EXPIRED;
  f.block = w.block;
  f.thread = w.current->lane.linear;
  f.place = place_in_kernel(pc);
  // Behind a signal's frame nothing may be found: then where the thread was when it last let others run.
  if (!f.place && w.current->preempted) f.place = place_in_kernel(w.current->preempted);
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

extern "C" {

// Of the last launch's failure, if it is a deadlock; the caller copies it before the next launch.
const char* engine_waits() { return recorded_waits.c_str(); }

}  // extern "C"
