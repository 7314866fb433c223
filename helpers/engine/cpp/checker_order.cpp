// Which of two accesses came first, if the kernel says so at all. Without an order between them they are a race.
//
// Order comes from __syncthreads and __syncwarp, as epochs, and between blocks from a fence and an atomic of one word,
// as releases. A shuffle orders no memory: where it stood for a __syncwarp, that one's absence would go unseen.
#include "books.h"

namespace {

// The second write is done by now: if it was of another value than the first, they race. differs: it was.
void settle_same_value(bool differs) {
  SameValue& s = books.same_value;
  if (!s.is_open) return;
  s.is_open = false;
  differs = differs || memcmp((const void*)s.address, s.first, s.size) != 0;
  if (!differs && s.one_step) return;
  const int kind = differs ? ENGINE_RACE : ENGINE_SAME_VALUE;
  report(kind, s.region, s.address, s.size, s.pc, s.thread, true, s.other, s.other_site, true, s.how);
}

// No atomicCAS came to test them in time.
void settle_guesses() {
  for (const Guess& g : books.guesses)
    report(ENGINE_RACE, g.region, g.address, g.size, g.pc, g.thread, false, g.other, g.other_site, true);
  books.guesses.clear();
}

// The number of releases of a word that a thread knows, by itself or as part of the block.
size_t known_releases(unsigned thread, uint64_t word) {
  auto all = books.known.find(word);
  size_t found = all == books.known.end() ? 0 : all->second;
  auto own = books.known_to.find(thread);
  if (own == books.known_to.end()) return found;
  auto mine = own->second.find(word);
  return mine == own->second.end() ? found : std::max(found, mine->second);
}

void learn(Known& to, const Known& from) {
  for (const auto& entry : from) {
    size_t& now = to[entry.first];
    now = std::max(now, entry.second);
  }
}

// Words of shared memory are others in each block.
uint64_t word_of(uintptr_t address) {
  for (const Region& r : books.regions)
    if (r.is_shared() && address >= r.begin && address < r.end) return address ^ r.since << 48;
  return address;
}

// A thread that sees another block's atomic write knows that this block has begun.
void see_block(uintptr_t address) {
  for_cells(address, 1, [](const Cell& cell) {
    const How how = how_of(cell.write);
    if ((how != ATOMIC && how != SIGNAL) || !same_cluster(cell.write) || epoch_of(cell.write) == IN_FLIGHT) return;
    books.has_begun.resize(books.warp_epoch.size() * 32, 0);
    books.has_begun[current.thread] |= 1u << rank_of(cell.write);
  });
}

// What one of these threads knows to have begun, all of them do.
void share_begun(unsigned first, unsigned n, unsigned mask = ~0u) {
  if (books.has_begun.empty()) return;
  unsigned all = 0;
  for (unsigned i = 0; i < n; ++i) all |= mask >> i % 32 & 1 ? books.has_begun[first + i] : 0;
  for (unsigned i = 0; i < n; ++i)
    if (mask >> i % 32 & 1) books.has_begun[first + i] |= all;
}

void tell(unsigned thread) {
  books.told.resize(books.warp_epoch.size() * 32, 0);
  books.told[thread] = books.epoch;
}

// An atomic reads a word.
void take_up(uintptr_t address) {
  if (books.running && books.cluster > 1) see_block(address);
  if (!books.running || books.releases.empty()) return;
  const uint64_t word = word_of(address);
  auto found = books.releases.find(word);
  if (found == books.releases.end()) return;
  const size_t until = found->second.size();
  if (known_releases(current.thread, word) < until) books.seen_by[current.thread][word] = until;
}

// What a thread has read by atomics it knows from a fence or a barrier on.
//
// own_block: a fence of the block's scope, which acquires nothing that another block released last.
void acquire(unsigned thread, bool own_block) {
  auto seen = books.seen_by.find(thread);
  if (seen == books.seen_by.end()) return;
  Known& mine = books.known_to[thread];
  Known later;
  for (const auto& [word, until] : seen->second) {
    const std::vector<Release>& all = books.releases[word];
    if (own_block && all[until - 1].block_epoch != books.block_epoch) {
      later[word] = until;
      continue;
    }
    for (size_t i = known_releases(thread, word); i < until; ++i) learn(mine, all[i].known);
    mine[word] = std::max(mine[word], until);
  }
  if (later.empty()) books.seen_by.erase(seen);
  else seen->second.swap(later);
}

void acquire_all() {
  while (!books.seen_by.empty()) acquire(books.seen_by.begin()->first);
}

// For a place in memory, besides the releases of its word: the epoch up to which a thread knows its atomic writes.
uint64_t seen_key(uintptr_t address) { return ~word_of(address & ~(uintptr_t)3); }

// A strong load reads a word, and so orders what its thread does from here on after the atomic write that it sees: by
// PTX, observation order followed by program order is causality order. Of what came before that write it says nothing.
void observe(uintptr_t address, unsigned size) {
  if (!books.running) return;
  for (uintptr_t at = address; at < address + size; at += 4) {
    for_cells(at, 1, [&](const Cell& cell) {
      const How how = how_of(cell.write);
      const uint64_t epoch = epoch_of(cell.write), key = seen_key(at);
      if ((how != ATOMIC && how != SIGNAL) || epoch == IN_FLIGHT) return;
      if (thread_of(cell.write) == current.thread && same_block(cell.write)) return;
      if (known_releases(current.thread, key) >= epoch) return;
      books.known_to[current.thread][key] = epoch;
      ++books.epoch;  // what is written from now on, it has not seen
    });
  }
}

// Has `thread` seen this write of the place, by itself or as one of the threads that met at a barrier?
bool observed(uintptr_t address, Tag write, unsigned thread) {
  const How how = how_of(write);
  return (how == ATOMIC || how == SIGNAL) && known_releases(thread, seen_key(address)) >= epoch_of(write);
}

// An atomic writes a word.
void release(uintptr_t address) {
  if (!books.running || books.fences[0].empty()) return;
  const unsigned thread = current.thread, warp = thread / 32;
  for (int scope = 0; scope < 2; ++scope) {
    const std::vector<Fence>& fences = books.fences[scope];
    const Fence& mine = fences[thread];
    // The device's fence is one for the block too: the block's own only counts where it came later.
    if (scope == 1 && mine.epoch <= books.fences[0][thread].epoch) continue;
    Release r = {books.block_epoch, mine.barrier_epoch, mine.warp_epoch, warp, scope == 1, {}, mine.clock, books.known};
    for (unsigned i = 0; i < fences.size(); ++i) {  // those whose fence this thread has behind it
      const uint64_t until = i == thread      ? ~0ull
                             : i / 32 == warp ? std::max(books.warp_epoch[warp], books.barrier_epoch)
                                              : books.barrier_epoch;
      if (fences[i].epoch && fences[i].epoch < until) r.fences.emplace_back(i, fences[i].epoch);
    }
    if (r.fences.empty()) continue;
    auto own = books.known_to.find(thread);
    if (own != books.known_to.end()) learn(r.known, own->second);
    const uint64_t word = word_of(address);
    books.released_by[books.block_epoch].emplace_back(word, books.releases[word].size());
    books.releases[word].push_back(std::move(r));
  }
}

// Of the block that ran at an epoch: when it began.
uint64_t block_epoch_at(uint64_t epoch) {
  auto after = std::upper_bound(books.block_begins.begin(), books.block_begins.end(), epoch);
  return books.block_epochs[after - books.block_begins.begin() - 1];
}

// In the cluster that runs?
bool same_cluster(Tag t) { return books.cluster > 1 && epoch_of(t) >= books.cluster_epoch; }

// Was it the running block?
bool same_block(Tag t) {
  const uint64_t epoch = epoch_of(t);
  if (books.cluster > 1) return same_cluster(t) && rank_of(t) == own_rank;
  return books.interleaved ? block_epoch_at(epoch) == books.block_epoch : epoch >= books.block_epoch;
}

// Has `thread` taken up a release that came after `before`?
bool released(Tag before, unsigned thread) {
  if (books.releases.empty()) return false;
  const uint64_t epoch = epoch_of(before), block = block_epoch_at(epoch);
  auto found = books.released_by.find(block);
  if (found == books.released_by.end()) return false;
  const unsigned who = thread_of(before);
  for (const auto& place : found->second) {
    const Release& r = books.releases[place.first][place.second];
    bool covers = epoch < r.barrier_epoch || (who / 32 == r.warp && epoch < r.warp_epoch) ||
                  (!r.clock.empty() && epoch <= r.clock[slot_of(before)]);
    for (size_t i = 0; i < r.fences.size() && !covers; ++i)
      covers = r.fences[i].first == who && epoch <= r.fences[i].second;
    if (covers && !(r.own_block && block != books.block_epoch) && known_releases(thread, place.first) > place.second)
      return true;
  }
  return false;
}

// Has `thread` taken up any release by the block that began at this epoch?
bool has_released(uint64_t block_epoch, unsigned thread) {
  const auto found = books.released_by.find(block_epoch);
  if (found == books.released_by.end()) return false;
  for (const auto& [word, place] : found->second)
    if (!books.releases[word][place].own_block && known_releases(thread, word) > place) return true;
  return false;
}

// Two accesses without an order that are no race, or not by themselves: atomics, and volatile ones where they signal.
// By the PTX memory model all of these are strong operations. But volatile orders nothing, so what threads of a block
// hand over by it has no defined value, unless the write comes after a fence, as that of a flag does; and lanes of a
// warp do not wait for each other's flags.
bool may_meet(Tag before, Tag mine) {
  const How theirs = how_of(before), ours = how_of(mine);
  if (theirs == PLAIN || ours == PLAIN) return false;
  if (theirs == ATOMIC || ours == ATOMIC || !same_block(before)) return true;
  return thread_of(before) / 32 != thread_of(mine) / 32 && (theirs == SIGNAL || ours == SIGNAL);
}

How volatile_write() {
  const auto& fences = books.fences[1];  // with those of the device's
  return books.running && !fences.empty() && fences[current.thread].epoch ? SIGNAL : VOLATILE;
}

// Did `before` happen before what `thread` of the running block does now?
bool ordered(Tag before, unsigned thread) {
  uint64_t epoch = epoch_of(before);
  if (epoch < books.grid_epoch) return true;
  if (!same_block(before))
    return (same_cluster(before) && epoch <= clocked(thread, slot_of(before))) || released(before, thread);
  if (is_agent(thread_of(before))) return epoch <= clocked(thread, slot_of(before));
  if (thread_of(before) == thread || epoch < books.barrier_epoch) return true;
  unsigned warp = thread / 32;
  if (epoch <= clocked(thread, slot_of(before))) return true;
  if (thread_of(before) / 32 != warp) return released(before, thread);
  // Within a warp there may also have been a __syncwarp, of all lanes or of these two.
  if (epoch < books.warp_epoch[warp]) return true;
  const auto& lanes = books.lane_epochs[warp];
  if (!lanes.empty() && epoch < lanes[thread % 32 * 32 + thread_of(before) % 32]) return true;
  return released(before, thread);
}

}  // namespace

// whole: of all threads of the block.
void check_barrier(const char* file, int line, bool whole) {
  settle_same_value();
  settle_guesses();
  ++books.barriers;
  ++books.interval;
  if (profile.running && books.reached.size() < MOST_STEPS) books.reached.push_back({books.block, file, line});
  if (!whole) return;
  join_all_clocks();
  books.barrier_epoch = ++books.epoch;
  books.barrier_tag = tag_of(books.epoch, 0, PLAIN, 0);
  share_begun(0, (unsigned)books.has_begun.size());
  acquire_all();
  // What one thread has acquired, all of them know from here on.
  for (const auto& one : books.known_to) learn(books.known, one.second);
  books.known_to.clear();
}

void check_warp_sync(unsigned warp, unsigned mask) {
  settle_same_value();
  ++books.epoch;
  join_clocks(warp, mask);
  share_begun(warp * 32, 32, mask);
  for (unsigned lane = 0; lane < 32 && !books.seen_by.empty(); ++lane)
    if (mask >> lane & 1) acquire(warp * 32 + lane);
  if (!books.known_to.empty()) {  // the lanes that met know what one of them did
    Known all;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) learn(all, books.known_to[warp * 32 + lane]);
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) books.known_to[warp * 32 + lane] = all;
  }
  if (mask == ~0u) {
    books.warp_epoch[warp] = books.epoch;
    return;
  }
  // Of some lanes only: then order is a matter of pairs.
  auto& lanes = books.lane_epochs[warp];
  if (lanes.empty()) lanes.assign(32 * 32, 0);
  for (unsigned a = 0; a < 32; ++a)
    for (unsigned b = 0; b < 32; ++b)
      if ((mask >> a & 1) && (mask >> b & 1)) lanes[a * 32 + b] = books.epoch;
}

void check_fence(bool own_block) {
  const unsigned thread = current.thread;
  tell(thread);
  acquire(thread, own_block);
  Clock clock = books.everyone;
  if (!books.clocks.empty()) raise(clock, books.clocks[thread]);
  for (int scope = own_block; scope < 2; ++scope) {
    auto& fences = books.fences[scope];
    if (books.fences[0].empty()) books.fences[0].resize(books.warp_epoch.size() * 32);
    if (fences.empty()) fences.resize(books.warp_epoch.size() * 32);
    fences[thread] = {books.epoch, books.barrier_epoch, books.warp_epoch[thread / 32], clock};
  }
  ++books.epoch;
}
