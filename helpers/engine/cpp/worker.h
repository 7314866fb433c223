// What the engine's parts share: a launch, the fibers of a block, the worker that runs them, the pool of workers.
//
// A CUDA thread is a fiber. A worker is an OS thread that runs one block at a time, so fibers of a block need no locks;
// workers meet in the pool alone. compiler.py joins all parts into one translation unit, in its order: what is declared
// here stays local to it, and one part's small functions are inlined into another's.
#pragma once
#if defined(__APPLE__) && !defined(_XOPEN_SOURCE)
#define _XOPEN_SOURCE 700  // <ucontext.h> needs it, and
#define _DARWIN_C_SOURCE   // dladdr and MAP_ANONYMOUS need this too
#endif
#include "checker.h"
#include "engine.h"
#include "switch_stacks.h"
#include "tensor_map.h"

#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

// The running Worker. Both of the engine's objects (compiler.py) use it, and outside of one its type has no name.
extern "C" __thread void* engine_worker ENGINE_TLS;

namespace {

using engine::BarrierOp;
using engine::Collective;
using engine::Lane;

constexpr unsigned WARP = 32, GROUP = 128;  // threads of a warp, of a warpgroup
constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;  // address space only: pages are used when they are touched
constexpr size_t DYNAMIC_BYTES = 256 * 1024;
constexpr size_t STATIC_BYTES = 16 << 20;  // the __shared__ arrays of all kernels of a module
// They end so far before their window does: wgmma's descriptors distinguish them from dynamic memory by 18 bits of an address.
constexpr size_t STATIC_SHIFT = 192 * 1024;
constexpr unsigned STATIC_OFFSET = 1u << 30;  // of __shared__ arrays that the C library has placed, in shared addresses
constexpr size_t GUARD_BYTES = 1 << 20;       // no-man's-land around arrays: also a stride of many rows ends in it
constexpr size_t SHARED_WINDOW = 3 * GUARD_BYTES + STATIC_BYTES + DYNAMIC_BYTES;
// Shared memory of the blocks of a cluster: each has its window at such a multiple of one base.
constexpr size_t PEER_STRIDE = 64 << 20;
constexpr unsigned MAX_CLUSTER = 8;
static_assert(engine::SHARED_BYTES == SHARED_WINDOW, "kernels tell their own shared memory from all other");
constexpr size_t CHECKED_SLACK = 16 * 1024;  // between dynamic shared memory and its guard, in a checked run
constexpr std::chrono::microseconds LONG_SLICE{50'000}, SHORT_SLICE{100};  // a thread's time before others are let run
constexpr std::chrono::microseconds LONG_TURN{2'000'000}, SHORT_TURN{20'000};  // a block's
constexpr unsigned char POISON = 0xFF;                                         // as float, half or double: NaN

// ---------------------------------------------------------------- a launch; structures.py has the same two structs

extern "C" struct EngineLaunch {
  void (*run)(void** args);
  void** args;
  unsigned grid[3], block[3], cluster[3];
  uint64_t dynamic_shared;
  // The static __shared__ arrays are the thread-local segment of the kernel's module. Of it the kernel uses the bytes
  // from static_begin to static_end; `anchor` gives the address of the byte at anchor_offset.
  uint64_t static_begin, static_end, static_align;
  uint64_t static_aligned;  // the byte of static shared memory that is at a multiple of static_align
  uint64_t anchor_offset;
  char* (*anchor)();
  uint64_t most_blocks;    // so many may have begun at once
  uint64_t cooperative;    // 1: all blocks do, and may meet in grid.sync()
  uint64_t dynamic_align;  // of dynamic shared memory
  uint64_t registers;      // of a thread, by __launch_bounds__; 0: not known
  uint64_t order;          // 0: warp after warp; else the seed of another order of warps and copies
  const char* maps;        // the tensor maps among the arguments, 128 bytes each
  uint64_t n_maps;
};

// Why a block was given up, and in which fields the details are; failures.py makes words of them.
enum FailureReason : int {
  NONE,
  STATED,                 // message: by the kernel (an assertion, a trap) or by a header that refuses something
  MISALIGNED,             // message: what is to be aligned
  LEFT_BEFORE_GRID_SYNC,  // count blocks wait in grid.sync() at file:line; other_count have ended without it
  TWO_BARRIERS,           // other_thread waits at file:line, thread at other_file:other_line
  LANES_NEVER_COME,       // thread waits in name for mask; lanes of it never come; other_lane waits in other_name
  NAMED_BARRIER_STARVED,  // thread waits in barrier `number`, where count have arrived
  NOT_IN_OWN_MASK,        // lane calls name with mask
  DIFFERENT_OPERATIONS,   // lane is in name at file:line, other_lane in other_name at other_file:other_line
  INCOMPLETE_WARP,        // name is for whole warps, and lanes are missing
  WRONG_NAMED_BARRIER,    // its number or its count of threads
  NO_SHARED_POINTER,      // a generic address that is not in shared memory
  SHARED_MISALIGNED,      // name takes multiples of count bytes, and address is none
  OUTSIDE_SHARED,         // name takes an address within shared memory, and address is none
  ILLEGAL_ACCESS,         // of address; is_write: -1 where it is not known
  MISALIGNED_ACCESS,      // the processor does not say of which address
  STACK_OVERFLOW,
  WRONG_DIVISION,
  TRAPPED,
  EXPIRED,            // the watchdog had waited long enough
  ABORTED,            // by abort(), or by a check of the C library's
  MBARRIER_STARVED,   // thread waits for the phase of parity `number` of the mbarrier at address; message: all waiting
  WARPGROUP_STARVED,  // thread waits in name for its warpgroup; message: all waiting
  OUTSIDE_TILE,       // message: an instruction that takes a tile in shared memory, and where that is
  REGISTERS_STARVED,  // thread waits in setmaxnreg.inc for number registers of each thread; count are free in the pool
  CLUSTER_STARVED,    // thread waits in barrier.cluster, where count of other_count threads of the cluster have arrived
  N_REASONS
};

extern "C" struct EngineFailure {
  int reason;
  int signal, is_write, line, other_line;
  uint64_t block, address, place;                    // place: in the module, 0 if not known
  uint64_t static_base, dynamic_base, dynamic_size;  // where the block's shared memory was
  unsigned thread, other_thread, lane, other_lane, mask, lanes, number, count, other_count;
  char file[256], other_file[256], name[96], other_name[96], message[1024];
};

// ---------------------------------------------------------------- what runs it

// What a cp.async has read and not written yet.
struct AsyncCopy {
  char* target;
  engine::Words data;
  unsigned bytes, group;
  void* caller;  // where the kernel issued it
};

// An atomic: adds, and returns what was there before.
float add_float(float* address, float value) {
  float old, next;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do next = old + value;
  while (!__atomic_compare_exchange(address, &old, &next, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return old;
}

// A request to TMA that is not done yet: a box of a tensor, or plain bytes.
struct TensorCopy {
  engine_tensor::Map map;
  int at[5];
  char* shared;            // where it is in shared memory,
  unsigned offset;         // and its address of 32 bits there
  unsigned bytes;          // that it moves, zeros included
  unsigned room;           // that it covers in shared memory
  char* global;            // of plain bytes; null: a box
  bool adds;               // a store of plain floats, which are added to those of the array
  std::vector<char> data;  // of plain bytes, read when the copy was issued
  unsigned thread, group;
  unsigned rank;  // in its cluster, of the block that issued it
  void* caller;
  uint64_t epoch;  // of a store, in the books of a checked run
};

// A word of shared memory that a kernel uses as mbarrier.
struct Mbarrier {
  char* word = nullptr;
  unsigned number = 0;              // in the block, in the order of their first use
  std::deque<TensorCopy> pending;   // that will arrive at it
  std::vector<TensorCopy> counted;  // whose bytes have arrived in this phase; they land at its end
};

// Sums of a warpgroup that products in flight will change: where each thread has them, and what they are so far.
struct Sums {
  unsigned n = 0, in_flight = 0;  // of each thread; products
  std::vector<float*> places;     // [thread][i]; null: the thread has not come yet
  std::vector<float> values;
  std::vector<void*> callers;  // of the products
};

struct WarpgroupOp {
  const engine::WarpgroupProduct* form;
  uint64_t a, b;
  bool accumulate;
  unsigned group;
  Sums* sums;
  std::vector<engine::Words> registers;  // of A, by thread
  const char* file;
  int line;
  void* caller;
  uint64_t epoch;  // in the books of a checked run
};

struct Warpgroup {
  std::deque<WarpgroupOp> ops;  // in flight
  uint64_t first = 0;           // number of the first of them
  std::vector<std::unique_ptr<Sums>> sums;
  unsigned arrived = 0, registers = 0;
  bool is_short = false;  // it waits for registers
};

// What a barrier touches comes first, so that it is in one line of the cache.
struct Fiber {
  Context context;
  const char* file;  // where it waits
  int line;
  bool at_barrier, at_activemask, finished;
  bool fresh;  // it has not run yet, and has no context
  Lane lane;
  char* stack;
  int predicate;           // result of activemask
  Collective* collective;  // not null while it waits for its warp
  int named;               // the named barrier where it waits, or -1
  const void* shown;       // to other threads: see board.cpp
  bool at_cluster;
  uint64_t cluster_turn;  // of barrier.cluster, where it has arrived and not waited; else 0
  bool carry;             // of add.cc and its like
  uintptr_t preempted;    // where in the kernel an interrupt last made it let others run, or 0
  const void* watched;    // where it looks again and again, and how often it has
  unsigned looks;
  std::vector<AsyncCopy> copies;  // not landed yet, in their order
  unsigned groups;                // of them, that are committed so far in the block

  char* mbarrier;  // it waits for the end of a phase of this one, or null
  uint64_t phase;
  bool phase_over;
  std::deque<TensorCopy> stores;  // of TMA, that have not read shared memory yet
  std::deque<TensorCopy> unseen;  // those that have, and may not have written: kept in a checked run
  unsigned store_groups;
  const void* caller;      // where the kernel issued what it waits for, here and for its warpgroup
  const char* group_name;  // of what it waits in for its warpgroup, or null
  unsigned group_value;
  uint64_t products;  // wgmma instructions so far
  unsigned product_groups;
  bool product_fence;  // a wgmma.fence since the last wait
};

// barrier.cluster: how often it has completed, from 1 on; threads that have arrived, of those that are still there.
struct ClusterBarrier {
  uint64_t turn = 1;
  unsigned arrived = 0, alive = 0;
};

// The state of one block. A worker is the block that it runs; others wait next to it, each with its own memory.
struct Block {
  // Memory, mapped once and kept from launch to launch.
  std::vector<Fiber> fibers;  // as many as the largest block so far
  char* stacks = nullptr;
  unsigned n_stacks = 0;
  char* shared = nullptr;  // both windows and their guards
  char* space =
      nullptr;  // where the addresses of shared memory count from: `shared`, or that of a cluster's first block
  char *static_limit = nullptr, *dynamic_limit = nullptr;  // the ends of both windows: a guard begins there
  char* static_base = nullptr;                             // of the module's thread-local segment, in this launch

  // Bit l of a warp's masks is its lane l.
  Fiber* current = nullptr;
  unsigned n_threads = 0, n_warps = 0, warp = 0;
  unsigned ready[MAX_THREADS / WARP], alive[MAX_THREADS / WARP];
  unsigned paused[MAX_THREADS / WARP];   // lanes of a profiled kernel whose trace is full
  unsigned meeting[MAX_THREADS / WARP];  // lanes that wait in a warp-wide operation
  unsigned finished = 0, arrived = 0;
  int barrier_sum = 0, barrier_result = 0, barrier_line = 0;
  bool barrier_mixed = false;  // threads have come to it at several lines
  engine::BarrierOp barrier_op;
  // bar.sync and bar.arrive, by number: how many threads have arrived and how many have to, and of which warps.
  unsigned named_open = 0, named_split = 0;  // by bit; split: some arrive and do not wait
  unsigned named_arrived[16], named_expected[16], named_warps[16], named_lanes[16][MAX_THREADS / WARP];
  uint64_t block = 0;
  void* dynamic = nullptr;
  std::deque<Mbarrier> mbarriers;
  Warpgroup warpgroups[MAX_THREADS / GROUP];
  unsigned pool = 0;  // that setmaxnreg.dec has given back: registers of each thread of a warpgroup
  uint64_t progress = 0, last_progress = 0;  // arrivals at mbarriers and barriers, ends of threads
  uint64_t order = 0;                        // of the numbers that choose which thread runs; 0: warp after warp
  unsigned timeouts = 0;                     // rounds of waits that were let go without any

  // In a cluster: see clusters.cpp.
  unsigned rank = 0;
  bool ended = false;
  ClusterBarrier cluster_barrier;    // in the block of rank 0, for all
  uint64_t tried = 0, given_up = 0;  // events of the cluster when it last could do no more, and could not time out

  // Waiting for other blocks: see residents.cpp.
  unsigned idle = 0;   // threads that were let run, one after the other, since one of them did more than look
  unsigned looks = 0;  // the same since the block was set aside
  bool grid_led = false, at_grid = false;  // one of its threads waits in grid.sync() for all of them
  uint64_t grid_turn = 0;                  // which grid.sync() that is
  void* books = nullptr;                   // the checker's, of a block that is set aside
  std::vector<char> left_behind;           // its static arrays, where those of other blocks have the same place
};

// A cluster, all of whose blocks a worker holds from the start of the first to the end of the last.
struct Cluster {
  unsigned size = 1;            // blocks
  char* windows = nullptr;      // of shared memory, mapped once
  std::vector<Block*> members;  // by rank; in the place of the one that runs is the worker's own memory
};

struct Worker : Block {
  Cluster cluster;
  char *rescue = nullptr, *signal_stack = nullptr;  // a stack to leave a faulting fiber on; the handlers' own
  Context main;                                     // the worker's own stack, between blocks
  bool parking = false;                             // the block that ran has not ended, but waits for others
  std::deque<Block*> parked;                        // blocks that have begun and wait; the one that ran last is last
  std::vector<Block*> spare;                        // memory for more

  // What signal handlers and other threads look at. A handler runs between any two instructions of this thread: were
  // a flag kept in a register, or two changes of it made one, it would tear away what it must not.
  bool called = false;  // there is a launch to take part in; under the pool's mutex
  std::condition_variable start;
  volatile bool in_fiber = false;
  volatile bool unwinding = false;  // a fault's place is looked for, on a stack that may be overwritten
  volatile int critical = 0;        // > 0: the engine's own code runs, do not tear it away
  EngineFailure fault;              // filled in by the signal handler
  pthread_t os_thread;
  uint64_t seen = 0, seen_block = 0;        // which thread ran when the watchdog last looked
  std::chrono::microseconds same_block{0};  // how long the block has been running
  volatile bool give_way = false;           // it is to be set aside
  unsigned unplaced = 0;                    // how often it was stopped at no line of the kernel
  volatile bool interrupted = false;        // a handler is at work, before it lets others run
};

inline size_t page_bytes() {
  static const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return page;
}

inline Worker* this_worker() { return (Worker*)engine_worker; }
inline Worker& here() { return *this_worker(); }

// From one stack to the next there is an odd number of pages, and stacks start at different offsets in their page: else
// all of them fight for the same sets of the caches, and of those for the addresses of pages.
size_t stack_stride() { return STACK_BYTES + page_bytes(); }
inline char* stack_top(const char* stack) {
  return (char*)stack + STACK_BYTES - (uintptr_t)stack / page_bytes() % 15 * 256;
}

// The engine's own code is not torn away by an interrupt; a kernel's is.
struct Critical {
  Worker& w;
  explicit Critical(Worker& worker) : w(worker) { w.critical++; }
  ~Critical() { w.critical--; }
};

// The mutex guards all but the atomics; workers only read `launch` and `total` while a launch runs.
struct Pool {
  std::mutex mutex;
  std::condition_variable done;
  std::vector<Worker*> workers;
  pid_t pid = 0;
  unsigned running = 0;
  EngineLaunch launch;
  uint64_t total = 0;
  std::atomic<uint64_t> next{0}, ended{0}, stop_at{0};
  std::atomic<bool> cancelled{false}, expired{false};  // expired: by the watchdog, which samples the place
  EngineFailure failure;
  std::vector<std::pair<uint64_t, std::string>> printed;  // by block
  uint64_t grid_turn = 0, grid_arrived = 0;               // of grid.sync(): how often all have met, and how many wait
  EngineFailure grid_waiter;                              // the first of those, if it waits for ever
  std::condition_variable turned;
  std::chrono::microseconds slice;  // how often to look whether a thread has been running for long
  std::chrono::steady_clock::time_point looked;
  uintptr_t code_begin = 0, code_end = 0;  // of the kernel; found when a thread has been running for long
  bool shared_out = false;                 // a block ran so long without an end that others have had a part of its time
};

Pool* pool = nullptr;

// ---------------------------------------------------------------- what one part does for the others

// failure.cpp
void copy_text(char* to, size_t bytes, const char* from);
void record(const EngineFailure& failure);
[[noreturn]] void leave_block(Worker& w);
EngineFailure failure_at(const Worker& w, FailureReason reason, const char* file, int line);
EngineFailure failure_from(const Worker& w, FailureReason reason, const char* file, int line, const void* caller);
void set_other_place(EngineFailure& f, const char* file, int line);
[[noreturn]] void fail(Worker& w, const EngineFailure& failure);
[[noreturn]] void fail_at_call(Worker& w, const char* message, const void* returns_to);
[[noreturn]] void diagnose_stuck(Worker& w);
void note_expired(Worker& w, EngineFailure& f, uintptr_t pc);
[[noreturn]] void leave_cancelled(Worker& w);

// division.cpp
bool divide_as_a_gpu(ucontext_t* u);

// faults.cpp
const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
uintptr_t place_in_kernel(uintptr_t pc);
void install_handlers();
void find_code();

// scheduler.cpp
void set_current(Worker& w, Fiber* to);
void set_waiting(Worker& w, Fiber& f);
void complete_barrier(Worker& w);
void complete_named(Worker& w, unsigned number);
void enter(Context& from, Fiber& to);
void schedule(Worker& w);
void try_collective(Worker& w, unsigned warp, unsigned mask);
void fiber_main();
void retire(Worker& w);
[[noreturn]] void end_fiber(Worker& w);

// launch.cpp
bool equip(Block& b, char* window = nullptr);
char* map_shared(size_t bytes);
void begin_block(Worker& w, uint64_t block);

// residents.cpp
void let_others_run(Worker& w);
void preempt(Worker& w);
void run(Worker& w);
void park(Worker& w);
void run_blocks(Worker& w);
void nudge(std::chrono::microseconds since);

// clusters.cpp
unsigned cluster_size();
uint64_t block_of_cluster(uint64_t cluster, unsigned rank);
inline Block& member(Worker& w, unsigned rank) {
  return rank == w.rank ? static_cast<Block&>(w) : *w.cluster.members[rank];
}
Block* owner_of(Worker& w, const void* address);
void run_clusters(Worker& w);
bool wait_for_peers(Worker& w, bool may_time_out);
void leave_cluster_barrier(Worker& w, Fiber& f);
void change_to(Worker& w, unsigned rank);

// async_copies.cpp
void leave_copies(Fiber& f);

// mbarriers.cpp
bool deliver_copies(Worker& w);
void deliver_some(Worker& w);
bool time_out_waits(Worker& w);
void leave_mbarriers(Worker& w);
Mbarrier& mbarrier_at(Block& b, char* word);
void send(Worker& w, Block& to, Mbarrier& b, TensorCopy&& copy);

// tensor_copies.cpp
void land(TensorCopy& copy);
void leave_stores(Fiber& f);

// warpgroups.cpp
void begin_warpgroups(Worker& w);
void leave_products(Worker& w, Fiber& f);
char* shared_of_descriptor(Worker& w, unsigned low, unsigned bytes);
void multiply_warpgroup(Worker& w, WarpgroupOp& op);  // tensor_warpgroup.cpp

// memory.cpp
// Null where there are none; reserved: also where they are more than the machine has.
char* map_pages(size_t bytes, int protection = PROT_READ | PROT_WRITE, bool reserved = false);

}  // namespace
