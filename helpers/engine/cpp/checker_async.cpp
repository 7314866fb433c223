// Asynchronous copies in the books.
//
// A cp.async writes at some time between its issue and its wait. At its issue it is checked as a write is, so that a
// thread which may still be reading the old data is a race. Until the wait its target is in flight: no thread may touch
// it. With the wait it is a write of this thread at that time, so that other threads need a barrier after it.
//
// A load by TMA is the same, up to the end of a phase of its mbarrier: then it is a write of an agent (books.h), which
// who waits for that phase knows. Stores by TMA and products of warpgroups read as agents do, from their issue on: who
// waits for them knows that they are done, and hands it on where it arrives. Between ordinary writes and such a read
// there has to be a fence.proxy.async as well.
#include "books.h"

void check_async_issue(void* target, unsigned bytes, void* caller, void* frame) {
  const unsigned thread = current.thread;
  access_first((uintptr_t)target, bytes, WRITE, PLAIN, (uintptr_t)caller, frame);
  settle_same_value(true);  // its value is not there yet to compare
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    cell.write = tag_of(IN_FLIGHT, thread, PLAIN);
    cell.read = cell.other_read = 0;  // compared with this write; the next access compares again
  });
}

void check_async_landed(void* target, unsigned bytes) {
  const Tag now = tag_of(books.epoch, current.thread, PLAIN);
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    if (cell.write == tag_of(IN_FLIGHT, thread_of(now), PLAIN)) cell.write = now;
  });
}

void check_async_left(void* target, unsigned bytes, void* caller) {
  check_async_landed(target, bytes);
  for (uint32_t i = 0; i < books.regions.size(); ++i) {
    const Region& r = books.regions[i];
    if ((uintptr_t)target < r.begin || (uintptr_t)target >= r.end) continue;
    report(ENGINE_NEVER_WAITED, i, (uintptr_t)target, bytes, (uintptr_t)caller, current.thread, true);
    return;
  }
}

namespace {

// What TMA and wgmma access is counted in bytes: a warp's requests are those of its own loads and stores.
struct NoProfile {
  const bool before = profile.running;
  NoProfile() { profile.running = false; }
  ~NoProfile() { profile.running = before; }
};

template <typename F>
void for_pieces(void* begin, unsigned bytes, F piece) {
  for (unsigned i = 0; i < bytes;) {
    unsigned size = 16;
    while (size > 1 && (size > bytes - i || ((uintptr_t)begin + i) % size)) size /= 2;
    piece((uintptr_t)begin + i, size);
    i += size;
  }
}

struct LastRead {
  uintptr_t pc = 0;
  uint32_t region = 0, site = 0;
  Tag write = 0;  // that was found in order
};

// Whether a fence for other units came after a write, by its writer, and in order before `thread` goes on. A fence by
// another thread makes nothing of it visible, also behind a barrier.
bool is_fenced(Tag write, unsigned thread) {
  const unsigned writer = thread_of(write), rank = rank_of(write);
  const auto& every = books_of(rank).proxy_fences;
  if (every.empty()) return false;
  const auto first = std::lower_bound(every[writer].begin(), every[writer].end(), epoch_of(write));
  return first != every[writer].end() && ordered(tag_of(*first, writer, PLAIN, rank), thread);
}

// A read by an agent, for the thread that runs: its data have to be there, in order, and visible to other units.
void agent_reads(uintptr_t a, unsigned size, unsigned agent, uintptr_t pc, LastRead& last, unsigned rank = own_rank) {
  if (last.pc != pc || a < books.regions[last.region].begin || a + size > books.regions[last.region].end) {
    uint32_t i = 0;
    while (i < books.regions.size() && !(a >= books.regions[i].begin && a + size <= books.regions[i].end)) ++i;
    if (i == books.regions.size()) return;
    last = {pc, i, site_for(pc, i, size, READ, PLAIN), 0};
  }
  Region& r = books.regions[last.region];
  books.sites[last.site].count += (size + books.sites[last.site].size - 1) / books.sites[last.site].size;
  if (r.cells.empty()) return;
  const unsigned thread = current.thread;
  const Tag mine = tag_of(books.epoch, agent, PLAIN, rank);
  for (size_t i = (a - r.begin) >> r.shift; i <= (a + size - 1 - r.begin) >> r.shift; ++i) {
    Cell& cell = r.cells[i];
    if (!last.write || cell.write != last.write) {
      const unsigned writer = thread_of(cell.write);
      const uint64_t epoch = epoch_of(cell.write);
      bool fine = false;
      if (epoch == IN_FLIGHT)
        report(ENGINE_IN_FLIGHT, last.region, a, size, pc, thread, false, cell.write, cell.write_site, true);
      else if (r.is_shared() && epoch < r.since) report(ENGINE_UNINITIALISED, last.region, a, size, pc, thread, false);
      else if (cell.write && !ordered(cell.write, thread))
        report(ENGINE_RACE, last.region, a, size, pc, thread, false, cell.write, cell.write_site, true);
      else if (!is_agent(writer) && r.is_shared() && !is_fenced(cell.write, thread))
        report(ENGINE_NO_PROXY_FENCE, last.region, a, size, pc, thread, false, cell.write, cell.write_site, true);
      else fine = true;
      if (fine) last.write = cell.write;
    }
    remember_read(cell, mine, last.site);
  }
}

LastRead last_read;

}  // namespace

void check_mbarrier_write(void* word, void* caller, void* frame) {
  access_first((uintptr_t)word, 8, WRITE, ATOMIC, (uintptr_t)caller, frame);
}

void check_tensor_issue(void* target, unsigned bytes, unsigned mbarrier, unsigned rank, void* caller, void* frame) {
  if (!books.running) return;
  const NoProfile quiet;
  const unsigned agent = agent_of_loads(mbarrier);
  need_clocks();
  need_clocks(books_of(rank));
  books_of(rank).sent_by[agent - PRODUCTS] = current.thread | own_rank << 16;
  know_waits(mbarrier_books(mbarrier, rank), rank);
  note_issue(&Awaited::copy, tag_of(books.epoch, agent, PLAIN, rank));
  for_pieces(target, bytes, [&](uintptr_t a, unsigned size) {
    access_first(a, size, WRITE, PLAIN, (uintptr_t)caller, frame);
    settle_same_value(true);
  });
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    cell.write = tag_of(IN_FLIGHT, agent, PLAIN, rank);
    cell.read = cell.other_read = 0;
  });
  last_read = {};
}

void check_tensor_landed(void* target, unsigned bytes, unsigned mbarrier, unsigned rank) {
  if (!books.running) return;
  const unsigned agent = agent_of_loads(mbarrier);
  MbarrierBooks& b = mbarrier_books(mbarrier, rank);
  for_cells((uintptr_t)target, bytes, [&](Cell& cell) {
    if (cell.write == tag_of(IN_FLIGHT, agent, PLAIN, rank)) cell.write = tag_of(books.epoch, agent, PLAIN, rank);
  });
  if (b.arriving.empty()) b.arriving.assign(slots(), 0);
  b.arriving[slot_of_thread(agent, rank)] = books.epoch++;
}

// A copy from shared memory to that of another block reads it until it completes, at an mbarrier there.
void check_peer_read(void* from, unsigned bytes, unsigned mbarrier, unsigned rank, void* caller) {
  if (!books.running) return;
  const NoProfile quiet;
  need_clocks();
  last_read = {};
  for_pieces(from, bytes, [&](uintptr_t a, unsigned size) {
    agent_reads(a, size, agent_of_loads(mbarrier), (uintptr_t)caller, last_read, rank);
  });
}

void check_tensor_left(void* shared, unsigned bytes, bool is_load, unsigned thread, unsigned rank, void* caller) {
  for (uint32_t i = 0; i < books.regions.size() && books.running; ++i) {
    const Region& r = books.regions[i];
    if ((uintptr_t)shared < r.begin || (uintptr_t)shared >= r.end) continue;
    if (rank == own_rank) {
      report(ENGINE_NEVER_WAITED, i, (uintptr_t)shared, bytes, (uintptr_t)caller, thread, is_load);
    } else {
      EngineFinding f = finding_at(ENGINE_NEVER_WAITED, nullptr, 0);
      f.region = r.number;
      f.offset = (int64_t)((uintptr_t)shared - r.begin);
      f.size = bytes;
      f.pc = (uintptr_t)caller;
      f.is_write = is_load;
      f.thread = thread;
      f.block = member(here(), rank).block;
      f.of_peer = 1;
      f.owner = books.block;
      add_finding(f, (f.pc * 31 + r.number) * 32 + ENGINE_NEVER_WAITED);
    }
    for_cells((uintptr_t)shared, bytes, [&](Cell& cell) {  // the next block has this memory for itself
      if (epoch_of(cell.write) == IN_FLIGHT) cell.write = tag_of(books.epoch, thread, PLAIN);
    });
    return;
  }
}

void check_tensor_global(void* begin, unsigned bytes, bool is_write, void* caller, bool is_atomic) {
  const NoProfile quiet;
  for_pieces(begin, bytes, [&](uintptr_t a, unsigned size) {
    access_first(a, size, is_write ? WRITE : READ, is_atomic ? ATOMIC : PLAIN, (uintptr_t)caller, nullptr);
  });
}

uint64_t check_store_issue() {
  need_clocks();
  books.sent_by[STORES - PRODUCTS + current.thread / 32] = current.thread | own_rank << 16;
  last_read = {};
  return ++books.epoch;
}

void check_store_read(void* from, unsigned bytes, void* caller) {
  for_pieces(from, bytes, [&](uintptr_t a, unsigned size) {
    agent_reads(a, size, STORES + current.thread / 32, (uintptr_t)caller, last_read);
  });
}

void check_store_wait(uint64_t until) {
  if (!books.running || books.clocks.empty()) return;
  uint64_t& mine = clock_of(current.thread)[slot_of_thread(STORES + current.thread / 32)];
  mine = std::max(mine, until ? until : books.epoch);
  ++books.epoch;
}

void check_store_unseen(void* begin, unsigned bytes) {
  if (!books.running) return;
  const unsigned agent = UNSEEN + current.thread / 32;
  books.sent_by[agent - PRODUCTS] = current.thread | own_rank << 16;
  for_pieces(begin, bytes, [&](uintptr_t a, unsigned size) {
    for_cells(a, size, [&](Cell& cell) { cell.write = tag_of(epoch_of(cell.write), agent, how_of(cell.write)); });
  });
}

void check_store_seen(void* begin, unsigned bytes) {
  if (!books.running) return;
  const unsigned agent = UNSEEN + current.thread / 32;
  for_pieces(begin, bytes, [&](uintptr_t a, unsigned size) {
    for_cells(a, size, [&](Cell& cell) {
      if (thread_of(cell.write) == agent && same_block(cell.write))
        cell.write = tag_of(books.epoch, current.thread, how_of(cell.write));
    });
  });
}

uint64_t check_product_issue(unsigned base, void* caller, bool is_fenced) {
  need_clocks();
  if (!is_fenced) report(ENGINE_NO_PRODUCT_FENCE, NO_REGION, 0, 0, (uintptr_t)caller, current.thread, false);
  books.sent_by[base / 128] = base | own_rank << 16;
  last_read = {};
  return ++books.epoch;
}

void check_product_read(void* from, unsigned base, void* caller) {
  agent_reads((uintptr_t)from, 16, PRODUCTS + base / 128, (uintptr_t)caller, last_read);
}

void check_products_done(unsigned base, uint64_t until) {
  for (unsigned t = 0; t < 128; ++t) {
    uint64_t& known = clock_of(base + t)[slot_of_thread(PRODUCTS + base / 128)];
    known = std::max(known, until);
  }
}

// Seen at the wait, whose place is all that is known then.
void check_sums_written(unsigned thread, void* caller, const void* waits) {
  for (const EngineFinding& known : books.findings)  // by the access itself, whose line is better
    if (known.kind == ENGINE_SUMS_TOUCHED && known.other_pc == (uint64_t)(uintptr_t)caller) return;
  EngineFinding f = finding_at(ENGINE_SUMS_TOUCHED, nullptr, 0);
  f.pc = (uint64_t)(uintptr_t)waits;
  f.thread = f.other_thread = thread;
  f.is_write = 1;
  f.other_pc = (uint64_t)(uintptr_t)caller;
  f.other_block = books.block;
  add_finding(f, (f.pc * 31 + f.other_pc) * 32 + ENGINE_SUMS_TOUCHED);
}

void check_products_left(void* caller) {
  report(ENGINE_NEVER_WAITED, NO_REGION, 0, 0, (uintptr_t)caller, current.thread, true);
}

// The first lane of a warp reports for all.
void check_event(EngineEventKind kind, unsigned thread, unsigned number, uint64_t value, const void* caller) {
  if (!profile.wanted || !books.running || books.events.size() == MOST_STEPS) return;
  know_callers((uintptr_t)caller);
  books.events.push_back({books.block, (uint64_t)(uintptr_t)caller, thread, kind, number, (uint32_t)value});
}
