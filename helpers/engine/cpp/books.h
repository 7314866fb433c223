// The records of a checked run that the checker's parts share: which thread touched each byte last, which events order
// accesses, what was found, and the traces of a profile.
//
// One OS thread runs all blocks, one after the other, so the books need no locks and are the same every time. What
// every access of a kernel goes through is inline here or in checker_hooks.cpp; all else is a call away.
#pragma once
#include "checker.h"

#include <string.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// ---------------------------------------------------------------- which thread touched what, and when

enum Kind { READ = 0, WRITE = 1 };

enum How { PLAIN = 0, ATOMIC = 1, VOLATILE = 2, SIGNAL = 3 };  // SIGNAL: a volatile write after a fence of its thread

// When and by whom: the epoch counts every event that can order accesses, so a later epoch is a later time.
// rank: of the thread's block in its cluster.
typedef uint64_t Tag;   // epoch << 16 | rank << 13 | thread << 2 | how
unsigned own_rank = 0;  // of the block that runs
Tag tag_of(uint64_t epoch, unsigned thread, How how, unsigned rank = own_rank) {
  return epoch << 16 | (uint64_t)rank << 13 | (uint64_t)thread << 2 | how;
}
uint64_t epoch_of(Tag t) { return t >> 16; }
unsigned rank_of(Tag t) { return (unsigned)(t >> 13) & 7; }
unsigned thread_of(Tag t) { return (unsigned)(t >> 2) & 2047; }
How how_of(Tag t) { return (How)(t & 3); }
constexpr uint64_t IN_FLIGHT = ~0ull >> 16;  // epoch of a write by an asynchronous copy that has not been waited for

// Units that access memory besides the threads have numbers as if they were threads: the products of each warpgroup, the
// stores by TMA of each warp, the loads that arrive at each mbarrier. UNSEEN: the stores of each warp that have read shared
// memory, but may not have written: no thread knows of those.
constexpr unsigned PRODUCTS = 1024, STORES = PRODUCTS + 8, UNSEEN = STORES + 32, LOADS = UNSEEN + 32, AGENTS = 160;
inline unsigned agent_of_loads(unsigned mbarrier) { return LOADS + mbarrier % (PRODUCTS + AGENTS - LOADS); }
inline bool is_agent(unsigned thread) { return thread >= PRODUCTS; }
inline bool is_unseen(unsigned thread) { return thread >= UNSEEN && thread < LOADS; }

struct Cell {  // of `grain` bytes
  Tag write = 0, read = 0, other_read = 0;
  uint32_t write_site = 0, read_site = 0, other_read_site = 0;
};

struct Region {
  EngineRegion* told = nullptr;
  uint32_t number = 0;  // of what Python has told, where each block of a cluster has one of them
  unsigned rank = 0;    // of shared memory: whose
  uint64_t since = 0;   // the epoch at which that block began
  uintptr_t begin = 0, end = 0;
  unsigned grain = 4, shift = 2;
  std::vector<Cell> cells;  // empty for arrays that the kernel cannot write

  bool is_shared() const { return told->kind == ENGINE_STATIC_SHARED || told->kind == ENGINE_DYNAMIC_SHARED; }
};

// ---------------------------------------------------------------- order

// Order between threads that no barrier joins: a fence, then an atomic write of a word, releases what came before the
// fence; whoever reads that word by an atomic takes it up at the fence or the barrier that follows, and hands it on at
// barriers and by releases. (By the letter it has to be a fence. Sound kernels leave it to a __syncthreads.)
// Word -> how many of its releases; and by another key (seen_key), the epoch of its last atomic write that was seen.
typedef std::unordered_map<uint64_t, size_t> Known;

// Up to which epoch each thread is ordered after each of the others, and after those units (agents), by mbarriers and by
// named barriers of some threads. Slots: the threads, then the agents.
struct Clock : std::vector<uint64_t> {
  using std::vector<uint64_t>::vector;
  Known known;  // what threads that arrived there hand on of releases
};
struct Fence {
  uint64_t epoch = 0, barrier_epoch = 0, warp_epoch = 0;  // when, and what this thread knew of others then
  Clock clock;
};
struct Release {
  uint64_t block_epoch, barrier_epoch, warp_epoch;
  unsigned warp;
  bool own_block;                                     // by __threadfence_block
  std::vector<std::pair<unsigned, uint64_t>> fences;  // of threads: all they did up to this epoch
  Clock clock;
  Known known;
};

// A possible race; the next write, or the next event that orders accesses, decides.
struct SameValue {                 // two threads wrote one place: another thing where the value is the same
  bool is_open = false, one_step;  // one_step: lanes of a warp, by one instruction, which is then no race at all
  How how;
  uint32_t region, other_site;
  uintptr_t address, pc;
  unsigned size, thread;
  Tag other;
  unsigned char first[16];
};

// A plain read and atomic writes, as CUDA's own example of a loop around atomicCAS begins: the atomicCAS tells the
// thread whether what it read still holds. A race if no such follows.
struct Guess {
  uint32_t region, site;
  uintptr_t address, pc;
  unsigned size, thread;
  Tag other;
  uint32_t other_site;
};

// A thread has waited for a phase. product, copy: the first that it issued after that.
struct Awaited {
  uint64_t epoch = 0;
  uintptr_t pc = 0;
  Tag product = 0, copy = 0;
  bool is_known = false;  // to a thread that arrived for the next phase, or sent a copy to it
};

struct MbarrierBooks {
  Clock arriving, over;          // what the arrived threads know; the same when its last phase ended
  std::vector<Awaited> awaited;  // that phase, by thread
  uintptr_t word = 0;
  bool is_initialised = false, is_fenced = false;
  bool is_told = false, is_known = false;  // after the fence its thread arrived at barrier.cluster; and all did
  unsigned thread = 0;                     // that initialised it
  uint64_t epoch = 0;
  uintptr_t pc = 0;
  unsigned arrived = 0;  // the thread that arrived last, its block, and where
  uint64_t arrived_block = 0;
  uintptr_t arrived_pc = 0;
};

// ---------------------------------------------------------------- a profile

constexpr size_t VARIABLE_REDZONE = 4096;  // before each variable of a module, by assembly.py
constexpr size_t MOST_GUESSES = 4096, MOST_STEPS = 1 << 20;

// A lane's accesses since its warp was last merged. address 0: a jump backwards, that is, one more turn of a loop.
struct Event {
  uintptr_t address;
  uint64_t key;  // what goes first is smaller: the deeper call, then the earlier code (relative to the module)
};

// Events of a lane after which it lets the other lanes catch up: a warp's fit the cache.
constexpr unsigned FULL = 1024;
struct LaneTrace {
  unsigned n = 0;
  uintptr_t last_block = 0;  // the basic block it entered last
  Event events[FULL];
};

struct Profile {
  bool wanted = false, running = false;
  uintptr_t base = 0;            // of the kernel's code
  std::vector<LaneTrace> lanes;  // by thread of the block
};

// ---------------------------------------------------------------- the books

// What of the books belongs to the running block: it is kept apart while the block waits for others.
struct BlockBooks {
  // Order by barriers. Epochs at which the block began, and passed its last barrier.
  uint64_t barrier_epoch = 1, block_epoch = 1, block = 0;
  Tag barrier_tag = 0, block_tag = 0;              // the smallest tags since then
  std::vector<uint64_t> warp_epoch;                // of the last full __syncwarp, by warp
  std::vector<std::vector<uint64_t>> lane_epochs;  // by warp: [lane][other], of their last partial one

  // Order by fences and atomics.
  std::vector<Fence> fences[2];                  // by scope (device, block) and thread
  Known known;                                   // to all threads of the block
  std::unordered_map<unsigned, Known> known_to;  // to one of them
  std::unordered_map<unsigned, Known> seen_by;   // read by one of them, and not taken up yet

  // Order by mbarriers and the like; empty until there is such.
  std::vector<Clock> clocks;  // by thread
  Clock everyone;             // what all threads of the block know
  std::vector<MbarrierBooks> mbarriers;
  std::vector<Clock> named;                         // what threads know that arrived at a numbered barrier
  std::vector<unsigned> sent_by;                    // by agent: rank << 16 | thread that issued last
  std::vector<std::vector<uint64_t>> proxy_fences;  // by thread
  std::vector<std::vector<unsigned>> waited_since;  // by thread: mbarriers awaited since its last product

  std::vector<unsigned> has_begun;  // by thread: the blocks of the cluster that it knows to have begun, by bit
  bool ended = false;
  std::vector<uint64_t> told;  // by thread: when it last told others what it did, by a fence or an arrival

  std::vector<Guess> guesses;
  uint32_t interval = 0;               // how many barriers it has passed
  std::vector<Region> shared_regions;  // of a block that is set aside
};

struct Books : BlockBooks {
  bool running = false;  // inside a block, where a thread is running
  std::vector<Region> regions;
  std::deque<EngineSite> sites;  // a site stays where it is: its count is pointed at
  std::vector<EngineFinding> findings;
  std::unordered_map<uint64_t, uint32_t> site_index, finding_index;
  std::unordered_map<uintptr_t, std::vector<uintptr_t>> callers;  // of an access in a function: its first callers
  uint64_t barriers = 0, collectives = 0, warp_barriers = 0, tensor_flop = 0;

  Tag cluster_tag = 0;                                // the smallest since all threads of a cluster met
  uint64_t epoch = 1, grid_epoch = 0;                 // grid_epoch: of the last grid.sync()
  bool interleaved = false;                           // blocks have waited for others
  unsigned cluster = 1;                               // blocks of a cluster
  uint64_t cluster_epoch = 0;                         // when the one that runs began
  Clock cluster_arriving, cluster_over;               // of barrier.cluster, as of an mbarrier
  uint64_t cluster_first = 0;                         // the first arrival at barrier.cluster in its turn
  unsigned n_told = 0;                                // regions; behind them those of a cluster's other blocks
  std::vector<uint64_t> block_begins;                 // epoch at which each block began or went on, to name a block
  std::vector<uint64_t> block_numbers, block_epochs;  // of those blocks, and when they began

  std::unordered_map<uint64_t, std::vector<Release>> releases;                         // by word, in their order
  std::unordered_map<uint64_t, std::vector<std::pair<uint64_t, size_t>>> released_by;  // by block epoch: word, place

  // By address: plain writes behind an atomic of the same thread, which told some others of them, and not all.
  std::unordered_map<uintptr_t, std::pair<Tag, uint32_t>> behind_atomics;

  SameValue same_value;
  std::vector<EngineLeft> left;  // one for each barrier

  // With a profile.
  std::vector<EngineStep> steps;
  std::vector<uint32_t> last_step;     // by site and warp, one more than its index
  std::vector<EngineBarrier> reached;  // barriers
  std::vector<EngineEvent> events;
  uint64_t whole = ~0ull;  // from this block on, steps are missing: there were too many
};

Books books;
Profile profile;

constexpr size_t STACK_REACH = 256 * 1024;  // of a thread's stack: what lies so far below its top is local

struct Running {  // what every access needs of the running thread
  unsigned thread;
  uintptr_t stack_top;
  LaneTrace* trace;
};
Running current;

// What the last access of an instruction found, so that the next one finds it in a glance.
struct Cached {
  uintptr_t pc = 0, begin = 0, span = 0;  // an access at begin .. begin + span lies in the region
  uint64_t* count = nullptr;
  uint32_t* fetches = nullptr;  // where one element is read: its count is all there is to keep
  Cell* cells = nullptr;        // where shared memory is read, a cell at a time
  Region* region = nullptr;
  uint32_t index = 0, site = 0, shift = 0;
};

constexpr unsigned SLOTS = 4096;
Cached cache[SLOTS], requests_cache[SLOTS];  // of accesses; of a warp's requests
inline Cached& slot_of(Cached* slots, uintptr_t pc) { return slots[(pc >> 1 ^ pc >> 9) & (SLOTS - 1)]; }

void forget() {
  std::fill(cache, cache + SLOTS, Cached());
  std::fill(requests_cache, requests_cache + SLOTS, Cached());
}

// ---------------------------------------------------------------- what every access goes through

// Two reads since the last barrier are kept, by threads of different warps if there are such: whoever writes next
// is another thread than at least one of them.
inline void remember_read(Cell& cell, Tag mine, uint32_t site) {
  // (Of other blocks: since the cluster met last, as a barrier of one block does not order what others read.)
  const auto since = [](Tag t) {
    return books.cluster > 1 && rank_of(t) != own_rank ? books.cluster_tag : books.barrier_tag;
  };
  constexpr Tag WHO = 0xFFFC, WARP_OF = 0xFF80;  // rank and thread, rank and warp
  if (cell.read >= since(cell.read) && (cell.read ^ mine) & WHO) {
    const bool keep = cell.other_read >= since(cell.other_read) && (cell.other_read ^ mine) & WARP_OF;
    if (!keep) {
      cell.other_read = cell.read;
      cell.other_read_site = cell.read_site;
    }
  }
  cell.read = mine;
  cell.read_site = site;
}

inline void remember_event(uintptr_t address, uintptr_t pc, void* frame) {
  const uint32_t above = (uint32_t)((uintptr_t)frame - current.stack_top);  // the deeper, the smaller
  LaneTrace& lane = *current.trace;
  lane.events[lane.n++] = {address, (uint64_t)above << 32 | (uint32_t)(pc - profile.base)};
  while (__builtin_expect(lane.n == FULL, 0)) engine_pause();  // again, if the others could not catch up yet
}

// The cells that hold the bytes, where the kernel can write them.
template <typename F>
void for_cells(uintptr_t a, unsigned bytes, F f) {
  for (Region& r : books.regions) {
    if (r.cells.empty() || a < r.begin || a + bytes > r.end) continue;
    for (size_t i = (a - r.begin) >> r.shift; i <= (a + bytes - 1 - r.begin) >> r.shift; ++i) f(r.cells[i]);
    return;
  }
}

// The thread that issued what an agent does; of a block that is over, the first thread of its warp or warpgroup.
BlockBooks& books_of(unsigned rank);  // checker_clocks.cpp
bool same_cluster(Tag t);             // checker_order.cpp
bool same_block(Tag t);
inline unsigned asker(Tag t) {
  const unsigned thread = thread_of(t);
  if (!is_agent(thread)) return thread;
  if (same_cluster(t) || same_block(t)) {
    const auto& sent_by = books_of(rank_of(t)).sent_by;
    if (thread - PRODUCTS < sent_by.size()) return sent_by[thread - PRODUCTS] & 0xFFFF;
  }
  if (thread < STORES) return (thread - PRODUCTS) * 128;
  return thread < LOADS ? (thread - STORES) % 32 * 32 : 0;
}

// ---------------------------------------------------------------- what one part does for those after it

// checker_lists.cpp
uint64_t block_of(Tag t);
void add_finding(const EngineFinding& f, uint64_t key);
EngineFinding finding_at(int kind, const char* file, int line);
void know_callers(uintptr_t pc);
uint32_t site_for(uintptr_t pc, uint32_t region, unsigned size, Kind kind, How how);
void report(
    int kind, uint32_t region, uintptr_t address, unsigned size, uintptr_t pc, unsigned thread, bool write,
    Tag other = 0, uint32_t other_site = 0, bool other_write = false, How how = PLAIN);

// checker_clocks.cpp
void need_clocks(BlockBooks& of = books);
Clock& clock_of(unsigned thread);
void raise(Clock& to, const Clock& from);
void take_knowledge(unsigned thread, const Clock& from);
void leave_knowledge(Clock& to, unsigned thread);
unsigned slot_of(Tag t);
uint64_t clocked(unsigned thread, unsigned slot);
void join_clocks(unsigned warp, unsigned mask);
void join_all_clocks();

// checker_order.cpp
bool ordered(Tag before, unsigned thread);
bool released(Tag before, unsigned thread);
bool has_released(uint64_t block_epoch, unsigned thread);
void tell(unsigned thread);
bool may_meet(Tag before, Tag mine);
How volatile_write();
void take_up(uintptr_t address);
void acquire(unsigned thread, bool own_block = false);
void acquire_all();
void learn(Known& to, const Known& from);
void observe(uintptr_t address, unsigned size);
bool observed(uintptr_t address, Tag write, unsigned thread);
void release(uintptr_t address);
void settle_same_value(bool differs = false);
void settle_guesses();

// checker_access.cpp
uint32_t region_of(uintptr_t a, unsigned size);
void access_first(uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc, void* frame);
void access_found(uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc);
void access_books(Cached& hint, uintptr_t a, unsigned size, Kind kind, How how, uintptr_t pc);
void compare(uintptr_t a, unsigned size);

}  // namespace
