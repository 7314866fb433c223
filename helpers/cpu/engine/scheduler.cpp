// Which fiber of a block runs next, and what a fiber is from its first instruction to its end.
//
// A fiber runs until it waits, so the order of events in a block is the same every time. A warp-wide operation belongs
// here too: its last lane runs it, and who is last depends on who can still run.
#include "worker.h"

namespace {

// Null: nobody can run.
Fiber* next_ready(Worker& w) {
  // Stay in the warp while one of its lanes can run: its data are warm, and collectives complete early.
  for (unsigned i = 0, at = w.warp; i < w.n_warps; ++i, at = at + 1 == w.n_warps ? 0 : at + 1) {
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

// Nobody can run: lanes that asked who is active have their answer now, by warp and source line.
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

void set_current(Worker& w, Fiber* to) {
  w.current = to;
  if (checking()) check_switch(to->lane.linear, to->stack + STACK_BYTES - stack_offset(to->lane.linear));
}

// The current fiber waits or has ended: continue with another, or with the block's end.
void schedule(Worker& w) {
  Fiber *from = w.current, *to = next_ready(w);
  // Without this look, a block that does little but switch would be in the engine's own code at nearly every interrupt,
  // and go on. Relaxed: no data hang on it, and seen late it costs one more turn.
  if (pool->cancelled.load(std::memory_order_relaxed)) leave_cancelled(w);
  if (!to && w.finished < w.n_threads) {
    if (!release_activemask(w)) diagnose_stuck(w);
    to = next_ready(w);
  }
  if (to == from) return;
  if (!to) {
    w.in_fiber = false;
    switch_to(from->context, w.main);
    return;
  }
  set_current(w, to);
  switch_to(from->context, to->context);
}

void set_waiting(Worker& w, Fiber& f) { w.ready[f.lane.linear / WARP] &= ~(1u << (f.lane.linear % WARP)); }

// Run the operation of the lanes that wait with `mask`, if none that can still come is missing.
void try_collective(Worker& w, unsigned warp, unsigned mask) {
  if (mask & w.ready[warp]) return;  // somebody can still run and come
  Collective* lanes[WARP] = {};
  unsigned arrived = 0;
  for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane) {
    Collective* c = w.fibers[warp * WARP + lane].collective;
    if (c && c->mask == mask) {
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
    check_collective();
    check_merge_warp(warp, w.n_threads, w.paused[warp]);
    // A shuffle is no fence: were it taken for one, a missing __syncwarp would go unseen.
    if (first->is_barrier) check_warp_sync(warp, arrived);
  }
  first->run(lanes, arrived);
  for (unsigned lane = 0; lane < WARP; ++lane)
    if (lanes[lane]) w.fibers[warp * WARP + lane].collective = nullptr;
  w.ready[warp] |= arrived;
}

// Where each fiber begins. It is never returned from: the stack holds no frame to return to.
void fiber_main() {
  Worker& w = here();
  w.critical--;
  pool->launch.run(pool->launch.args);
  w.critical++;
  Fiber& f = *w.current;
  unsigned warp = f.lane.linear / WARP;
  leave_copies(f);
  f.finished = true;
  w.finished++;
  set_waiting(w, f);
  w.alive[warp] &= ~(1u << (f.lane.linear % WARP));
  // Lanes that only waited for this one go on without it, as on a GPU.
  for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane)
    if (Collective* c = w.fibers[warp * WARP + lane].collective) try_collective(w, warp, c->mask);
  schedule(w);
  __builtin_unreachable();
}

}  // namespace
