// The checker's interface: the engine tells it which block runs, and Python starts, ends and reads a checked run. The
// records themselves are in books.h.
#include "books.h"

namespace {

void note_begin() {
  books.block_begins.push_back(books.epoch);
  books.block_numbers.push_back(books.block);
  books.block_epochs.push_back(books.block_epoch);
}

}  // namespace

bool checked_run = false;

void check_block(uint64_t block, unsigned n_warps, const void* static_shared, const void* dynamic_shared) {
  books.block = block;
  books.interval = 0;
  books.running = true;
  profile.running = profile.wanted;
  books.block_epoch = books.barrier_epoch = ++books.epoch;
  own_rank = here().rank;
  books.block_tag = books.barrier_tag = tag_of(books.epoch, 0, PLAIN, 0);
  forget();  // shared memory may have moved
  note_begin();
  for (LaneTrace& lane : profile.lanes) lane.n = 0, lane.last_block = 0;
  books.warp_epoch.assign(n_warps, books.epoch);
  books.lane_epochs.assign(n_warps, {});
  books.fences[0].clear();  // fences and what is known of releases belong to threads, and these are new ones
  books.fences[1].clear();
  books.known.clear();
  books.known_to.clear();
  books.seen_by.clear();
  books.clocks.clear();
  books.everyone.clear();
  books.mbarriers.clear();
  books.named.clear();
  books.sent_by.clear();
  books.proxy_fences.clear();
  books.waited_since.clear();
  books.has_begun.clear();
  books.ended = false;
  books.told.clear();
  for (Region& r : books.regions) {
    if (r.is_shared() && r.rank != own_rank) continue;
    r.since = books.block_epoch;
    const void* now = r.told->kind == ENGINE_STATIC_SHARED    ? static_shared
                      : r.told->kind == ENGINE_DYNAMIC_SHARED ? dynamic_shared
                                                              : nullptr;
    if (now) {
      r.begin = (uintptr_t)now + r.told->address;  // of shared memory: the offset in it
      r.end = r.begin + r.told->bytes;
    }
  }
}

void check_cluster(unsigned size) {
  books.cluster = size;
  books.cluster_epoch = ++books.epoch;
  books.cluster_first = 0;
  books.cluster_tag = tag_of(books.epoch, 0, PLAIN, 0);
  books.cluster_arriving.clear();
  books.cluster_over.clear();
  if (books.regions.size() > books.n_told) return;
  for (unsigned rank = 1; rank < size; ++rank)
    for (unsigned i = 0; i < books.n_told; ++i) {
      if (!books.regions[i].is_shared()) continue;
      Region r = books.regions[i];
      r.rank = rank;
      books.regions.push_back(std::move(r));
    }
}

void check_cluster_arrive(bool releases) {
  if (!books.running) return;
  need_clocks();
  if (!books.cluster_first) books.cluster_first = books.epoch;
  if (releases) leave_knowledge(books.cluster_arriving, current.thread);
  else leave_what_is_fenced(books.cluster_arriving, current.thread);
  for (MbarrierBooks& b : books.mbarriers) b.is_told = b.is_told || (b.is_fenced && b.thread == current.thread);
  ++books.epoch;
}

void check_cluster_wait(bool acquires) {
  if (!books.running) return;
  need_clocks();
  if (acquires) take_knowledge(current.thread, books.cluster_over);
  // Whatever it orders of memory: all threads of the cluster have come, so all its blocks have begun.
  books.has_begun.resize(books.warp_epoch.size() * 32, 0);
  books.has_begun[current.thread] = ~0u;
}

void check_cluster_barrier() {
  settle_same_value();
  books.cluster_over = books.cluster_arriving;
  if (books.cluster_first) books.cluster_tag = tag_of(books.cluster_first, 0, PLAIN, 0);
  books.cluster_first = 0;
  for (unsigned rank = 0; rank < books.cluster; ++rank)
    for (MbarrierBooks& b : books_of(rank).mbarriers) b.is_known = b.is_told;
}

// A block has ended, and with it its shared memory: what others did there has to be known to it.
void check_last_accesses(unsigned n_threads) {
  books.ended = true;
  need_clocks();
  acquire_all();
  Clock known = books.everyone;
  for (unsigned i = 0; i < n_threads; ++i)
    if (!books.clocks[i].empty()) raise(known, books.clocks[i]);
  const auto is_known = [&](Tag tag, uintptr_t address) {  // by a fence and an atomic, to one of its threads
    if (epoch_of(tag) <= known[slot_of(tag)] || released(tag, n_threads)) return true;
    for (const auto& one : books.known_to)
      if (released(tag, one.first) || observed(address, tag, one.first)) return true;
    return observed(address, tag, n_threads);
  };
  for (uint32_t index = 0; index < books.regions.size(); ++index) {
    const Region& r = books.regions[index];
    if (!r.is_shared() || r.rank != own_rank) continue;
    for (size_t i = 0; i < r.cells.size(); ++i) {
      const Cell& cell = r.cells[i];
      const std::pair<Tag, uint32_t> all[] = {
          {cell.write, cell.write_site}, {cell.read, cell.read_site}, {cell.other_read, cell.other_read_site}};
      for (const auto& [tag, site] : all) {
        if (epoch_of(tag) < r.since || epoch_of(tag) == IN_FLIGHT || rank_of(tag) == own_rank) continue;
        if (is_known(tag, r.begin + (i << r.shift))) continue;
        EngineFinding f = finding_at(ENGINE_ENDED, nullptr, 0);
        f.region = r.number;
        f.offset = (int64_t)(i << r.shift);
        f.size = r.grain;
        f.pc = books.sites[site].pc;
        f.is_write = books.sites[site].is_write;
        f.thread = asker(tag);
        f.block = block_of(tag);
        f.of_peer = 1;
        f.owner = books.block;
        add_finding(f, (f.pc * 31 + r.number) * 32 + ENGINE_ENDED);
      }
    }
  }
}

void check_block_end(unsigned n_threads) {
  check_merge(n_threads);
  settle_same_value();
  settle_guesses();
  if (books.cluster > 1) check_last_accesses(n_threads);
  books.running = profile.running = false;
  forget();
}

// Memory that every block has for itself has books of its own as well. Traces are merged, though their warps are somewhere
// in the middle of the code: lanes that would have gone together may be counted apart.
void* check_set_aside(unsigned n_threads) {
  check_merge(n_threads);
  settle_same_value();
  for (Region& r : books.regions)
    if (r.is_shared() && books.cluster == 1) {
      books.shared_regions.push_back(r);
      std::fill(r.cells.begin(), r.cells.end(), Cell());
    }
  BlockBooks* kept = new BlockBooks;
  std::swap(*kept, static_cast<BlockBooks&>(books));
  books.interleaved = true;
  books.running = profile.running = false;
  return kept;
}

void check_bring_back(void* kept) {
  static_cast<BlockBooks&>(books) = std::move(*(BlockBooks*)kept);
  check_drop(kept);
  size_t i = 0;
  own_rank = here().rank;
  for (Region& r : books.regions)
    if (r.is_shared() && books.cluster == 1) r = std::move(books.shared_regions[i++]);
  books.shared_regions.clear();
  books.running = true;
  profile.running = profile.wanted;
  ++books.epoch;
  note_begin();
  forget();
}

void check_drop(void* kept) { delete (BlockBooks*)kept; }

void check_grid_sync() { books.grid_epoch = ++books.epoch; }

void check_switch(unsigned thread, const void* stack_top) {
  current = {thread, (uintptr_t)stack_top, profile.lanes.empty() ? nullptr : &profile.lanes[thread]};
}

void check_collective(bool is_barrier) {
  ++books.collectives;
  books.warp_barriers += is_barrier;
}

void check_left(
    const char* file, int line, unsigned count, unsigned thread, int other_line, unsigned mask, const char* name) {
  for (const EngineLeft& known : books.left)
    if (known.line == line && !known.count == !count && strcmp(known.file, file) == 0) return;
  books.left.push_back({books.block, file, line, count, thread, other_line, mask, name});
}

void check_no_such_lane(const engine::Collective& operation, unsigned lane, unsigned source) {
  EngineFinding f = finding_at(ENGINE_INACTIVE_LANE, operation.file, operation.line);
  f.thread = current.thread / 32 * 32 + lane;
  f.mask = operation.mask;
  f.source = source;
  f.name = operation.name;
  add_finding(f, ((uint64_t)(uintptr_t)operation.file * 65536 + (unsigned)operation.line) * 16 + ENGINE_INACTIVE_LANE);
}

extern "C" {

void engine_check_start(const EngineRegion* regions, unsigned n, uint64_t profiled_code) {
  books = Books();
  profile = Profile();
  profile.base = profiled_code;
  profile.wanted = profiled_code != 0;
  if (profile.wanted) profile.lanes.resize(1024);
  forget();
  books.regions.resize(n);
  for (unsigned i = 0; i < n; ++i) {
    Region& r = books.regions[i];
    r.told = const_cast<EngineRegion*>(&regions[i]);
    r.number = i;
    r.begin = regions[i].address;
    r.end = r.begin + regions[i].bytes;
    // 4 bytes a cell, until a smaller access splits them. Constant memory needs no order.
    if (regions[i].writable) r.cells.resize((regions[i].bytes + 3) / 4);
  }
  books.n_told = n;
  checked_run = true;
}

void engine_check_stop() {
  checked_run = books.running = profile.wanted = profile.running = false;
  profile.lanes.clear();
  forget();
}

void engine_check_counts(uint64_t* barriers, uint64_t* collectives, uint64_t* warp_barriers, uint64_t* tensor_flop) {
  *barriers = books.barriers;
  *collectives = books.collectives;
  *warp_barriers = books.warp_barriers;
  *tensor_flop = books.tensor_flop;
}

void engine_tensor_flop(int m, int n, int k) {
  if (books.running) books.tensor_flop += 2ull * m * n * k;
}

unsigned engine_check_findings(const EngineFinding** out) {
  *out = books.findings.data();
  return (unsigned)books.findings.size();
}

unsigned engine_check_steps(const EngineStep** out, uint64_t* whole) {
  *out = books.steps.data();
  *whole = books.whole;
  return (unsigned)books.steps.size();
}

unsigned engine_check_barriers(const EngineBarrier** out) {
  *out = books.reached.data();
  return (unsigned)books.reached.size();
}

unsigned engine_check_left(const EngineLeft** out) {
  *out = books.left.data();
  return (unsigned)books.left.size();
}

unsigned engine_check_events(const EngineEvent** out) {
  *out = books.events.data();
  return (unsigned)books.events.size();
}

uint64_t engine_check_writer(unsigned region, uint64_t offset, uint64_t* block, unsigned* thread) {
  const Region& r = books.regions[region];
  const size_t i = offset >> r.shift;
  if (i >= r.cells.size() || !r.cells[i].write) return 0;
  *block = block_of(r.cells[i].write);
  *thread = asker(r.cells[i].write);
  return books.sites[r.cells[i].write_site].pc;
}

unsigned engine_check_callers(uint64_t pc, const uintptr_t** out) {
  const auto known = books.callers.find((uintptr_t)pc);
  if (known == books.callers.end()) return 0;
  *out = known->second.data();
  return (unsigned)known->second.size();
}

unsigned engine_check_sites(EngineSite* out, unsigned most) {
  for (unsigned i = 0; i < most && i < books.sites.size(); ++i) out[i] = books.sites[i];
  return (unsigned)books.sites.size();
}

}  // extern "C"
