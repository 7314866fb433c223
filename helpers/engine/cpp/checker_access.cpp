// One access in full, if the shortcut did not suffice: bounds, alignment, unwritten bytes, and whether
// what others did with the same bytes came before.
//
// checker_hooks.cpp has the glance. The functions it calls here are not inlined, so that the hooks stay short.
#include "books.h"

namespace {

// Whether the address is of a sum of the running thread that a product in flight will change.
bool touches_sums(uintptr_t a, unsigned size, Kind kind, uintptr_t pc) {
  if (a >= current.stack_top || a + STACK_REACH < current.stack_top) return false;
  const unsigned thread = current.thread % 128;
  for (const auto& sums : here().warpgroups[current.thread / 128].sums) {
    float* const* places = &sums->places[thread * sums->n];
    auto touches = [&](float* const* first, unsigned n) {  // of n floats side by side
      return a + size > (uintptr_t)*first && a < (uintptr_t)(*first + n);
    };
    bool any = false;
    if (!places[0]) continue;
    if (places[sums->n - 1] == places[0] + (sums->n - 1)) any = touches(places, sums->n);
    else
      for (unsigned i = 0; i < sums->n && !any; ++i) any = touches(places + i, 1);
    if (!any) continue;
    EngineFinding f = finding_at(ENGINE_SUMS_TOUCHED, nullptr, 0);
    f.pc = pc;
    f.is_write = kind == WRITE;
    f.other_pc = (uint64_t)(uintptr_t)sums->callers.back();
    f.other_block = books.block;
    f.other_thread = current.thread;
    add_finding(f, (f.pc * 31 + f.other_pc) * 32 + ENGINE_SUMS_TOUCHED);
    break;
  }
  return true;
}

// The first access smaller than a cell splits all cells.
__attribute__((noinline)) void refine(Region& r, unsigned grain) {
  std::vector<Cell> fine(r.cells.size() * (r.grain / grain));
  for (size_t i = 0; i < fine.size(); ++i) fine[i] = r.cells[i * grain / r.grain];
  r.cells.swap(fine);
  r.grain = grain;
  r.shift = (unsigned)__builtin_ctz(grain);
  forget();  // shortcuts refer to the old cells
}

// A write to const memory: from now on its accesses need an order.
__attribute__((noinline)) void open_cells(Region& r) {
  r.cells.resize((r.told->bytes + r.grain - 1) / r.grain);
  forget();
}

// Shared memory of another block of the cluster: that one has to be there.
__attribute__((noinline)) void check_peer(
    const Region& r, uint32_t index, uintptr_t a, unsigned size, Kind kind, uintptr_t pc, unsigned thread) {
  need_clocks();
  if (books.has_begun.empty()) books.has_begun.assign(books.clocks.size(), 0);
  unsigned& known = books.has_begun[thread];
  for (unsigned i = 0; i < own_slots() && !(known >> r.rank & 1); ++i)
    if (clocked(thread, r.rank * own_slots() + i) >= r.since) known |= 1u << r.rank;
  if (!(known >> r.rank & 1) && has_released(r.since, thread)) known |= 1u << r.rank;
  if (!(known >> r.rank & 1)) report(ENGINE_NOT_BEGUN, index, a, size, pc, thread, kind == WRITE);
  if (books_of(r.rank).ended) report(ENGINE_ENDED, index, a, size, pc, thread, kind == WRITE);
}

// The access against those before it, cell by cell; then it is the last one.
void check_order(
    Region& r, uint32_t index, uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc, unsigned thread,
    uint32_t site) {
  if (kind == WRITE) settle_same_value();  // the write before this one is done
  if (size < r.grain) refine(r, size);
  const size_t first = (a - r.begin) >> r.shift, last = (a + size - 1 - r.begin) >> r.shift;
  const Tag mine = tag_of(books.epoch, thread, how);
  const bool shared = r.is_shared();
  if (shared && r.rank != own_rank) check_peer(r, index, a, size, kind, pc, thread);
  for (size_t i = first; i <= last; ++i) {
    Cell& cell = r.cells[i];
    if (kind == READ && cell.read == mine) continue;  // again in the same epoch: nothing can have changed unseen
    if (epoch_of(cell.write) == IN_FLIGHT) {
      report(ENGINE_IN_FLIGHT, index, a, size, pc, thread, kind == WRITE, cell.write, cell.write_site, true);
      continue;
    }
    if (kind == READ && shared && epoch_of(cell.write) < r.since) {
      report(ENGINE_UNINITIALISED, index, a, size, pc, thread, false);
    }
    const uintptr_t address = r.begin + (i << r.shift);
    const bool races = cell.write && (!shared || epoch_of(cell.write) >= r.since) && !ordered(cell.write, thread) &&
                       !may_meet(cell.write, mine) && !observed(address, cell.write, thread);
    if (races && kind == WRITE && !is_unseen(thread_of(cell.write)) && how != ATOMIC && how_of(cell.write) != ATOMIC &&
        size <= 16) {
      const bool one_step =
          cell.write_site == site && thread_of(cell.write) / 32 == thread / 32 && same_block(cell.write);
      SameValue& s = books.same_value;
      if (!s.is_open || s.one_step) {  // else the first bytes of this access have reported it
        s = {true, one_step, how, index, cell.write_site, a, pc, size, thread, cell.write, {}};
        memcpy(s.first, (const void*)a, size);
      }
    } else if (
        races && kind == READ && how == PLAIN && how_of(cell.write) != PLAIN && books.guesses.size() < MOST_GUESSES) {
      books.guesses.push_back({index, site, a, pc, size, thread, cell.write, cell.write_site});
    } else if (races) {
      const int found = is_unseen(thread_of(cell.write)) ? ENGINE_IN_FLIGHT : ENGINE_RACE;
      report(found, index, a, size, pc, thread, kind == WRITE, cell.write, cell.write_site, true, how);
    }
    if (!races && !books.behind_atomics.empty() && how_of(cell.write) == ATOMIC) {
      const auto behind = books.behind_atomics.find(address);
      if (behind != books.behind_atomics.end()) {
        const auto [tag, from] = behind->second;
        if ((!shared || epoch_of(tag) >= r.since) && !ordered(tag, thread) && !may_meet(tag, mine))
          report(ENGINE_RACE, index, a, size, pc, thread, kind == WRITE, tag, from, true, how);
      }
    }
    if (kind == WRITE) {
      // Two reads by different threads are remembered, from different warps if there are such.
      const Tag reads[2] = {cell.read, cell.other_read};
      const uint32_t read_sites[2] = {cell.read_site, cell.other_read_site};
      for (int k = 0; k < 2; ++k) {
        if (!reads[k] || (shared && epoch_of(reads[k]) < r.since)) continue;
        if (!ordered(reads[k], thread) && !may_meet(reads[k], mine)) {
          report(ENGINE_RACE, index, a, size, pc, thread, true, reads[k], read_sites[k], false, how);
          break;
        }
      }
      // An atomic does not hide its own thread's plain write before it from others, whom nothing orders after that. If the
      // thread has told some of them, both are remembered.
      const uint64_t before = epoch_of(cell.write),
                     ordered_since = std::max(books.barrier_epoch, books.warp_epoch[thread / 32]);
      const bool is_after_own = how == ATOMIC && how_of(cell.write) == PLAIN && thread_of(cell.write) == thread &&
                                before >= ordered_since && same_block(cell.write);
      const bool was_told = is_after_own && thread < books.told.size() && books.told[thread] >= before;
      if (was_told) books.behind_atomics[address] = {cell.write, cell.write_site};
      else if (how != ATOMIC && !books.behind_atomics.empty()) books.behind_atomics.erase(address);
      if (!is_after_own || was_told) cell.write = mine, cell.write_site = site;
      if (books.cluster > 1) cell.read = cell.other_read = 0;  // whoever comes after this write comes after them
    } else {
      remember_read(cell, mine, site);
    }
  }
}

// An atomicCAS of a word: what its thread read of it before, without an atomic, was a guess. What it read by an atomic
// belongs to the same update, whose write all that see it come after, so it is not remembered by itself.
void compare(uintptr_t a, unsigned size) {
  if (!books.running) return;
  const unsigned thread = current.thread;
  auto mine = [&](const Guess& g) { return g.thread == thread && g.address < a + size && a < g.address + g.size; };
  books.guesses.erase(std::remove_if(books.guesses.begin(), books.guesses.end(), mine), books.guesses.end());
  for_cells(a, size, [&](Cell& cell) {
    for (Tag* read : {&cell.read, &cell.other_read})
      if (*read && same_block(*read) && thread_of(*read) == thread)
        *read = how_of(*read) == ATOMIC ? 0 : (*read & ~(Tag)3) | ATOMIC;
  });
}

// An address in no array, no shared memory and no stack of ours: a wild pointer, or just past an array.
// Returns whether it was just past an array.
__attribute__((noinline)) bool outside(uintptr_t a, unsigned size, Kind kind, uintptr_t pc, unsigned thread) {
  uint32_t nearest = ~0u;
  uintptr_t best = ~(uintptr_t)0;
  for (uint32_t i = 0; i < books.regions.size(); ++i) {
    const Region& r = books.regions[i];
    uintptr_t distance = a + size > r.end && a >= r.begin ? a + size - r.end : a < r.begin ? r.begin - a : 0;
    // Beside the module's variables there is other data of the module's: of their redzones alone it is sure.
    if (r.told->kind == ENGINE_VARIABLE && distance > VARIABLE_REDZONE) continue;
    if (distance < best) best = distance, nearest = i;
  }
  if (best > (1u << 20)) return false;  // constants: not the arrays' business
  report(ENGINE_OUT_OF_BOUNDS, nearest, a, size, pc, thread, kind == WRITE);
  return true;
}

__attribute__((noinline)) void access_books(
    Cached& hint, uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc) {
  Region& r = *hint.region;
  EngineRegion& told = *r.told;
  const size_t offset = a - r.begin;
  if (told.fetches && kind == READ) {  // of each element, as a float4 reads four
    for (size_t i = offset / told.element; i * told.element < offset + size; ++i) told.fetches[i]++;
  }
  const unsigned thread = current.thread;
  if (__builtin_expect((a & (size - 1)) != 0, 0))
    report(ENGINE_MISALIGNED, hint.index, a, size, pc, thread, kind == WRITE);
  if (told.state) {
    size_t element = offset / told.element, end = (offset + size + told.element - 1) / told.element;
    for (size_t i = element; i < end; ++i) {
      if (kind == WRITE) told.state[i] = ENGINE_WRITTEN;
      else if (told.state[i] == ENGINE_UNWRITTEN) report(ENGINE_UNINITIALISED, hint.index, a, size, pc, thread, false);
    }
  }
  if (r.cells.empty() && kind == READ) return;
  const uint32_t index = hint.index, site = hint.site;
  if (!told.writable) {
    if (kind == WRITE) report(ENGINE_CONST_WRITTEN, index, a, size, pc, thread, true);
    if (r.cells.empty()) open_cells(r);
  }
  check_order(r, index, a, size, kind, how, pc, thread, site);
}

// The region that holds all bytes of an access; their number where none does.
uint32_t region_of(uintptr_t a, unsigned size) {
  uint32_t index = 0;
  while (index < books.regions.size() && !(a >= books.regions[index].begin && a + size <= books.regions[index].end))
    ++index;
  return index;
}

// An access to a region, whose event is remembered already.
__attribute__((noinline)) void access_found(uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc) {
  const uint32_t index = region_of(a, size);
  Region& r = books.regions[index];
  Cached& hint = slot_of(cache, pc);
  // What the next access of this instruction needs. The shortcuts are for one whole element, or one whole cell.
  hint.pc = pc;
  hint.begin = r.begin;
  hint.span = r.end - r.begin - size;
  hint.index = index;
  hint.region = &r;
  hint.site = site_for(pc, index, size, kind, how);
  hint.count = &books.sites[hint.site].count;
  const bool plain = kind == READ && r.cells.empty() && !r.told->state && size == r.told->element;
  hint.fetches = plain ? r.told->fetches : nullptr;
  // (In a cluster, others than the block's own threads may have written there.)
  hint.cells = r.is_shared() && size == r.grain && books.cluster == 1 ? r.cells.data() : nullptr;
  hint.shift = (unsigned)__builtin_ctz(size);
  ++*hint.count;
  if (hint.fetches && (a & (size - 1)) == 0) ++hint.fetches[(a - r.begin) >> hint.shift];
  else access_books(hint, a, size, kind, how, pc);
}

__attribute__((noinline)) void access_first(uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc, void* frame) {
  if (!books.running) return;
  const std::vector<Fiber>& fibers = here().fibers;
  if (a - (uintptr_t)fibers.data() < fibers.size() * sizeof(Fiber)) return;  // threadIdx and its like
  if (touches_sums(a, size, kind, pc)) return;
  const uint32_t index = region_of(a, size);
  const bool inside = index < books.regions.size();
  // Beside an array, too, the lane keeps in step with the others of its warp, which may be inside.
  if (!inside && !outside(a, size, kind, pc, current.thread)) return;
  if (profile.running) {
    // Other lanes may run meanwhile: they look for the site, and may take the slot, which is filled after them.
    if (inside) site_for(pc, index, size, kind, how);
    remember_event(a, pc, frame);
  }
  if (inside) access_found(a, size, kind, how, pc);
}

}  // namespace
