// The checked run: the compiler's -fsanitize=thread calls a hook before every access of an instrumented kernel, and
// the hooks below keep the books: bytes, bounds, who wrote what, and what two threads did with no order between them.
//
// One OS thread runs all blocks, one after the other, so the books need no locks and are the same every time. Order
// comes from __syncthreads, __syncwarp, and fence-and-atomic between blocks; a shuffle orders no memory.
#include "checker.h"

#include <string.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <vector>

namespace {

// When and by whom: the epoch counts every event that can order accesses, so a later epoch is a later time.
typedef uint64_t Tag;  // epoch << 11 | thread << 1 | is atomic
Tag tag_of(uint64_t epoch, unsigned thread, bool atomic) { return epoch << 11 | (uint64_t)thread << 1 | atomic; }
uint64_t epoch_of(Tag t) { return t >> 11; }
unsigned thread_of(Tag t) { return (unsigned)(t >> 1) & 1023; }
bool is_atomic(Tag t) { return t & 1; }
constexpr uint64_t IN_FLIGHT = ~0ull >> 11;  // epoch of a write by a cp.async that has not been waited for

struct Cell {  // of `grain` bytes
  Tag write = 0, read = 0, other_read = 0;
  uint32_t write_site = 0, read_site = 0, other_read_site = 0;
};

struct Region {
  EngineRegion *told = nullptr;
  uintptr_t begin = 0, end = 0;
  unsigned grain = 4, shift = 2;
  std::vector<Cell> cells;  // empty for arrays that the kernel cannot write
};

// Order between threads that no barrier joins: a fence, then an atomic write of a word, releases what came before the
// fence; whoever reads that word by an atomic takes it up, and hands it on at his barriers and by his own releases.
// (By the letter a fence belongs after the read too. Sound kernels leave it to the __syncthreads that follows.)
typedef std::unordered_map<uint64_t, size_t> Known;  // word -> how many of its releases
struct Fence {
  uint64_t epoch = 0, barrier_epoch = 0, warp_epoch = 0;  // when, and what this thread knew of others then
};
struct Release {
  uint64_t block_epoch, barrier_epoch, warp_epoch;
  unsigned warp;
  bool own_block;                                     // by __threadfence_block
  std::vector<std::pair<unsigned, uint64_t>> fences;  // of threads: all they did up to this epoch
  Known known;
};

// A race that may still turn out to be none; the next write, or the next event that orders accesses, tells.
struct SameValue {  // two lanes of a warp wrote one place by one instruction: no race where the value is the same
  bool is_open = false;
  uint32_t region, site;
  uintptr_t address, pc;
  unsigned size, thread;
  Tag other;
  unsigned char first[16];
};
// A plain read beside atomic writes, as CUDA's own example of a loop around atomicCAS begins: the atomicCAS tells the
// thread whether what it read still holds. A race if no such follows.
struct Guess {
  uint32_t region, site;
  uintptr_t address, pc;
  unsigned size, thread;
  Tag other;
  uint32_t other_site;
};

struct Checker {
  bool wanted = false, running = false;  // running: inside a block, where there is a thread to ask about
  std::vector<Region> regions;
  std::vector<std::pair<uintptr_t, uintptr_t>> ignored;  // stacks and the engine's own
  std::deque<EngineSite> sites;  // a site stays where it is: its count is pointed at
  std::vector<EngineFinding> findings;
  std::unordered_map<uint64_t, uint32_t> site_index, finding_index;
  uint64_t epoch = 1, barrier_epoch = 1, block_epoch = 1, block = 0;
  uint64_t barriers = 0, collectives = 0;
  Tag barrier_tag = 0, block_tag = 0;  // the smallest tags since then
  std::vector<uint64_t> block_begins;                     // epoch at which each block began, to name a block by an epoch
  std::vector<uint64_t> block_numbers;
  std::vector<uint64_t> warp_epoch;                       // of the last full __syncwarp, by warp
  std::vector<std::vector<uint64_t>> lane_epochs;         // by warp: [lane][other], of their last partial one
  std::vector<Fence> fences[2];                           // by scope (device, block) and thread of the running block
  std::unordered_map<uint64_t, std::vector<Release>> releases;                        // by word, in their order
  std::unordered_map<uint64_t, std::vector<std::pair<uint64_t, size_t>>> released_by;  // by block epoch: word, place
  SameValue same_value;
  std::vector<Guess> guesses;
  std::vector<EngineStep> steps;        // with a profile
  std::vector<uint32_t> last_step;      // by site and warp, one more than its index
  std::vector<EngineBarrier> reached;   // barriers
  uint64_t whole = ~0ull;               // from this block on, steps are missing: there were too many
  uint32_t interval = 0;
  Known known;                                            // to all threads of the running block
  std::unordered_map<unsigned, Known> known_to;           // to one of them
};
// A lane's accesses since its warp was last merged. address 0: a jump backwards, that is, one more turn of a loop.
struct Event {
  uintptr_t address;
  uint64_t key;  // what goes first is smaller: the deeper call, then the earlier code (relative to the module)
};
constexpr unsigned FULL = 1024;  // events of a lane after which it lets the other lanes catch up: a warp's fit the cache
struct LaneTrace {
  unsigned n = 0;
  uintptr_t last_block = 0;  // the basic block it entered last
  Event events[FULL];
};
struct Profile {
  bool wanted = false, running = false;
  uintptr_t base = 0;              // of the kernel's code
  std::vector<LaneTrace> lanes;    // by thread of the block
};
Checker c;
Profile profile;

struct Running {  // what every access asks of the thread that runs
  unsigned thread;
  uintptr_t stack_top;
  LaneTrace *trace;
};
Running runs;

// What the last access of an instruction found, so that the next one finds it in a glance.
struct Cached {
  uintptr_t pc = 0, begin = 0, span = 0;  // an access at begin .. begin + span lies in the region
  uint64_t *count = nullptr;
  uint32_t *fetches = nullptr;            // where one element is read: its count is all there is to keep
  Cell *cells = nullptr;                  // where shared memory is read, a cell at a time
  Region *region = nullptr;
  uint32_t index = 0, site = 0, shift = 0;
};
Cached cache[4096], requests_cache[4096];

void forget() {
  std::fill(cache, cache + 4096, Cached());
  std::fill(requests_cache, requests_cache + 4096, Cached());
}

constexpr size_t MOST_GUESSES = 4096, MOST_STEPS = 1 << 20;
enum Kind { READ = 0, WRITE = 1 };

uint32_t site_for(uintptr_t pc, uint32_t region, unsigned size, Kind kind, bool atomic) {
  uint64_t key = (uint64_t)pc * 1024 + region * 4 + kind * 2 + atomic;
  auto found = c.site_index.find(key);
  if (found != c.site_index.end()) return found->second;
  EngineSite site;
  memset(&site, 0, sizeof site);
  site.pc = pc;
  site.region = region;
  site.size = size;
  site.is_write = kind == WRITE;
  site.is_atomic = atomic;
  c.sites.push_back(site);
  return c.site_index[key] = (uint32_t)c.sites.size() - 1;
}

uint64_t block_at(uint64_t epoch) {
  auto after = std::upper_bound(c.block_begins.begin(), c.block_begins.end(), epoch);
  return c.block_numbers[after - c.block_begins.begin() - 1];
}

void report(int kind, uint32_t region, uintptr_t address, unsigned size, uintptr_t pc, unsigned thread, bool write,
            Tag other = 0, uint32_t other_site = 0, bool other_write = false) {
  uintptr_t other_pc = other ? c.sites[other_site].pc : 0;
  uint64_t key = (((uint64_t)pc * 31 + other_pc) * 31 + region) * 16 + kind;
  auto found = c.finding_index.find(key);
  if (found != c.finding_index.end()) {
    c.findings[found->second].count++;
    return;
  }
  EngineFinding f;
  memset(&f, 0, sizeof f);
  f.kind = kind;
  f.count = 1;
  f.region = region;
  f.offset = (int64_t)(address - (region < c.regions.size() ? c.regions[region].begin : 0));
  f.size = size;
  f.is_write = write;
  f.pc = pc;
  f.block = c.block;
  f.thread = thread;
  if (other) {
    f.other_pc = other_pc;
    f.other_block = block_at(epoch_of(other));
    f.other_thread = thread_of(other);
    f.other_is_write = other_write;
  }
  c.finding_index[key] = (uint32_t)c.findings.size();
  c.findings.push_back(f);
}

void settle_same_value() {
  SameValue &s = c.same_value;
  if (!s.is_open) return;
  s.is_open = false;
  if (memcmp((const void *)s.address, s.first, s.size) != 0)
    report(ENGINE_RACE, s.region, s.address, s.size, s.pc, s.thread, true, s.other, s.site, true);
}

void settle_guesses() {
  for (const Guess &g : c.guesses)
    report(ENGINE_RACE, g.region, g.address, g.size, g.pc, g.thread, false, g.other, g.other_site, true);
  c.guesses.clear();
}

size_t known_releases(unsigned thread, uint64_t word) {
  auto all = c.known.find(word);
  size_t found = all == c.known.end() ? 0 : all->second;
  auto own = c.known_to.find(thread);
  if (own == c.known_to.end()) return found;
  auto mine = own->second.find(word);
  return mine == own->second.end() ? found : std::max(found, mine->second);
}

void learn(Known &to, const Known &from) {
  for (const auto &entry : from) {
    size_t &now = to[entry.first];
    now = std::max(now, entry.second);
  }
}

// Words of shared memory are others in each block.
uint64_t word_of(uintptr_t address) {
  for (const Region &r : c.regions)
    if (r.told->kind != ENGINE_ARRAY && address >= r.begin && address < r.end) return address ^ c.block_epoch << 48;
  return address;
}

// An atomic reads a word.
void take_up(uintptr_t address) {
  if (!c.running || c.releases.empty()) return;
  const uint64_t word = word_of(address);
  auto found = c.releases.find(word);
  if (found == c.releases.end()) return;
  const unsigned thread = runs.thread;
  const size_t before = known_releases(thread, word);
  Known &mine = c.known_to[thread];
  for (size_t i = before; i < found->second.size(); ++i) learn(mine, found->second[i].known);
  mine[word] = found->second.size();
}

// An atomic writes a word.
void release(uintptr_t address) {
  if (!c.running || c.fences[0].empty()) return;
  const unsigned thread = runs.thread, warp = thread / 32;
  for (int scope = 0; scope < 2; ++scope) {
    const std::vector<Fence> &fences = c.fences[scope];
    const Fence &mine = fences[thread];
    if (scope == 1 && mine.epoch <= c.fences[0][thread].epoch) continue;
    Release r = {c.block_epoch, mine.barrier_epoch, mine.warp_epoch, warp, scope == 1, {}, c.known};
    for (unsigned i = 0; i < fences.size(); ++i) {  // those whose fence this thread has behind it
      const uint64_t until = i == thread ? ~0ull : i / 32 == warp ? std::max(c.warp_epoch[warp], c.barrier_epoch) : c.barrier_epoch;
      if (fences[i].epoch && fences[i].epoch < until) r.fences.emplace_back(i, fences[i].epoch);
    }
    if (r.fences.empty()) continue;
    auto own = c.known_to.find(thread);
    if (own != c.known_to.end()) learn(r.known, own->second);
    const uint64_t word = word_of(address);
    c.released_by[c.block_epoch].emplace_back(word, c.releases[word].size());
    c.releases[word].push_back(std::move(r));
  }
}

// Has `thread` taken up a release that came after `before`?
bool released(Tag before, unsigned thread) {
  if (c.releases.empty()) return false;
  const uint64_t epoch = epoch_of(before), block = *(std::upper_bound(c.block_begins.begin(), c.block_begins.end(), epoch) - 1);
  auto found = c.released_by.find(block);
  if (found == c.released_by.end()) return false;
  const unsigned who = thread_of(before);
  for (const auto &place : found->second) {
    const Release &r = c.releases[place.first][place.second];
    bool covers = epoch < r.barrier_epoch || (who / 32 == r.warp && epoch < r.warp_epoch);
    for (size_t i = 0; i < r.fences.size() && !covers; ++i) covers = r.fences[i].first == who && epoch <= r.fences[i].second;
    if (covers && !(r.own_block && block != c.block_epoch) && known_releases(thread, place.first) > place.second) return true;
  }
  return false;
}

// Did `before` happen before what `thread` of the running block does now?
bool ordered(Tag before, unsigned thread) {
  uint64_t epoch = epoch_of(before);
  if (epoch < c.block_epoch) return released(before, thread);  // another block
  if (thread_of(before) == thread || epoch < c.barrier_epoch) return true;
  unsigned warp = thread / 32;
  if (thread_of(before) / 32 != warp) return released(before, thread);
  if (epoch < c.warp_epoch[warp]) return true;
  const auto &lanes = c.lane_epochs[warp];
  if (!lanes.empty() && epoch < lanes[thread % 32 * 32 + thread_of(before) % 32]) return true;
  return released(before, thread);
}

// The first access smaller than a cell splits all cells.
void refine(Region &r, unsigned grain) {
  std::vector<Cell> fine(r.cells.size() * (r.grain / grain));
  for (size_t i = 0; i < fine.size(); ++i) fine[i] = r.cells[i * grain / r.grain];
  r.cells.swap(fine);
  r.grain = grain;
  r.shift = (unsigned)__builtin_ctz(grain);
  forget();  // who remembers the old cells
}

// Two reads since the last barrier are kept, by threads of different warps if there are such: whoever writes next
// is another thread than at least one of them.
inline void remember_read(Cell &cell, Tag mine, uint32_t site) {
  if (cell.read >= c.barrier_tag && thread_of(cell.read) != thread_of(mine)) {
    const bool keep = cell.other_read >= c.barrier_tag && thread_of(cell.other_read) / 32 != thread_of(mine) / 32;
    if (!keep) {
      cell.other_read = cell.read;
      cell.other_read_site = cell.read_site;
    }
  }
  cell.read = mine;
  cell.read_site = site;
}

void check_order(Region &r, uint32_t index, uintptr_t a, unsigned size, Kind kind, bool atomic, uintptr_t pc,
                 unsigned thread, uint32_t site) {
  if (kind == WRITE) settle_same_value();  // the write before this one is done
  if (size < r.grain) refine(r, size);
  const size_t first = (a - r.begin) >> r.shift, last = (a + size - 1 - r.begin) >> r.shift;
  const Tag mine = tag_of(c.epoch, thread, atomic);
  const bool shared = r.told->kind != ENGINE_ARRAY;
  for (size_t i = first; i <= last; ++i) {
    Cell &cell = r.cells[i];
    if (kind == READ && cell.read == mine) continue;  // again in the same epoch: nothing can have changed unseen
    if (epoch_of(cell.write) == IN_FLIGHT) {
      report(ENGINE_IN_FLIGHT, index, a, size, pc, thread, kind == WRITE, cell.write, cell.write_site, true);
      continue;
    }
    if (kind == READ && shared && epoch_of(cell.write) < c.block_epoch) {
      report(ENGINE_UNINITIALISED, index, a, size, pc, thread, false);
    }
    const bool races = cell.write && !(atomic && is_atomic(cell.write)) && (!shared || epoch_of(cell.write) >= c.block_epoch) &&
                       !ordered(cell.write, thread);
    if (races && kind == WRITE && cell.write_site == site && thread_of(cell.write) / 32 == thread / 32 &&
        epoch_of(cell.write) >= c.block_epoch && size <= 16) {
      SameValue &s = c.same_value;
      s = {true, index, site, a, pc, size, thread, cell.write, {}};
      memcpy(s.first, (const void *)a, size);
    } else if (races && kind == READ && is_atomic(cell.write) && c.guesses.size() < MOST_GUESSES) {
      c.guesses.push_back({index, site, a, pc, size, thread, cell.write, cell.write_site});
    } else if (races) {
      report(ENGINE_RACE, index, a, size, pc, thread, kind == WRITE, cell.write, cell.write_site, true);
    }
    if (kind == WRITE) {
      // Two reads by different threads are remembered, from different warps if there are such.
      const Tag reads[2] = {cell.read, cell.other_read};
      const uint32_t read_sites[2] = {cell.read_site, cell.other_read_site};
      for (int k = 0; k < 2; ++k) {
        if (!reads[k] || (atomic && is_atomic(reads[k])) || (shared && epoch_of(reads[k]) < c.block_epoch)) continue;
        if (!ordered(reads[k], thread)) {
          report(ENGINE_RACE, index, a, size, pc, thread, true, reads[k], read_sites[k], false);
          break;
        }
      }
      cell.write = mine;
      cell.write_site = site;
    } else {
      remember_read(cell, mine, site);
    }
  }
}

// An atomicCAS of a word: what its thread read of it before, without an atomic, was a guess.
void compare(uintptr_t a, unsigned size) {
  if (!c.running) return;
  const unsigned thread = runs.thread;
  auto mine = [&](const Guess &g) { return g.thread == thread && g.address < a + size && a < g.address + g.size; };
  c.guesses.erase(std::remove_if(c.guesses.begin(), c.guesses.end(), mine), c.guesses.end());
  for (Region &r : c.regions) {
    if (a < r.begin || a + size > r.end || r.cells.empty()) continue;
    for (size_t i = (a - r.begin) >> r.shift; i <= (a + size - 1 - r.begin) >> r.shift; ++i)
      for (Tag *read : {&r.cells[i].read, &r.cells[i].other_read})
        if (*read >= c.block_tag && thread_of(*read) == thread) *read |= 1;
  }
}

// Whatever is no array, no shared memory and no stack of ours: a wild pointer, or just beside an array.
// Returns whether it was beside an array.
__attribute__((noinline)) bool outside(uintptr_t a, unsigned size, Kind kind, uintptr_t pc, unsigned thread) {
  for (const auto &range : c.ignored)
    if (a >= range.first && a < range.second) return false;
  uint32_t nearest = ~0u;
  uintptr_t best = ~(uintptr_t)0;
  for (uint32_t i = 0; i < c.regions.size(); ++i) {
    const Region &r = c.regions[i];
    uintptr_t distance = a + size > r.end && a >= r.begin ? a + size - r.end : a < r.begin ? r.begin - a : 0;
    if (distance < best) best = distance, nearest = i;
  }
  if (best > (1u << 20)) return false;  // constants, globals of the module: not the arrays' business
  report(ENGINE_OUT_OF_BOUNDS, nearest, a, size, pc, thread, kind == WRITE);
  return true;
}

__attribute__((noinline)) void access_books(Cached &hint, uintptr_t a, unsigned size, Kind kind, bool atomic, uintptr_t pc) {
  Region &r = *hint.region;
  EngineRegion &told = *r.told;
  const size_t offset = a - r.begin;
  if (told.fetches && kind == READ) {
    for (size_t i = offset / told.element; i * told.element < offset + size; ++i) told.fetches[i]++;
  }
  const unsigned thread = runs.thread;
  if (__builtin_expect((a & (size - 1)) != 0, 0)) report(ENGINE_MISALIGNED, hint.index, a, size, pc, thread, kind == WRITE);
  if (r.cells.empty()) return;
  if (told.state) {
    size_t element = offset / told.element, end = (offset + size + told.element - 1) / told.element;
    for (size_t i = element; i < end; ++i) {
      if (kind == WRITE) told.state[i] = ENGINE_WRITTEN;
      else if (told.state[i] == ENGINE_UNWRITTEN) report(ENGINE_UNINITIALISED, hint.index, a, size, pc, thread, false);
    }
  }
  check_order(r, hint.index, a, size, kind, atomic, pc, thread, hint.site);
}

inline void remember_event(uintptr_t address, uintptr_t pc, void *frame) {
  const uint32_t above = (uint32_t)((uintptr_t)frame - runs.stack_top);  // the deeper, the smaller
  LaneTrace &lane = *runs.trace;
  lane.events[lane.n++] = {address, (uint64_t)above << 32 | (uint32_t)(pc - profile.base)};
  while (__builtin_expect(lane.n == FULL, 0)) engine_pause();  // again, if the others could not catch up yet
}

// How many 32-byte sectors of global memory, or turns of shared memory, a request of these lanes takes.
void count_pieces(EngineSite &site, const Region &region, const uintptr_t *addresses, const unsigned char *lanes,
                  unsigned n) {
  const unsigned size = site.size;
  bool one_word = size <= 4, row = size == 4;  // the two usual patterns need no sorting
  for (unsigned i = 1; i < n; ++i) {
    one_word = one_word && addresses[i] == addresses[0];
    row = row && addresses[i] == addresses[0] + 4 * i;
  }
  if (region.told->kind == ENGINE_ARRAY) {
    if (one_word || row) {
      site.sectors += (addresses[n - 1] + size - 1) / 32 - addresses[0] / 32 + 1;
      return;
    }
    uintptr_t sectors[2 * 32];
    unsigned found = 0;
    for (unsigned i = 0; i < n; ++i)
      for (uintptr_t s = addresses[i] / 32; s <= (addresses[i] + size - 1) / 32; ++s) sectors[found++] = s;
    std::sort(sectors, sectors + found);
    site.sectors += (uint64_t)(std::unique(sectors, sectors + found) - sectors);
    return;
  }
  if (one_word || row) {
    site.wavefronts++;
    return;
  }
  // Shared memory: 32 banks of 4 bytes. A bank gives one word in a turn, to all that want it. Lanes with 8 or 16 bytes
  // each are served in groups of 16 or 8; of 32 or 16 where every lane i shares its address with lane i ^ 1, or every one
  // with lane i ^ 2, or that lane takes no part (measured on an H200: helpers/hardware.py).
  unsigned group = size <= 4 ? 32 : 128 / size;
  if (size > 4) {
    uintptr_t of[32] = {};
    bool paired[2] = {true, true};
    for (unsigned i = 0; i < n; ++i) of[lanes[i]] = addresses[i];
    for (unsigned i = 0; i < n; ++i)
      for (unsigned k = 0; k < 2; ++k) {
        const uintptr_t other = of[lanes[i] ^ (1 << k)];
        paired[k] = paired[k] && (other == 0 || other == addresses[i]);
      }
    if (paired[0] || paired[1]) group *= 2;
  }
  for (unsigned first = 0; first < n;) {
    uintptr_t words[32 * 4];
    unsigned found = 0, per_bank[32] = {}, turns = 1, i = first;
    for (; i < n && lanes[i] / group == lanes[first] / group; ++i)
      for (uintptr_t word = addresses[i] / 4; word <= (addresses[i] + size - 1) / 4; ++word) words[found++] = word;
    std::sort(words, words + found);
    found = (unsigned)(std::unique(words, words + found) - words);
    for (unsigned k = 0; k < found; ++k) turns = std::max(turns, ++per_bank[words[k] % 32]);
    site.wavefronts += turns;
    first = i;
  }
}

void remember_step(uint32_t site, uint32_t warp, uint32_t lanes) {
  const size_t place = (size_t)site * 32 + warp;
  if (place >= c.last_step.size()) c.last_step.resize(std::max(2 * c.last_step.size(), place + 32));
  uint32_t &last = c.last_step[place];
  if (last) {
    EngineStep &step = c.steps[last - 1];
    if (step.interval == c.interval && step.lanes == lanes && step.block == c.block) {
      step.count++;
      return;
    }
  }
  if (c.steps.size() == MOST_STEPS) {
    c.whole = std::min(c.whole, c.block);
    return;
  }
  c.steps.push_back({c.block, c.interval, warp, site, lanes, 1});
  last = (uint32_t)c.steps.size();
}

// One instruction of a warp: the lanes that execute it together, and where each of them reads or writes.
void count_request(uintptr_t pc, const uintptr_t *addresses, const unsigned char *lanes, unsigned n, unsigned warp) {
  Cached &hint = requests_cache[(pc >> 1 ^ pc >> 9) & 4095];
  if (hint.pc != pc || addresses[0] < hint.begin || addresses[0] - hint.begin > hint.span) {
    uint32_t i = 0;
    for (; i < c.sites.size(); ++i) {
      const Region &r = c.regions[c.sites[i].region];
      if (c.sites[i].pc == pc && addresses[0] >= r.begin && addresses[0] < r.end) break;
    }
    if (i == c.sites.size()) return;
    hint.pc = pc;
    hint.site = i;
    hint.region = &c.regions[c.sites[i].region];
    hint.begin = hint.region->begin;
    hint.span = hint.region->end - hint.begin - 1;
  }
  EngineSite &site = c.sites[hint.site];
  site.requests++;
  uint32_t mask = 0;
  for (unsigned i = 0; i < n; ++i) mask |= 1u << lanes[i];
  remember_step(hint.site, warp, mask);
  const uint64_t before = site.sectors + site.wavefronts;
  count_pieces(site, *hint.region, addresses, lanes, n);
  const uint64_t cost = site.sectors + site.wavefronts - before;
  if (cost > site.worst) {  // kept as an example, to draw
    site.worst = cost;
    site.worst_lanes = 0;
    for (unsigned i = 0; i < n; ++i) {
      site.worst_lanes |= 1u << lanes[i];
      site.worst_offsets[lanes[i]] = (uint32_t)(addresses[i] - hint.region->begin);
    }
  }
}

// Replay what the lanes of a warp did as a GPU would have: the lanes whose next instruction comes first in the code go
// first, together, and the others wait for them. Lanes that left a loop early wait behind it for those still in it.
// The lanes in `unfinished` will go on: where one of them has no more events, nobody knows yet what comes next.
void merge_warp(unsigned first, unsigned n, unsigned unfinished) {
  LaneTrace *lanes = &profile.lanes[first];
  const Event *at[32], *end[32];
  unsigned there = 0;  // lanes with events left
  for (unsigned i = 0; i < n; ++i) {
    at[i] = lanes[i].events;
    end[i] = at[i] + lanes[i].n;
    if (lanes[i].n) there |= 1u << i;
  }
  uintptr_t addresses[32];
  unsigned char who[32];
  while (there && !(unfinished & ~there)) {
    const uint64_t guess = at[__builtin_ctz(there)]->key;
    uint64_t next = guess, different = 0;
    unsigned together = 0;
    for (unsigned i = 0; i < n; ++i) {
      if (!(there >> i & 1)) continue;
      const Event &e = *at[i];
      different |= e.key ^ guess;
      next = std::min(next, e.key);
      who[together] = (unsigned char)i;
      addresses[together++] = e.address;
    }
    if (different) {  // the warp has diverged: only those who come first
      together = 0;
      for (unsigned i = 0; i < n; ++i) {
        if (!(there >> i & 1) || at[i]->key != next) continue;
        who[together] = (unsigned char)i;
        addresses[together++] = at[i]->address;
      }
    }
    for (unsigned k = 0; k < together; ++k)
      if (++at[who[k]] == end[who[k]]) there &= ~(1u << who[k]);
    if (addresses[0]) count_request(profile.base + (uint32_t)next, addresses, who, together, first / 32);
  }
  for (unsigned i = 0; i < n; ++i) {
    lanes[i].n = (unsigned)(end[i] - at[i]);
    if (lanes[i].n) memmove(lanes[i].events, at[i], lanes[i].n * sizeof(Event));
  }
}

__attribute__((noinline)) void access_first(uintptr_t a, unsigned size, Kind kind, bool atomic, uintptr_t pc, void *frame) {
  if (!c.running) return;
  uint32_t index = 0;
  while (index < c.regions.size() && !(a >= c.regions[index].begin && a + size <= c.regions[index].end)) ++index;
  if (index == c.regions.size()) {
    // The lane keeps in step with the others of its warp, which may be inside.
    if (outside(a, size, kind, pc, runs.thread) && profile.running) remember_event(a, pc, frame);
    return;
  }
  Region &r = c.regions[index];
  Cached &hint = cache[(pc >> 1 ^ pc >> 9) & 4095];
  hint.pc = pc;
  hint.begin = r.begin;
  hint.span = r.end - r.begin - size;
  hint.index = index;
  hint.region = &r;
  hint.site = site_for(pc, index, size, kind, atomic);
  hint.count = &c.sites[hint.site].count;
  const bool plain = kind == READ && r.cells.empty() && size == r.told->element;
  hint.fetches = plain ? r.told->fetches : nullptr;
  hint.cells = r.told->kind != ENGINE_ARRAY && size == r.grain ? r.cells.data() : nullptr;
  hint.shift = (unsigned)__builtin_ctz(size);
  if (profile.running) remember_event(a, pc, frame);
  ++*hint.count;
  if (hint.fetches && (a & (size - 1)) == 0) ++hint.fetches[(a - r.begin) >> hint.shift];
  else access_books(hint, a, size, kind, atomic, pc);
}

inline __attribute__((always_inline)) void access(void *address, unsigned size, Kind kind, bool atomic, void *caller) {
  const uintptr_t a = (uintptr_t)address, pc = (uintptr_t)caller;
  void *const frame = __builtin_frame_address(0);  // the hook's, as this is inlined
  Cached &hint = cache[(pc >> 1 ^ pc >> 9) & 4095];
  const uintptr_t offset = a - hint.begin;
  if (__builtin_expect(hint.pc != pc || offset > hint.span, 0)) return access_first(a, size, kind, atomic, pc, frame);
  if (profile.running) remember_event(a, pc, frame);
  ++*hint.count;
  if (hint.fetches && (a & (size - 1)) == 0) {
    ++hint.fetches[offset >> hint.shift];
    return;
  }
  if (kind == READ && hint.cells && (a & (size - 1)) == 0) {
    // The common case: written by this block before the last barrier, and now only read.
    Cell &cell = hint.cells[offset >> hint.shift];
    if (cell.write < c.barrier_tag && cell.write >= c.block_tag) {
      remember_read(cell, tag_of(c.epoch, runs.thread, atomic), hint.site);
      return;
    }
  }
  access_books(hint, a, size, kind, atomic, pc);
}

}  // namespace

// ---------------------------------------------------------------- what the engine tells

bool checking() { return c.wanted; }

void check_ignore(const void *begin, size_t bytes) {
  c.ignored.emplace_back((uintptr_t)begin, (uintptr_t)begin + bytes);
}

void check_block_end(unsigned n_threads) {
  check_merge(n_threads);
  settle_same_value();
  settle_guesses();
  c.running = profile.running = false;
  forget();
}

void check_switch(unsigned thread, const void *stack_top) {
  runs = {thread, (uintptr_t)stack_top, profile.lanes.empty() ? nullptr : &profile.lanes[thread]};
}

void check_block(uint64_t block, unsigned n_warps, const void *static_shared, const void *dynamic_shared) {
  c.block = block;
  c.interval = 0;
  c.running = true;
  profile.running = profile.wanted;
  c.block_epoch = c.barrier_epoch = ++c.epoch;
  c.block_tag = c.barrier_tag = tag_of(c.epoch, 0, false);
  forget();  // shared memory may have moved
  c.block_begins.push_back(c.epoch);
  c.block_numbers.push_back(block);
  for (LaneTrace &lane : profile.lanes) lane.n = 0, lane.last_block = 0;
  c.warp_epoch.assign(n_warps, c.epoch);
  c.lane_epochs.assign(n_warps, {});
  c.fences[0].clear();
  c.fences[1].clear();
  c.known.clear();
  c.known_to.clear();
  for (Region &r : c.regions) {
    const void *now = r.told->kind == ENGINE_STATIC_SHARED ? static_shared
                      : r.told->kind == ENGINE_DYNAMIC_SHARED ? dynamic_shared : nullptr;
    if (now) {
      r.begin = (uintptr_t)now + r.told->address;  // of shared memory: the offset in it
      r.end = r.begin + r.told->bytes;
    }
  }
}

void check_merge(unsigned n_threads) {
  if (!profile.running) return;
  for (unsigned first = 0; first < n_threads; first += 32) merge_warp(first, std::min(32u, n_threads - first), 0);
}

void check_merge_warp(unsigned warp, unsigned n_threads, unsigned unfinished) {
  if (profile.running) merge_warp(warp * 32, std::min(32u, n_threads - warp * 32), unfinished);
}

void check_barrier(const char *file, int line) {
  settle_same_value();
  settle_guesses();
  ++c.barriers;
  ++c.interval;
  if (profile.running && c.reached.size() < MOST_STEPS) c.reached.push_back({c.block, file, line});
  c.barrier_epoch = ++c.epoch;
  c.barrier_tag = tag_of(c.epoch, 0, false);
  for (const auto &one : c.known_to) learn(c.known, one.second);
  c.known_to.clear();
}

void check_collective() { ++c.collectives; }

void check_warp_sync(unsigned warp, unsigned mask) {
  settle_same_value();
  ++c.epoch;
  if (!c.known_to.empty()) {
    Known all;
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) learn(all, c.known_to[warp * 32 + lane]);
    for (unsigned lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) c.known_to[warp * 32 + lane] = all;
  }
  if (mask == ~0u) {
    c.warp_epoch[warp] = c.epoch;
    return;
  }
  auto &lanes = c.lane_epochs[warp];
  if (lanes.empty()) lanes.assign(32 * 32, 0);
  for (unsigned a = 0; a < 32; ++a)
    for (unsigned b = 0; b < 32; ++b)
      if ((mask >> a & 1) && (mask >> b & 1)) lanes[a * 32 + b] = c.epoch;
}

void check_fence(bool own_block) {
  const unsigned thread = runs.thread;
  for (int scope = own_block; scope < 2; ++scope) {
    auto &fences = c.fences[scope];
    if (c.fences[0].empty()) c.fences[0].resize(c.warp_epoch.size() * 32);
    if (fences.empty()) fences.resize(c.warp_epoch.size() * 32);
    fences[thread] = {c.epoch, c.barrier_epoch, c.warp_epoch[thread / 32]};
  }
  ++c.epoch;
}

#include "checker_async.h"

// One OS thread runs the blocks of a checked launch, so the plain operation is atomic enough. These are inlined: the
// frame and the caller are the hook's.
template <typename T>
__attribute__((always_inline)) inline void before_atomic_write(volatile T *p, void *caller) {
  take_up((uintptr_t)p);
  access((void *)p, sizeof(T), WRITE, true, caller);
  release((uintptr_t)p);
}

template <typename T>
__attribute__((always_inline)) inline T compare_exchange(volatile T *p, T expected, T v, void *caller) {
  compare((uintptr_t)p, sizeof(T));
  before_atomic_write(p, caller);
  T old = *p;
  if (old == expected) *p = v;
  return old;
}

template <typename T>
__attribute__((always_inline)) inline int compare_exchange_at(volatile T *p, T *expected, T v, void *caller) {
  T old = compare_exchange(p, *expected, v, caller);
  if (old == *expected) return 1;
  *expected = old;
  return 0;
}

// ---------------------------------------------------------------- what the compiler calls

extern "C" {

#define CALLER __builtin_return_address(0)
#define HOOKS(SIZE)                                                                                        \
  void __tsan_read##SIZE(void *p) { access(p, SIZE, READ, false, CALLER); }                                \
  void __tsan_write##SIZE(void *p) { access(p, SIZE, WRITE, false, CALLER); }                              \
  void __tsan_unaligned_read##SIZE(void *p) { access(p, SIZE, READ, false, CALLER); }                      \
  void __tsan_unaligned_write##SIZE(void *p) { access(p, SIZE, WRITE, false, CALLER); }                    \
  /* volatile is how older kernels signal each other: no race by itself */                                 \
  void __tsan_volatile_read##SIZE(void *p) {                                                               \
    take_up((uintptr_t)p);                                                                                 \
    access(p, SIZE, READ, true, CALLER);                                                                   \
  }                                                                                                        \
  void __tsan_volatile_write##SIZE(void *p) {                                                              \
    access(p, SIZE, WRITE, true, CALLER);                                                                  \
    release((uintptr_t)p);                                                                                 \
  }                                                                                                        \
  void __tsan_unaligned_volatile_read##SIZE(void *p) { access(p, SIZE, READ, true, CALLER); }              \
  void __tsan_unaligned_volatile_write##SIZE(void *p) { access(p, SIZE, WRITE, true, CALLER); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS

static void range(void *p, size_t bytes, Kind kind, void *caller) {
  for (size_t i = 0; i < bytes;) {
    unsigned size = 16;  // in pieces as wide as a GPU would take them
    while (size > 1 && (size > bytes - i || ((uintptr_t)p + i) % size)) size /= 2;
    access((char *)p + i, size, kind, false, caller);
    i += size;
  }
}
void __tsan_read_range(void *p, size_t bytes) { range(p, bytes, READ, CALLER); }
void __tsan_write_range(void *p, size_t bytes) { range(p, bytes, WRITE, CALLER); }
void __tsan_init() {}
// At the start of every basic block of a profiled kernel.
void __sanitizer_cov_trace_pc() {
  if (!profile.running) return;
  const uintptr_t pc = (uintptr_t)CALLER;
  LaneTrace &lane = *runs.trace;
  if (pc <= lane.last_block) remember_event(0, pc, __builtin_frame_address(0));
  lane.last_block = pc;
}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_atomic_thread_fence(int order) {
  if (c.running) check_fence(order != __ATOMIC_SEQ_CST);  // as cuda_runtime.h spells __threadfence_block
}
void __tsan_atomic_signal_fence(int) {}

#define ATOMICS(BITS, T)                                                                                   \
  T __tsan_atomic##BITS##_load(const volatile T *p, int) {                                                 \
    take_up((uintptr_t)p);                                                                                 \
    access((void *)p, BITS / 8, READ, true, CALLER);                                                       \
    return *p;                                                                                             \
  }                                                                                                        \
  void __tsan_atomic##BITS##_store(volatile T *p, T v, int) {                                              \
    before_atomic_write(p, CALLER);                                                                        \
    *p = v;                                                                                                \
  }                                                                                                        \
  T __tsan_atomic##BITS##_exchange(volatile T *p, T v, int) {                                              \
    before_atomic_write(p, CALLER);                                                                        \
    T old = *p;                                                                                            \
    *p = v;                                                                                                \
    return old;                                                                                            \
  }                                                                                                        \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T *p, T *expected, T v, int, int) {           \
    return compare_exchange_at(p, expected, v, CALLER);                                                    \
  }                                                                                                        \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile T *p, T *expected, T v, int, int) {             \
    return compare_exchange_at(p, expected, v, CALLER);                                                    \
  }                                                                                                        \
  T __tsan_atomic##BITS##_compare_exchange_val(volatile T *p, T expected, T v, int, int) { /* clang's */   \
    return compare_exchange(p, expected, v, CALLER);                                                       \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
#undef ATOMICS

// ---------------------------------------------------------------- what Python calls

void engine_check_start(const EngineRegion *regions, unsigned n, uint64_t profiled_code) {
  c = Checker();
  profile = Profile();
  profile.base = profiled_code;
  profile.wanted = profiled_code != 0;
  if (profile.wanted) profile.lanes.resize(1024);
  forget();
  c.regions.resize(n);
  for (unsigned i = 0; i < n; ++i) {
    Region &r = c.regions[i];
    r.told = const_cast<EngineRegion *>(&regions[i]);
    r.begin = regions[i].address;
    r.end = r.begin + regions[i].bytes;
    if (regions[i].writable) r.cells.resize((regions[i].bytes + 3) / 4);
  }
  c.wanted = true;
}

void engine_check_stop() {
  c.wanted = c.running = profile.wanted = profile.running = false;
  profile.lanes.clear();
  forget();
}

void engine_check_counts(uint64_t *barriers, uint64_t *collectives) {
  *barriers = c.barriers;
  *collectives = c.collectives;
}

unsigned engine_check_findings(const EngineFinding **out) {
  *out = c.findings.data();
  return (unsigned)c.findings.size();
}

unsigned engine_check_steps(const EngineStep **out, uint64_t *whole) {
  *out = c.steps.data();
  *whole = c.whole;
  return (unsigned)c.steps.size();
}

unsigned engine_check_barriers(const EngineBarrier **out) {
  *out = c.reached.data();
  return (unsigned)c.reached.size();
}

unsigned engine_check_sites(EngineSite *out, unsigned most) {
  for (unsigned i = 0; i < most && i < c.sites.size(); ++i) out[i] = c.sites[i];
  return (unsigned)c.sites.size();
}

}  // extern "C"
