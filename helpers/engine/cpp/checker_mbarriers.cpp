// mbarriers in a checked run: which threads may use one, and what its phases order.
#include "books.h"

namespace {

MbarrierBooks& mbarrier_books(unsigned number, unsigned rank = own_rank) {
  need_clocks();
  std::vector<MbarrierBooks>& all = books_of(rank).mbarriers;
  if (number >= all.size()) all.resize(number + 1);
  return all[number];
}

// A finding about an mbarrier and its initialisation.
void report_mbarrier(int kind, const MbarrierBooks& b, unsigned rank, const void* caller) {
  for (uint32_t i = 0; i < books.regions.size(); ++i) {
    const Region& r = books.regions[i];
    if (!r.is_shared() || b.word < r.begin || b.word >= r.end) continue;
    const uint32_t site = site_for(b.pc, i, 8, WRITE, ATOMIC);
    const How how = kind == ENGINE_NO_PROXY_FENCE ? SIGNAL : ATOMIC;  // findings.py recognises an mbarrier by it
    report(
        kind, i, b.word, 8, (uintptr_t)caller, current.thread, false, tag_of(b.epoch, b.thread, how, rank), site, true,
        how);
    return;
  }
}

// The running thread contributes to the next phase, by an arrival or a copy: that can only end after what it knows.
void know_waits(MbarrierBooks& b, unsigned rank) {
  const auto knows = [](Tag before) { return before && ordered(before, current.thread); };
  for (unsigned t = 0; t < b.awaited.size(); ++t) {
    Awaited& a = b.awaited[t];
    a.is_known = a.is_known || !a.epoch || knows(tag_of(a.epoch, t, PLAIN, rank)) || knows(a.product) || knows(a.copy);
  }
}

// The running thread issues a product or a copy, after all that it has waited for.
void note_issue(Tag Awaited::* what, Tag issued) {
  for (unsigned number : books.waited_since[current.thread]) {
    std::vector<Awaited>& awaited = books.mbarriers[number].awaited;  // empty if that phase is long over
    if (!awaited.empty() && !(awaited[current.thread].*what)) awaited[current.thread].*what = issued;
  }
}

}  // namespace

void check_mbarrier_init(unsigned number, const void* word, const void* caller) {
  if (!books.running) return;
  MbarrierBooks& b = mbarrier_books(number);
  b = MbarrierBooks();
  b.word = (uintptr_t)word;
  b.is_initialised = true;
  b.thread = current.thread;
  b.epoch = books.epoch++;
  know_callers(b.pc = (uintptr_t)caller);
}

void check_mbarrier_use(unsigned number, unsigned rank, const void* caller, bool by_copy) {
  if (!books.running) return;
  const MbarrierBooks& b = mbarrier_books(number, rank);
  if (!b.is_initialised) return;
  // A fence.mbarrier_init before barrier.cluster tells of it, though the arrival there may be a relaxed one.
  const bool has_met = b.is_known && !books.has_begun.empty() && books.has_begun[current.thread] == ~0u;
  const bool is_in_order = has_met || ordered(tag_of(b.epoch, b.thread, PLAIN, rank), current.thread);
  if (!is_in_order) report_mbarrier(ENGINE_RACE, b, rank, caller);
  else if (by_copy && !b.is_fenced) report_mbarrier(ENGINE_NO_PROXY_FENCE, b, rank, caller);
}

void check_mbarrier_arrive(unsigned number, unsigned rank, const void* caller) {
  if (!books.running) return;
  MbarrierBooks& b = mbarrier_books(number, rank);
  know_waits(b, rank);
  b.arrived = current.thread;
  b.arrived_block = books.block;
  know_callers(b.arrived_pc = (uintptr_t)caller);
  leave_knowledge(b.arriving, current.thread);
  ++books.epoch;
}

void check_mbarrier_wait(unsigned number, const void* caller) {
  if (!books.running) return;
  MbarrierBooks& b = mbarrier_books(number);
  take_knowledge(current.thread, b.over);
  b.awaited.resize(books.clocks.size());
  b.awaited[current.thread] = {books.epoch, (uintptr_t)caller};
  know_callers((uintptr_t)caller);
  std::vector<unsigned>& since = books.waited_since[current.thread];
  if (std::find(since.begin(), since.end(), number) == since.end()) since.push_back(number);
}

// All warps of a warpgroup issue a product, so who has waited for it knows what they had waited for.
void check_product_part(uint64_t epoch) {
  note_issue(&Awaited::product, tag_of(epoch, PRODUCTS + current.thread / 128, PLAIN));
  books.waited_since[current.thread].clear();
}

void check_peer_gone(const void* word, const void* caller) {
  if (!books.running) return;
  const uint32_t index = region_of((uintptr_t)word, 8);
  if (index < books.regions.size())
    report(ENGINE_ENDED, index, (uintptr_t)word, 8, (uintptr_t)caller, current.thread, true);
}

void check_phase_end(unsigned number, unsigned rank, unsigned bytes_left, const void* caller) {
  if (!books.running) return;
  MbarrierBooks& b = mbarrier_books(number, rank);
  b.over = b.arriving;
  for (unsigned t = 0; t < b.awaited.size(); ++t) {
    const Awaited& a = b.awaited[t];
    if (!a.epoch || a.is_known) continue;
    EngineFinding f = finding_at(ENGINE_OVERTAKEN, nullptr, 0);
    f.pc = a.pc;
    f.thread = t;
    f.block = block_of(tag_of(a.epoch, t, PLAIN, rank));
    f.other_pc = b.arrived_pc;
    f.other_thread = b.arrived;
    f.other_block = b.arrived_block;
    add_finding(f, (f.pc * 31 + f.other_pc) * 32 + ENGINE_OVERTAKEN);
  }
  b.awaited.clear();
  if (!bytes_left) return;
  const Tag sent = tag_of(IN_FLIGHT, agent_of_loads(number), PLAIN, rank);
  EngineFinding f = finding_at(ENGINE_BYTES, nullptr, 0);
  f.offset = bytes_left;
  f.pc = (uint64_t)(uintptr_t)caller;
  f.block = block_of(sent);
  f.thread = asker(sent);
  f.is_write = 1;
  add_finding(f, f.pc * 32 + ENGINE_BYTES);
}

void check_proxy_fence(bool of_mbarriers) {
  if (!books.running) return;
  need_clocks();
  for (MbarrierBooks& b : books.mbarriers) b.is_fenced = b.is_fenced || b.thread == current.thread;
  if (!of_mbarriers) books.proxy_fences[current.thread].push_back(books.epoch);
  ++books.epoch;
}
