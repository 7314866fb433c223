// Clocks: order by mbarriers, by named barriers of some threads, and between threads and the units that work
// asynchronously (products of warpgroups, copies by TMA).
//
// Each thread has a clock: for every other one, up to which epoch it knows what that one did. A thread that arrives
// leaves what it knows; a thread that has waited takes it up. Barriers of the whole block and of warps pass clocks on.
#include "books.h"

namespace {

// The threads of a block and its agents; in a cluster, those of each of its blocks.
unsigned own_slots() { return (unsigned)books.warp_epoch.size() * 32 + AGENTS; }
unsigned slots() { return own_slots() * books.cluster; }
unsigned slot_of_thread(unsigned thread, unsigned rank = own_rank) {
  const unsigned first = rank * own_slots();
  return first + (is_agent(thread) ? (unsigned)books.warp_epoch.size() * 32 + thread - PRODUCTS : thread);
}
unsigned slot_of(Tag t) { return slot_of_thread(thread_of(t), rank_of(t)); }

// Of a block of the cluster that runs; those that do not run keep theirs.
BlockBooks& books_of(unsigned rank) {
  if (rank == own_rank) return books;
  return *(BlockBooks*)member(here(), rank).books;
}

// They are made when the first mbarrier, copy or product comes.
void need_clocks(BlockBooks& of) {
  if (!of.clocks.empty()) return;
  of.clocks.assign(books.warp_epoch.size() * 32, {});
  of.everyone.assign(slots(), 0);
  of.named.assign(16, Clock(slots(), 0));
  of.sent_by.assign(AGENTS, 0);
  of.proxy_fences.assign(books.warp_epoch.size() * 32, {});
  of.waited_since.assign(books.warp_epoch.size() * 32, {});
}

Clock& clock_of(unsigned thread) {
  Clock& mine = books.clocks[thread];
  if (mine.empty()) mine.assign(slots(), 0);
  return mine;
}

void raise(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

// Everything that threads left there, to a thread that has waited for them.
void take_knowledge(unsigned thread, const Clock& from) {
  raise(clock_of(thread), from);
  if (!from.known.empty()) learn(books.known_to[thread], from.known);
}

// Everything that a thread knows now.
void leave_knowledge(Clock& to, unsigned thread) {
  if (to.empty()) to.assign(slots(), 0);
  acquire(thread);
  learn(to.known, books.known);
  const auto acquired = books.known_to.find(thread);
  if (acquired != books.known_to.end()) learn(to.known, acquired->second);
  const unsigned n = (unsigned)books.warp_epoch.size() * 32, warp = thread / 32, own = slot_of_thread(0);
  const uint64_t barrier = books.barrier_epoch - 1, own_warp = std::max(barrier, books.warp_epoch[warp] - 1);
  for (unsigned i = 0; i < n; ++i) to[own + i] = std::max(to[own + i], i / 32 == warp ? own_warp : barrier);
  const auto& lanes = books.lane_epochs[warp];
  for (unsigned lane = 0; lane < 32 && !lanes.empty(); ++lane)
    if (const uint64_t met = lanes[thread % 32 * 32 + lane])
      to[own + warp * 32 + lane] = std::max(to[own + warp * 32 + lane], met - 1);
  raise(to, books.everyone);
  if (!books.clocks[thread].empty()) raise(to, books.clocks[thread]);
  to[own + thread] = books.epoch;
  tell(thread);
}

// What a thread did before its last fence of the device, and what it knew then: a relaxed arrival releases that.
void leave_what_is_fenced(Clock& to, unsigned thread) {
  if (books.fences[0].empty() || !books.fences[0][thread].epoch) return;
  if (to.empty()) to.assign(slots(), 0);
  const Fence& fence = books.fences[0][thread];
  const unsigned n = (unsigned)books.warp_epoch.size() * 32, warp = thread / 32, own = slot_of_thread(0);
  const uint64_t barrier = fence.barrier_epoch - 1, own_warp = std::max(barrier, fence.warp_epoch - 1);
  for (unsigned i = 0; i < n; ++i) to[own + i] = std::max(to[own + i], i / 32 == warp ? own_warp : barrier);
  to[own + thread] = std::max(to[own + thread], fence.epoch);
}

uint64_t clocked(unsigned thread, unsigned slot) {
  if (books.clocks.empty()) return 0;
  const Clock& mine = books.clocks[thread];
  return std::max(books.everyone[slot], mine.empty() ? 0 : mine[slot]);
}

// The lanes of a warp have met: all of them know what one knows.
void join_clocks(unsigned warp, unsigned mask) {
  if (books.clocks.empty()) return;
  Clock all;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) && !books.clocks[warp * 32 + lane].empty()) raise(all, books.clocks[warp * 32 + lane]);
  if (all.empty()) return;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) books.clocks[warp * 32 + lane] = all;
}

void join_all_clocks() {
  for (Clock& one : books.clocks) {
    if (!one.empty()) raise(books.everyone, one);
    one.clear();
  }
}

}  // namespace

void check_named_arrival(unsigned number) {
  need_clocks();
  leave_knowledge(books.named[number], current.thread);
  ++books.epoch;
}
void check_named_departure(unsigned number, unsigned thread) { take_knowledge(thread, books.named[number]); }
void check_named_over(unsigned number) { books.named[number] = Clock(slots(), 0); }
