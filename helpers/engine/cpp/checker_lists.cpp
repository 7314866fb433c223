// The lists of a checked run: sites, and findings of what the parts above judge.
//
// The lowest part: it calls no other.
#include <unwind.h>

#include "books.h"

namespace {

// Of an access that is found the first time, by the thread that runs: where the functions around it return to. Of a
// library's function that the compiler did not inline, the caller's line says more than its own.
void know_callers(uintptr_t pc) {
  const auto added = books.callers.try_emplace(pc);
  if (!added.second) return;
  struct Search {
    uintptr_t pc;
    bool met;
    std::vector<uintptr_t>& found;
  } search = {pc, false, added.first->second};
  auto look = [](_Unwind_Context* frame, void* data) {
    Search* s = (Search*)data;
    const uintptr_t returns_to = (uintptr_t)_Unwind_GetIP(frame);
    if (s->met) s->found.push_back(returns_to);
    s->met = s->met || returns_to == s->pc;
    return s->found.size() < 8 ? _URC_NO_REASON : _URC_END_OF_STACK;
  };
  _Unwind_Backtrace(look, &search);
}

// One for each instruction, region and way of access.
uint32_t site_for(uintptr_t pc, uint32_t region, unsigned size, Kind kind, How how) {
  uint64_t key = (uint64_t)pc * 4096 + region * 4 + kind * 2 + (how == ATOMIC);
  auto found = books.site_index.find(key);
  if (found != books.site_index.end()) return found->second;
  know_callers(pc);
  EngineSite site;
  memset(&site, 0, sizeof site);
  site.pc = pc;
  site.region = region < books.regions.size() ? books.regions[region].number : region;
  site.size = size;
  site.is_write = kind == WRITE;
  site.is_atomic = how == ATOMIC;
  books.sites.push_back(site);
  return books.site_index[key] = (uint32_t)books.sites.size() - 1;
}

// The block of a thread; of an agent, that of the thread that issued.
uint64_t block_of(Tag t) {
  const uint64_t epoch = epoch_of(t);
  if (books.cluster > 1 && epoch >= books.cluster_epoch) {
    const unsigned thread = thread_of(t), rank = rank_of(t);
    return member(here(), is_agent(thread) ? books_of(rank).sent_by[thread - PRODUCTS] >> 16 : rank).block;
  }
  auto after = std::upper_bound(books.block_begins.begin(), books.block_begins.end(), epoch);
  return books.block_numbers[after - books.block_begins.begin() - 1];
}

// The same finding again only counts. key: what makes it the same.
void add_finding(const EngineFinding& f, uint64_t key) {
  auto found = books.finding_index.find(key);
  if (found != books.finding_index.end()) {
    books.findings[found->second].count++;
    return;
  }
  if (f.pc) know_callers((uintptr_t)f.pc);
  books.finding_index[key] = (uint32_t)books.findings.size();
  books.findings.push_back(f);
}

// A finding of the thread that runs, whose place is known.
EngineFinding finding_at(int kind, const char* file, int line) {
  EngineFinding f;
  memset(&f, 0, sizeof f);
  f.kind = kind;
  f.count = 1;
  f.region = ~0u;
  f.block = books.block;
  f.thread = current.thread;
  f.file = file;
  f.line = line;
  return f;
}

// Of an access: the same are the same instructions, in the same region, in the same way.
void report(
    int kind, uint32_t region, uintptr_t address, unsigned size, uintptr_t pc, unsigned thread, bool write, Tag other,
    uint32_t other_site, bool other_write, How how) {
  const uintptr_t other_pc = other ? books.sites[other_site].pc : 0;
  EngineFinding f = finding_at(kind, nullptr, 0);
  f.region = region < books.regions.size() ? books.regions[region].number : region;
  if (region < books.regions.size() && books.regions[region].rank != own_rank && books.regions[region].is_shared()) {
    f.of_peer = 1;
    f.owner = member(here(), books.regions[region].rank).block;
  }
  f.offset = (int64_t)(address - (region < books.regions.size() ? books.regions[region].begin : 0));
  f.size = size;
  f.is_write = write;
  f.pc = pc;
  f.thread = thread;
  if (other) {
    f.other_pc = other_pc;
    f.other_block = block_of(other);
    f.other_thread = asker(other);
    f.other_is_write = other_write;
    f.is_volatile = how >= VOLATILE && how_of(other) >= VOLATILE;
  }
  add_finding(f, (((uint64_t)pc * 31 + other_pc) * 31 + region) * 32 + kind);
}

}  // namespace

void check_callers(uintptr_t pc) { know_callers(pc); }
