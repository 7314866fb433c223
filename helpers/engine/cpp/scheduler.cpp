// Which fiber of a block runs next, and what a fiber is from its first instruction to its end.
//
// A fiber runs until it waits, so the order of events in a block is the same every time. A warp-wide operation belongs
// here too: its last lane runs it, and which lane is last depends on which can still run.
#include "worker.h"

namespace {

// In another order than warp after warp: the next of many numbers.
unsigned next_number(Worker& w) {
  w.order ^= w.order << 13;
  w.order ^= w.order >> 7;
  w.order ^= w.order << 17;
  return (unsigned)(w.order >> 20);
}

// Null: no thread can run.
inline Fiber* next_ready(Worker& w) {
  // Stay in the warp while one of its lanes can run: its data are warm, and collectives complete early.
  const unsigned start = w.order ? next_number(w) % w.n_warps : w.warp;
  for (unsigned i = 0, at = start; i < w.n_warps; ++i, at = at + 1 == w.n_warps ? 0 : at + 1) {
    if (!w.ready[at]) {
      if (!w.paused[at]) continue;
      // All lanes of the warp have come as far as they could: their traces are merged.
      check_merge_warp(at, w.n_threads, w.paused[at]);
      w.ready[at] = w.paused[at];
      w.paused[at] = 0;
    }
    w.warp = at;
    return &w.fibers[at * WARP + __builtin_ctz(w.ready[at])];
  }
  return nullptr;
}

// No thread can run: lanes that asked for the active mask get it now, by warp and source line.
bool release_activemask(Worker& w) {
  for (unsigned warp = 0; warp < w.n_warps; ++warp) {
    unsigned group = 0;
    const Fiber* first = nullptr;
    for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane) {
      Fiber& f = w.fibers[warp * WARP + lane];
      if (!f.at_activemask || (first && (f.line != first->line || f.file != first->file))) continue;
      if (!first) first = &f;
      group |= 1u << lane;
    }
    if (!group) continue;
    for (unsigned lane = 0; lane < WARP; ++lane) {
      if (!(group >> lane & 1)) continue;
      Fiber& f = w.fibers[warp * WARP + lane];
      f.at_activemask = false;
      f.predicate = (int)group;
    }
    w.ready[warp] |= group;
    return true;
  }
  return false;
}

inline void set_current(Worker& w, Fiber* to) {
  w.current = to;
  if (checking()) check_switch(to->lane.linear, stack_top(to->stack));
}

// Continue with a fiber; a fresh one begins.
__attribute__((always_inline)) inline void enter(Context& from, Fiber& to) {
  if (__builtin_expect(to.fresh, 0)) {
    to.fresh = false;
    char* const bottom = to.stack + page_bytes();
    prepare(to.context, bottom, (size_t)(stack_top(to.stack) - bottom), fiber_main);
  }
  switch_to(from, to.context);
}

// The current fiber waits or has ended: choose the one to continue with, or null for the block's end.
Fiber* choose_next(Worker& w) {
  if (w.order && next_number(w) % 4 == 0) deliver_some(w);
  Fiber *from = w.current, *to = next_ready(w);
  // Without this look, a block that does little but switch would be in the engine's own code at nearly every interrupt,
  // and go on. Relaxed: no data hang on it, and seen late it costs one more turn.
  if (pool->cancelled.load(std::memory_order_relaxed) && !from->finished) leave_cancelled(w);
  while (!to && w.finished < w.n_threads) {
    if (!release_activemask(w) && !deliver_copies(w) && !wait_for_peers(w, false) && !time_out_waits(w) &&
        !wait_for_peers(w, true))
      diagnose_stuck(w);
    to = next_ready(w);
  }
  return to;
}

inline void go_on(Worker& w, Fiber* to) {
  Fiber* from = w.current;
  if (to == from) return;
  if (!to) {
    w.in_fiber = false;
    switch_to(from->context, w.main);
    return;
  }
  set_current(w, to);
  enter(from->context, *to);
}

void schedule(Worker& w) { go_on(w, choose_next(w)); }

inline void set_waiting(Worker& w, Fiber& f) { w.ready[f.lane.linear / WARP] &= ~(1u << (f.lane.linear % WARP)); }

// All threads that have not left the kernel wait in __syncthreads: they go on, if those of each warp are in the same one.
// A GPU counts the warps that arrive at barrier 0, wherever they stand.
void complete_barrier(Worker& w) {
  Fiber* last = w.current;
  for (unsigned i = 0; !last->at_barrier; ++i) last = &w.fibers[i];  // where an exit completes it
  w.barrier_result = w.barrier_op == BarrierOp::count ? w.barrier_sum
                     : w.barrier_op == BarrierOp::all ? w.barrier_sum == (int)w.arrived
                                                      : w.barrier_sum > 0;
  const Fiber *of_warp = nullptr, *elsewhere = nullptr;
  for (unsigned i = 0; w.barrier_mixed && i < w.n_threads; ++i) {
    Fiber& other = w.fibers[i];
    if (i % WARP == 0) of_warp = nullptr;
    if (!other.at_barrier) continue;
    if (!of_warp) of_warp = &other;
    if (other.line != last->line) elsewhere = &other;
    if (other.line != of_warp->line) {
      w.current = &other;
      EngineFailure failure = failure_at(w, TWO_BARRIERS, of_warp->file, of_warp->line);
      failure.other_thread = of_warp->lane.linear;
      set_other_place(failure, other.file, other.line);
      fail(w, failure);
    }
  }
  // The books first: a thread that goes on would be noted on the old side of the barrier.
  if (checking()) {
    check_merge(w.n_threads);
    check_barrier(last->file, last->line);
    if (elsewhere) check_left(last->file, last->line, 0, elsewhere->lane.linear, elsewhere->line);
    if (w.finished) {
      unsigned gone = 0;
      while (!w.fibers[gone].finished) ++gone;
      check_left(last->file, last->line, w.finished, gone);
    }
  }
  for (unsigned i = 0; i < w.n_warps; ++i) w.ready[i] = w.alive[i];
  w.arrived = w.idle = 0;
  w.progress++;
  w.warp = 0;  // the first warp goes first after every barrier
}

// As many threads have arrived at a barrier with a number as it waits for.
void complete_named(Worker& w, unsigned number) {
  w.named_open &= ~(1u << number);
  // A thread that arrives and does not wait is ordered up to its arrival, and after no other thread.
  const bool whole = w.named_expected[number] == w.n_warps * WARP && !(w.named_split >> number & 1);
  const Fiber* waiting = nullptr;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber& other = w.fibers[i];
    if (other.named != (int)number) continue;
    if (!waiting && checking()) {
      for (unsigned k = 0; k < w.n_warps; ++k) check_merge_warp(k, w.n_threads, w.ready[k] | w.paused[k]);
      check_barrier(other.file, other.line, whole);
    }
    if (!whole && checking()) check_named_departure(number, i);
    waiting = &other;
    other.named = -1;
    w.ready[i / WARP] |= 1u << (i % WARP);
  }
  if (checking()) check_named_over(number);
  w.idle = 0;
  w.progress++;
}

// The current fiber has left the kernel. Whoever waited only for it goes on without it, as on a GPU.
void leave_barriers(Worker& w, unsigned warp, unsigned lane) {
  if (w.arrived && w.arrived == w.n_threads - w.finished) complete_barrier(w);
  for (unsigned open = w.named_open; open; open &= open - 1) {
    const unsigned number = (unsigned)__builtin_ctz(open);
    if (!(w.named_warps[number] >> warp & 1) || (w.named_lanes[number][warp] >> lane & 1)) continue;
    w.named_lanes[number][warp] |= 1u << lane;
    if (++w.named_arrived[number] == w.named_expected[number]) complete_named(w, number);
  }
}

// Run the operation of the lanes that wait with `mask`, if none that can still come is missing.
void try_collective(Worker& w, unsigned warp, unsigned mask) {
  if (mask & w.ready[warp]) return;  // another lane can still run and arrive
  Collective* lanes[WARP] = {};
  unsigned arrived = 0;
  for (unsigned meeting = w.meeting[warp]; meeting; meeting &= meeting - 1) {
    const unsigned lane = (unsigned)__builtin_ctz(meeting);
    Collective* c = w.fibers[warp * WARP + lane].collective;
    if (c->mask == mask) {
      lanes[lane] = c;
      arrived |= 1u << lane;
    }
  }
  if (!arrived || (mask & w.alive[warp]) != arrived) return;
  const Collective* first = lanes[__builtin_ctz(arrived)];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if (!lanes[lane] || lanes[lane]->run == first->run) continue;
    EngineFailure failure = failure_at(w, DIFFERENT_OPERATIONS, lanes[lane]->file, lanes[lane]->line);
    failure.lane = lane;
    copy_text(failure.name, sizeof failure.name, lanes[lane]->name);
    failure.other_lane = (unsigned)__builtin_ctz(arrived);
    copy_text(failure.other_name, sizeof failure.other_name, first->name);
    set_other_place(failure, first->file, first->line);
    fail(w, failure);
  }
  if (checking()) {
    check_collective(first->is_barrier);
    const unsigned rest = w.n_threads - warp * WARP, exist = rest < WARP ? (1u << rest) - 1 : ~0u;
    if (const unsigned gone = mask & exist & ~w.alive[warp])
      check_left(
          first->file, first->line, (unsigned)__builtin_popcount(gone), warp * WARP + (unsigned)__builtin_ctz(gone), 0,
          mask, first->name);
    check_merge_warp(warp, w.n_threads, w.paused[warp]);
    // A shuffle is no fence: were it taken for one, a missing __syncwarp would go unseen.
    if (first->is_barrier) check_warp_sync(warp, arrived);
  }
  first->run(lanes, arrived);
  for (unsigned lane = 0; lane < WARP; ++lane)
    if (lanes[lane]) w.fibers[warp * WARP + lane].collective = nullptr;
  w.meeting[warp] &= ~arrived;
  w.ready[warp] |= arrived;
  w.idle = 0;
}

// Where each fiber begins. It is never returned from: the stack holds no frame to return to.
//
// A thread that follows one that has ended takes over its stack, which is in the cache: so a kernel without barriers
// needs one stack.
void fiber_main() {
  Worker& w = here();
  for (;;) {
    w.critical--;
    pool->launch.run(pool->launch.args);
    w.critical++;
    retire(w);
    Fiber* to = choose_next(w);
    if (!to || !to->fresh) {
      go_on(w, to);
      __builtin_unreachable();
    }
    std::swap(w.current->stack, to->stack);
    to->fresh = false;
    set_current(w, to);
  }
}

// In the midst of the kernel's function.
void end_fiber(Worker& w) {
  retire(w);
  schedule(w);
  __builtin_unreachable();
}

// The current fiber has come to its end.
void retire(Worker& w) {
  Fiber& f = *w.current;
  unsigned warp = f.lane.linear / WARP;
  if (!f.copies.empty()) leave_copies(f);
  if (!f.stores.empty()) leave_stores(f);
  leave_products(w, f);
  f.finished = true;
  trace(w, TRACE_EXIT, f.lane.linear, nullptr);
  w.finished++;
  w.progress++;
  w.idle = 0;
  set_waiting(w, f);
  w.alive[warp] &= ~(1u << (f.lane.linear % WARP));
  // Lanes that only waited for this one go on without it, as on a GPU.
  for (unsigned left = w.meeting[warp]; left; left &= left - 1)
    if (Collective* c = w.fibers[warp * WARP + __builtin_ctz(left)].collective) try_collective(w, warp, c->mask);
  leave_barriers(w, warp, f.lane.linear % WARP);
  leave_cluster_barrier(w, f);
}

}  // namespace
