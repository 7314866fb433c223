// The CPU engine: runs the blocks of a launch on the cores of this machine, each CUDA thread as a fiber.
//
// Built once as a shared library; compiled kernels find its functions when they are loaded. It knows nothing of
// Python: a launch is started, waited for and cancelled through the functions at the end of the file.
#if defined(__APPLE__) && !defined(_XOPEN_SOURCE)
#define _XOPEN_SOURCE 700  // <ucontext.h> wants it, and
#define _DARWIN_C_SOURCE   // dladdr and MAP_ANONYMOUS want this beside it
#endif
#include "checker.h"
#include "engine.h"
#include "switch_stacks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace {

using engine::BarrierOp;
using engine::Collective;
using engine::Lane;

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;  // address space only: pages are used when they are touched
constexpr size_t DYNAMIC_BYTES = 256 * 1024;
constexpr size_t STATIC_BYTES = 16 << 20;   // the __shared__ arrays of all kernels of a module
constexpr unsigned STATIC_OFFSET = 1u << 30; // of __shared__ arrays that the C library has placed, in shared addresses
constexpr size_t GUARD_BYTES = 1 << 20;     // no-man's-land around arrays: also a stride of many rows ends in it
constexpr size_t SHARED_WINDOW = 3 * GUARD_BYTES + STATIC_BYTES + DYNAMIC_BYTES;
constexpr size_t CHECKED_SLACK = 16 * 1024; // between dynamic shared memory and its guard, in a checked run
constexpr unsigned char POISON = 0xFF;      // as float, half or double: NaN

// ---------------------------------------------------------------- a launch

extern "C" struct EngineLaunch {
  void (*run)(void **args);
  void **args;
  unsigned grid[3], block[3];
  uint64_t dynamic_shared;
  // The static __shared__ arrays are the thread-local segment of the kernel's module. Of it the kernel uses the bytes
  // from static_begin to static_end; `anchor` gives the address of the byte at anchor_offset.
  uint64_t static_begin, static_end, static_align, anchor_offset;
  char *(*anchor)();
};

enum FailureKind : int { NONE = 0, MESSAGE = 1, FAULT = 2, CANCELLED = 3, EXPIRED = 4 };

extern "C" struct EngineFailure {
  int kind;
  int signal, is_write, line;
  uint64_t block, address, place;                    // place: in the module, 0 if not known
  uint64_t static_base, dynamic_base, dynamic_size;  // where the block's shared memory was
  unsigned thread;
  char file[256], message[2048];
};

// What a cp.async has read and not written yet.
struct AsyncCopy {
  char *target;
  engine::Words data;
  unsigned bytes, group;
  void *caller;  // where the kernel asked for it
};

struct Fiber {
  Lane lane;
  Context context;
  char *stack;
  int predicate;             // result of the barrier or of activemask
  const char *file;          // where it waits
  int line;
  Collective *collective;    // not null while it waits for its warp
  int named;                 // the named barrier where it waits, or -1
  bool at_barrier, at_activemask, finished;
  std::vector<AsyncCopy> copies;  // not landed yet, in their order
  unsigned groups;                // of them, that are committed so far in the block
};

struct Worker {
  std::vector<Fiber> fibers;   // as many as the largest block so far
  char *stacks = nullptr;
  char *shared = nullptr;  // where the addresses of shared memory count from: both windows and their guards
  char *static_limit = nullptr, *dynamic_limit = nullptr;  // the ends of both windows: a guard begins there
  char *static_base = nullptr;                             // of the module's thread-local segment, in this launch
  char *rescue = nullptr, *signal_stack = nullptr;         // a stack to leave a faulting fiber on; the handlers' own
  std::condition_variable start;
  Context main;
  Fiber *current = nullptr;
  unsigned n_threads = 0, n_warps = 0, warp = 0;
  unsigned ready[MAX_THREADS / WARP], alive[MAX_THREADS / WARP];
  unsigned paused[MAX_THREADS / WARP];  // lanes of a profiled kernel whose trace is full
  unsigned finished = 0, arrived = 0;
  int barrier_sum = 0;
  unsigned named_arrived[16];  // at bar.sync and bar.arrive, by number
  uint64_t block = 0;
  void *dynamic = nullptr;
  bool called = false;         // there is a launch to take part in
  volatile bool in_fiber = false;
  volatile int critical = 0;   // > 0: the engine's own code runs, do not tear it away
  bool failed = false;
  EngineFailure fault;         // filled in by the signal handler
  pthread_t os_thread;
};

thread_local Worker *this_worker = nullptr;

struct Pool {
  std::mutex mutex;
  std::condition_variable done;
  std::vector<Worker *> workers;
  pid_t pid = 0;
  unsigned running = 0;
  EngineLaunch launch;
  uint64_t total = 0;
  std::atomic<uint64_t> next{0}, stop_at{0};
  std::atomic<bool> cancelled{false}, expired{false};  // expired: cancelled by the watchdog, who asks where it was
  EngineFailure failure;
  std::vector<std::pair<uint64_t, std::string>> printed;
};

Pool *pool = nullptr;

const char *copy_text(char *to, size_t bytes, const char *from) {
  snprintf(to, bytes, "%s", from ? from : "");
  return to;
}

// The failure of the lowest block is the one that is told, so a failing launch says the same every time.
void record(const EngineFailure &failure) {
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->failure.kind == NONE || failure.block < pool->failure.block) pool->failure = failure;
  uint64_t now = pool->stop_at.load();
  while (failure.block < now && !pool->stop_at.compare_exchange_weak(now, failure.block)) {
  }
}

// ---------------------------------------------------------------- scheduling the fibers of a block

void leave_block(Worker &w) {
  w.failed = true;
  w.in_fiber = false;
  Context scrap;  // the fiber is never entered again
  switch_to(scrap, w.main);
  __builtin_unreachable();
}

[[noreturn]] void fail(Worker &w, const char *file, int line, std::string message) {
  w.critical++;
  EngineFailure f;
  memset(&f, 0, sizeof f);
  f.kind = MESSAGE;
  f.block = w.block;
  f.thread = w.current ? w.current->lane.linear : 0;
  f.line = line;
  copy_text(f.file, sizeof f.file, file);
  copy_text(f.message, sizeof f.message, message.c_str());
  record(f);
  std::string().swap(message);  // no destructor runs after this
  leave_block(w);
  __builtin_unreachable();
}

std::string name_of(const Fiber &f) {
  char text[96];
  snprintf(text, sizeof text, "thread (%u,%u,%u)", f.lane.thread_index.x, f.lane.thread_index.y,
           f.lane.thread_index.z);
  return text;
}

std::string place(const char *file, int line) { return std::string(file ? file : "?") + ":" + std::to_string(line); }

Fiber *next_ready(Worker &w) {
  // Stay in the warp while one of its lanes can run: its data are warm, and collectives complete early.
  for (unsigned i = 0, at = w.warp; i < w.n_warps; ++i, at = at + 1 == w.n_warps ? 0 : at + 1) {
    if (w.ready[at]) {
      w.warp = at;
      return &w.fibers[at * WARP + __builtin_ctz(w.ready[at])];
    }
    if (w.paused[at]) {  // all lanes of the warp have come as far as they could: their traces are merged
      check_merge_warp(at, w.n_threads, w.paused[at]);
      w.ready[at] = w.paused[at];
      w.paused[at] = 0;
      w.warp = at;
      return &w.fibers[at * WARP + __builtin_ctz(w.ready[at])];
    }
  }
  return nullptr;
}

// Nobody can run: lanes that asked who is active have their answer now, by warp and source line.
bool release_activemask(Worker &w) {
  for (unsigned warp = 0; warp < w.n_warps; ++warp) {
    unsigned group = 0;
    const Fiber *first = nullptr;
    for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane) {
      Fiber &f = w.fibers[warp * WARP + lane];
      if (!f.at_activemask || (first && (f.line != first->line || f.file != first->file))) continue;
      if (!first) first = &f;
      group |= 1u << lane;
    }
    if (!group) continue;
    for (unsigned lane = 0; lane < WARP; ++lane) {
      if (!(group >> lane & 1)) continue;
      Fiber &f = w.fibers[warp * WARP + lane];
      f.at_activemask = false;
      f.predicate = (int)group;
    }
    w.ready[warp] |= group;
    return true;
  }
  return false;
}

[[noreturn]] void diagnose_stuck(Worker &w) {
  const Fiber *at_barrier = nullptr, *at_collective = nullptr, *at_named = nullptr, *finished = nullptr;
  unsigned n_barrier = 0, n_finished = 0;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    const Fiber &f = w.fibers[i];
    if (f.finished) { n_finished++; if (!finished) finished = &f; }
    else if (f.at_barrier) { n_barrier++; if (!at_barrier) at_barrier = &f; }
    else if (f.collective && !at_collective) at_collective = &f;
    else if (f.named >= 0 && !at_named) at_named = &f;
  }
  if (at_collective) {
    const Collective &c = *at_collective->collective;
    unsigned warp = at_collective->lane.linear / WARP, missing = 0;
    for (unsigned lane = 0; lane < WARP; ++lane) {
      unsigned i = warp * WARP + lane;
      if (!(c.mask >> lane & 1) || i >= w.n_threads || w.fibers[i].finished) continue;
      const Collective *other = w.fibers[i].collective;
      if (!other || other->mask != c.mask || other->run != c.run) missing |= 1u << lane;
    }
    std::string elsewhere;
    if (missing) {
      const unsigned lane = (unsigned)__builtin_ctz(missing);
      const Fiber &f = w.fibers[warp * WARP + lane];
      const Collective *other = f.collective;
      elsewhere = ": lane " + std::to_string(lane) + " waits in " + (other ? other->name : "__syncthreads()") + " at " +
                  (other ? place(other->file, other->line) : place(f.file, f.line));
    }
    char text[512];
    snprintf(text, sizeof text,
             "deadlock in warp %u: %s waits at %s in %s with mask 0x%08x, and lanes 0x%08x of that mask never come%s",
             warp, name_of(*at_collective).c_str(), place(c.file, c.line).c_str(), c.name, c.mask, missing,
             elsewhere.c_str());
    std::string().swap(elsewhere);  // no destructor runs after this
    w.current = const_cast<Fiber *>(at_collective);
    fail(w, c.file, c.line, text);
  }
  if (at_named) {
    w.current = const_cast<Fiber *>(at_named);
    fail(w, at_named->file, at_named->line,
         "deadlock: " + name_of(*at_named) + " waits in bar.sync " + std::to_string(at_named->named) + " at " +
             place(at_named->file, at_named->line) + ", where " + std::to_string(w.named_arrived[at_named->named]) +
             " threads have arrived, and no more will come");
  }
  std::string text = "barrier divergence: " + std::to_string(n_barrier) + " of " + std::to_string(w.n_threads) +
                     " threads wait in __syncthreads() at " + place(at_barrier->file, at_barrier->line) + ", but " +
                     std::to_string(n_finished) + " have left the kernel and will never come (the first is " +
                     name_of(*finished) + "). Every thread of a block must reach every barrier: guard the work, "
                     "not the barrier";
  w.current = const_cast<Fiber *>(at_barrier);
  fail(w, at_barrier->file, at_barrier->line, text);
}

uintptr_t place_in_kernel(uintptr_t pc);

// Where the current fiber was when the watchdog had waited long enough.
void note_expired(Worker &w, EngineFailure &f, uintptr_t pc) {
  memset(&f, 0, sizeof f);
  f.kind = EXPIRED;
  f.block = w.block;
  f.thread = w.current->lane.linear;
  f.place = place_in_kernel(pc);
}

[[noreturn]] void leave_cancelled(Worker &w) {
  if (pool->expired.load()) {
    note_expired(w, w.fault, (uintptr_t)&leave_cancelled);
    record(w.fault);
  }
  leave_block(w);
  __builtin_unreachable();
}

void set_current(Worker &w, Fiber *to) {
  w.current = to;
  if (checking()) check_switch(to->lane.linear, to->stack + STACK_BYTES - to->lane.linear % 15 * 256);
}

// The current fiber waits or has ended: continue with another, or with the block's end.
void schedule(Worker &w) {
  Fiber *from = w.current, *to = next_ready(w);
  if (pool->cancelled.load(std::memory_order_relaxed)) leave_cancelled(w);
  if (!to && w.finished < w.n_threads) {
    if (!release_activemask(w)) diagnose_stuck(w);
    to = next_ready(w);
  }
  if (to == from) return;
  if (!to) {
    w.in_fiber = false;
    switch_to(from->context, w.main);
    return;
  }
  set_current(w, to);
  switch_to(from->context, to->context);
}

void set_waiting(Worker &w, Fiber &f) { w.ready[f.lane.linear / WARP] &= ~(1u << (f.lane.linear % WARP)); }

// Run the operation of the lanes that wait with `mask`, if none that can still come is missing.
void try_collective(Worker &w, unsigned warp, unsigned mask) {
  if (mask & w.ready[warp]) return;  // somebody can still run and come
  Collective *lanes[WARP] = {};
  unsigned here = 0;
  for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane) {
    Collective *c = w.fibers[warp * WARP + lane].collective;
    if (c && c->mask == mask) {
      lanes[lane] = c;
      here |= 1u << lane;
    }
  }
  if (!here || (mask & w.alive[warp]) != here) return;
  const Collective *first = lanes[__builtin_ctz(here)];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    if (!lanes[lane] || lanes[lane]->run == first->run) continue;
    fail(w, lanes[lane]->file, lanes[lane]->line,
         std::string("the lanes of a warp meet in different operations: lane ") + std::to_string(__builtin_ctz(here)) +
             " in " + first->name + " at " + place(first->file, first->line) + ", lane " + std::to_string(lane) +
             " in " + lanes[lane]->name + " at " + place(lanes[lane]->file, lanes[lane]->line));
  }
  if (checking()) {
    check_collective();
    check_merge_warp(warp, w.n_threads, w.paused[warp]);
    if (strcmp(first->name, "__syncwarp") == 0) check_warp_sync(warp, here);
  }
  first->run(lanes, here);
  for (unsigned lane = 0; lane < WARP; ++lane)
    if (lanes[lane]) w.fibers[warp * WARP + lane].collective = nullptr;
  w.ready[warp] |= here;
}

// The first `n` copies of a thread arrive.
void land(Fiber &f, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const AsyncCopy &copy = f.copies[i];
    memcpy(copy.target, &copy.data, copy.bytes);
    if (checking()) check_async_landed(copy.target, copy.bytes);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + n);
}

// A thread has ended and not waited for these.
void leave_copies(Fiber &f) {
  if (checking())
    for (const AsyncCopy &copy : f.copies) check_async_left(copy.target, copy.bytes, copy.caller);
  f.copies.clear();
}

void fiber_main() {
  Worker &w = *this_worker;
  w.critical--;
  pool->launch.run(pool->launch.args);
  w.critical++;
  Fiber &f = *w.current;
  unsigned warp = f.lane.linear / WARP;
  leave_copies(f);
  f.finished = true;
  w.finished++;
  set_waiting(w, f);
  w.alive[warp] &= ~(1u << (f.lane.linear % WARP));
  // Lanes that only waited for this one go on without it, as on a GPU.
  for (unsigned lane = 0; lane < WARP && warp * WARP + lane < w.n_threads; ++lane)
    if (Collective *c = w.fibers[warp * WARP + lane].collective) try_collective(w, warp, c->mask);
  schedule(w);
  __builtin_unreachable();
}

// ---------------------------------------------------------------- faults and interrupts

void rescue_main() {
  Worker &w = *this_worker;
  w.critical++;
  if (w.fault.kind == FAULT || w.fault.kind == EXPIRED) record(w.fault);
  leave_block(w);
}

// Let the handler return into rescue_main on a stack that is known to be good.
void redirect(Worker &w, ucontext_t *u) {
  uintptr_t top = ((uintptr_t)(w.rescue + STACK_BYTES) & ~(uintptr_t)15) - 64;
#if defined(__linux__) && defined(__x86_64__)
  u->uc_mcontext.gregs[REG_RSP] = (greg_t)(top - 8);  // as if rescue_main had been called
  u->uc_mcontext.gregs[REG_RIP] = (greg_t)rescue_main;
#elif defined(__linux__) && defined(__aarch64__)
  u->uc_mcontext.sp = top;
  u->uc_mcontext.pc = (uintptr_t)rescue_main;
#elif defined(__APPLE__) && defined(__x86_64__)
  u->uc_mcontext->__ss.__rsp = top - 8;
  u->uc_mcontext->__ss.__rip = (uintptr_t)rescue_main;
#elif defined(__APPLE__) && defined(__aarch64__)
  u->uc_mcontext->__ss.__sp = top;
  u->uc_mcontext->__ss.__pc = (uintptr_t)rescue_main;
#else
  rescue_main();  // leaves the handler by switching stacks; unblocks nothing it needs
#endif
}

uintptr_t pc_of(const ucontext_t *u) {
#if defined(__linux__) && defined(__x86_64__)
  return (uintptr_t)u->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
  return u->uc_mcontext.pc;
#elif defined(__APPLE__) && defined(__x86_64__)
  return u->uc_mcontext->__ss.__rip;
#elif defined(__APPLE__) && defined(__aarch64__)
  return u->uc_mcontext->__ss.__pc;
#else
  (void)u;
  return 0;
#endif
}

uintptr_t base_of(uintptr_t code) {
  Dl_info where;
  return code && dladdr((void *)code, &where) ? (uintptr_t)where.dli_fbase : 0;
}

// The place in the kernel's own library: the fault's, or where the kernel called the function it happened in, such as the
// memset that a compiler makes of a loop. 0 where it is not found.
uintptr_t place_in_kernel(uintptr_t pc) {
  struct Search {
    uintptr_t kernel, found;
  } search = {base_of((uintptr_t)pool->launch.run), 0};
  if (base_of(pc) == search.kernel) return pc - search.kernel;
  auto look = [](_Unwind_Context *frame, void *data) {
    Search *s = (Search *)data;
    uintptr_t returns_to = _Unwind_GetIP(frame);
    if (base_of(returns_to) != s->kernel) return _URC_NO_REASON;
    s->found = returns_to - 1 - s->kernel;
    return _URC_END_OF_STACK;
  };
  _Unwind_Backtrace(look, &search);
  return search.found;
}

const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[64];

void on_fault(int signal, siginfo_t *info, void *context) {
  Worker *w = this_worker;
  if (!w || !w->in_fiber || w->critical > 0) {  // not a kernel's fault: whoever was asked before us is asked
    sigaction(signal, &previous[signal], nullptr);
    return;
  }
  ucontext_t *u = (ucontext_t *)context;
  EngineFailure &f = w->fault;
  memset(&f, 0, sizeof f);
  f.kind = FAULT;
  f.signal = signal;
  f.address = (uint64_t)info->si_addr;
  f.block = w->block;
  f.thread = w->current->lane.linear;
  f.static_base = (uint64_t)w->static_base;
  f.dynamic_base = (uint64_t)w->dynamic;
  f.dynamic_size = pool->launch.dynamic_shared;
  f.place = place_in_kernel(pc_of(u));
#if defined(__linux__) && defined(__x86_64__)
  f.is_write = (u->uc_mcontext.gregs[REG_ERR] & 2) ? 1 : 0;
  // Not canonical, or a misaligned vector access: the processor does not say which address.
  if (info->si_code == SI_KERNEL) copy_text(f.message, sizeof f.message, "misaligned");
#else
  f.is_write = -1;
#endif
  uintptr_t stack = (uintptr_t)w->current->stack;
  if ((uintptr_t)info->si_addr >= stack - 65536 && (uintptr_t)info->si_addr < stack + 16384)
    copy_text(f.message, sizeof f.message, "stack");
  redirect(*w, u);
}

// SIGURG, which the system itself never sends unasked: a cancelled launch is torn out of its kernels.
void on_interrupt(int, siginfo_t *, void *context) {
  Worker *w = this_worker;
  if (!w || !w->in_fiber || w->critical > 0 || !pool->cancelled.load()) return;
  const uintptr_t pc = pc_of((ucontext_t *)context);
  // The hooks of a checked run allocate memory: they are asked again when they are done.
  if (checking() && base_of(pc) != base_of((uintptr_t)pool->launch.run)) return;
  w->fault.kind = NONE;
  if (pool->expired.load()) note_expired(*w, w->fault, pc);
  redirect(*w, (ucontext_t *)context);
}

void install_handlers() {
  struct sigaction action, now;
  memset(&action, 0, sizeof action);
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.sa_sigaction = on_fault;
  for (int signal : FAULTS) {  // looked at before every launch: others (faulthandler) install theirs at any time
    sigaction(signal, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) continue;
    previous[signal] = now;
    sigaction(signal, &action, nullptr);
  }
  sigaction(SIGURG, nullptr, &now);
  if (!((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_interrupt)) {
    action.sa_sigaction = on_interrupt;
    sigaction(SIGURG, &action, nullptr);
  }
}

// ---------------------------------------------------------------- workers

char *map_pages(size_t bytes, int protection = PROT_READ | PROT_WRITE, int flags = MAP_NORESERVE) {
  void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return p == MAP_FAILED ? nullptr : (char *)p;
}

size_t page_bytes() {
  static const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return page;
}

// The memory of a worker: only addresses, until somebody touches them. False: there is none.
bool equip(Worker &w) {
  char *shared = w.shared = map_pages(SHARED_WINDOW, PROT_NONE);
  w.stacks = map_pages(STACK_BYTES * MAX_THREADS);
  w.rescue = map_pages(STACK_BYTES);
  w.signal_stack = map_pages(STACK_BYTES);
  if (!shared || !w.stacks || !w.rescue || !w.signal_stack) return false;
  char *window = shared + GUARD_BYTES;
  mprotect(window, STATIC_BYTES, PROT_READ | PROT_WRITE);
  w.static_limit = window + STATIC_BYTES;
  window = w.static_limit + GUARD_BYTES;
  mprotect(window, DYNAMIC_BYTES, PROT_READ | PROT_WRITE);
  w.dynamic_limit = window + DYNAMIC_BYTES;
  return true;
}

void add_fibers(Worker &w, unsigned n) {
  for (unsigned i = (unsigned)w.fibers.size(); i < n; ++i) {
    Fiber f = {};
    f.stack = w.stacks + i * STACK_BYTES;
    mprotect(f.stack, page_bytes(), PROT_NONE);
    w.fibers.push_back(f);
  }
}

// Place the kernel's static __shared__ arrays so that they end where a guard begins.
void place_static(Worker &w) {
  const EngineLaunch &l = pool->launch;
  w.static_base = nullptr;
  if (!l.anchor || l.static_begin == l.static_end) return;
  w.static_base = w.static_limit - l.static_end;
  w.static_base -= (uintptr_t)w.static_base % l.static_align;
  // Where compilers do not ask engine_static_shared() for thread-locals, they are where the C library put them.
  char *anchor = l.anchor();
  if (anchor != w.static_base + l.anchor_offset) w.static_base = anchor - l.anchor_offset;
}

void run_block(Worker &w, uint64_t block) {
  const EngineLaunch &l = pool->launch;
  const size_t page = page_bytes();
  unsigned n = l.block[0] * l.block[1] * l.block[2];
  w.n_threads = n;
  w.n_warps = (n + WARP - 1) / WARP;
  w.finished = w.arrived = w.warp = 0;
  w.barrier_sum = 0;
  memset(w.named_arrived, 0, sizeof w.named_arrived);
  w.block = block;
  w.failed = false;
  // A GPU leaves what the block before left; NaN is the honest form of "nobody wrote this".
  if (w.static_base) memset(w.static_base + l.static_begin, POISON, l.static_end - l.static_begin);
  size_t dynamic = (l.dynamic_shared + 127) / 128 * 128;
  w.dynamic = w.dynamic_limit - dynamic;
  if (checking()) w.dynamic = (char *)w.dynamic - CHECKED_SLACK;  // just past the end is a finding, not a fault
  if (dynamic) memset(w.dynamic, POISON, dynamic);

  uint3 index = {(unsigned)(block % l.grid[0]), (unsigned)(block / l.grid[0] % l.grid[1]),
                 (unsigned)(block / l.grid[0] / l.grid[1])};
  for (unsigned i = 0; i < n; ++i) {
    Fiber &f = w.fibers[i];
    f.lane.thread_index = {i % l.block[0], i / l.block[0] % l.block[1], i / l.block[0] / l.block[1]};
    f.lane.block_index = index;
    f.lane.block_size = dim3(l.block[0], l.block[1], l.block[2]);
    f.lane.grid_size = dim3(l.grid[0], l.grid[1], l.grid[2]);
    f.lane.linear = i;
    f.collective = nullptr;
    f.copies.clear();
    f.groups = 0;
    f.named = -1;
    f.at_barrier = f.at_activemask = f.finished = false;
    // Stacks start at different offsets in their page, else all of them fight for the same cache sets.
    prepare(f.context, f.stack + page, STACK_BYTES - page - i % 15 * 256, fiber_main);
  }
  for (unsigned i = 0; i < w.n_warps; ++i) {
    unsigned lanes = std::min(n - i * WARP, WARP);
    w.paused[i] = 0;
    w.ready[i] = w.alive[i] = lanes == WARP ? ~0u : (1u << lanes) - 1;
  }
  if (checking()) check_block(block, w.n_warps, w.static_base, w.dynamic);
  set_current(w, &w.fibers[0]);
  w.critical = 1;
  w.in_fiber = true;
  switch_to(w.main, w.current->context);
  w.in_fiber = false;
  if (checking()) check_block_end(w.n_threads);
}

void work(Worker *mine) {
  Worker &w = *mine;
  this_worker = mine;
  w.os_thread = pthread_self();
  stack_t signals;
  memset(&signals, 0, sizeof signals);
  signals.ss_size = STACK_BYTES;
  signals.ss_sp = w.signal_stack;
  sigaltstack(&signals, nullptr);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(pool->mutex);
      w.start.wait(lock, [&] { return w.called; });
      w.called = false;
    }
    add_fibers(w, pool->launch.block[0] * pool->launch.block[1] * pool->launch.block[2]);
    place_static(w);
    for (;;) {
      uint64_t block = pool->next.fetch_add(1);
      if (block >= pool->total || block >= pool->stop_at.load() || pool->cancelled.load()) break;
      run_block(w, block);
    }
    std::lock_guard<std::mutex> lock(pool->mutex);
    if (--pool->running == 0) pool->done.notify_all();
  }
}

Worker &here() { return *this_worker; }

// The engine's own code is not torn away by an interrupt; a kernel's is.
struct Critical {
  Worker &w;
  explicit Critical(Worker &worker) : w(worker) { w.critical++; }
  ~Critical() { w.critical--; }
};

}  // namespace

// ---------------------------------------------------------------- what kernels call

extern "C" {

const engine::Lane *engine_lane() { return &this_worker->current->lane; }

int engine_barrier(BarrierOp op, int predicate, const char *file, int line) {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  if (w.arrived == 0) w.barrier_sum = 0;
  w.barrier_sum += predicate ? 1 : 0;
  f.file = file;
  f.line = line;
  f.at_barrier = true;
  set_waiting(w, f);
  if (++w.arrived < w.n_threads) {
    schedule(w);
    return f.predicate;
  }
  int result = op == BarrierOp::count ? w.barrier_sum
               : op == BarrierOp::all ? w.barrier_sum == (int)w.n_threads
                                      : w.barrier_sum > 0;
  for (unsigned i = 0; i < w.n_threads; ++i) {
    Fiber &other = w.fibers[i];
    if (other.line != line) {
      fail(w, other.file, other.line,
           "barrier divergence: " + name_of(other) + " waits in __syncthreads() at " + place(other.file, other.line) +
               ", " + name_of(f) + " in another one at " + place(file, line) +
               ". All threads of a block must meet in the same barrier");
    }
    other.at_barrier = false;
    other.predicate = result;
  }
  if (checking()) {
    check_merge(w.n_threads);
    check_barrier(file, line);
  }
  for (unsigned i = 0; i < w.n_warps; ++i) w.ready[i] = w.alive[i];
  w.arrived = 0;
  w.warp = 0;
  schedule(w);
  return f.predicate;
}

void engine_named_barrier(unsigned number, unsigned n_threads, int waits, const char *file, int line) {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  if (number > 15 || n_threads % WARP || n_threads > w.n_threads || !n_threads)
    fail(w, file, line, "bar.sync takes a number from 0 to 15, and a count of threads that is a multiple of 32 and not "
                        "more than the block has");
  f.file = file;
  f.line = line;
  if (waits) {
    f.named = (int)number;
    set_waiting(w, f);
  }
  if (++w.named_arrived[number] == n_threads) {
    w.named_arrived[number] = 0;
    if (checking()) {  // taken for a barrier of the whole block: a race with who takes no part may go unseen
      for (unsigned i = 0; i < w.n_warps; ++i) check_merge_warp(i, w.n_threads, w.ready[i] | w.paused[i]);
      check_barrier(file, line);
    }
    for (unsigned i = 0; i < w.n_threads; ++i) {
      Fiber &other = w.fibers[i];
      if (other.named != (int)number) continue;
      other.named = -1;
      w.ready[i / WARP] |= 1u << (i % WARP);
    }
  }
  if (waits) schedule(w);
}

void engine_collective(Collective *mine) {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  unsigned warp = f.lane.linear / WARP, lane = f.lane.linear % WARP;
  if (!(mine->mask >> lane & 1)) {
    char text[256];
    snprintf(text, sizeof text, "lane %u calls %s with mask 0x%08x, which does not name the lane itself", lane,
             mine->name, mine->mask);
    fail(w, mine->file, mine->line, text);
  }
  f.collective = mine;
  set_waiting(w, f);
  try_collective(w, warp, mine->mask);
  schedule(w);  // also where it is complete: then the lanes go on in their order, as at the start
}

unsigned engine_activemask(const char *file, int line) {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  f.file = file;
  f.line = line;
  f.at_activemask = true;
  set_waiting(w, f);
  schedule(w);
  return (unsigned)f.predicate;
}

// A thread that waits for another one by looking again and again must let it run: __nanosleep does.
void engine_yield() {
  Worker &w = here();
  Critical guard(w);
  if (pool->cancelled.load(std::memory_order_relaxed)) leave_cancelled(w);
  Fiber *from = w.current;
  for (unsigned i = 1; i < w.n_threads; ++i) {
    unsigned at = (from->lane.linear + i) % w.n_threads;
    if (!(w.ready[at / WARP] >> (at % WARP) & 1)) continue;
    w.warp = at / WARP;
    set_current(w, &w.fibers[at]);
    switch_to(from->context, w.current->context);
    return;
  }
}

int engine_is_shared(const void *pointer) {
  const Worker &w = here();
  const char *p = (const char *)pointer;
  return (p >= w.shared && p <= w.shared + SHARED_WINDOW) ||
         (w.static_base && p >= w.static_base && p <= w.static_base + STATIC_BYTES);
}

// Shared memory has addresses of 32 bits of its own.
unsigned engine_shared_offset(const void *pointer, const char *file, int line) {
  Worker &w = here();
  const char *p = (const char *)pointer;
  if (p >= w.shared && p <= w.shared + SHARED_WINDOW) return (unsigned)(p - w.shared);
  if (engine_is_shared(p)) return STATIC_OFFSET + (unsigned)(p - w.static_base);
  fail(w, file, line, "a generic address becomes one of shared memory, but it is not in shared memory");
}

void *engine_shared_pointer(unsigned offset, unsigned bytes, const char *name, const char *file, int line) {
  Worker &w = here();
  char text[256];
  if (offset % bytes) {
    snprintf(text, sizeof text,
             "misaligned address: %s takes an address that is a multiple of %u bytes, and 0x%x is %u past one", name,
             bytes, offset, offset % bytes);
    fail(w, file, line, text);
  }
  if (offset < SHARED_WINDOW) return w.shared + offset;
  if (w.static_base && offset >= STATIC_OFFSET && offset - STATIC_OFFSET < STATIC_BYTES)
    return w.static_base + (offset - STATIC_OFFSET);
  snprintf(text, sizeof text, "%s takes an address within shared memory (__cvta_generic_to_shared), and 0x%x is none",
           name, offset);
  fail(w, file, line, text);
}

void engine_async_copy(void *target, engine::Words data, unsigned bytes) {
  Worker &w = here();
  void *caller = __builtin_return_address(0);
  if (checking()) check_async_issue(target, bytes, caller, __builtin_frame_address(0));
  // A wild target faults here, where its line is known, and as a write.
  const volatile char nothing = 0;
  __atomic_fetch_or((char *)target, nothing, __ATOMIC_RELAXED);
  Critical guard(w);
  Fiber &f = *w.current;
  f.copies.push_back({(char *)target, data, bytes, f.groups, caller});
}

void engine_async_commit() { here().current->groups++; }

void engine_async_wait(unsigned pending) {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  size_t n = 0;
  while (n < f.copies.size() && (pending == ~0u || f.copies[n].group + (uint64_t)pending < f.groups)) ++n;
  if (n) land(f, n);
}

char *engine_static_shared() { return this_worker->static_base; }
void *engine_dynamic_shared() { return this_worker->dynamic; }
unsigned engine_dynamic_shared_size() { return (unsigned)pool->launch.dynamic_shared; }

long long engine_clock() {
  return (long long)std::chrono::steady_clock::now().time_since_epoch().count();
}

int engine_printf(const char *format, ...) {
  Worker &w = here();
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(text, sizeof text, format, arguments);  // a bad %s is the kernel's fault, so not critical yet
  va_end(arguments);
  Critical guard(w);
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (!pool->printed.empty() && pool->printed.back().first == w.block) pool->printed.back().second += text;
  else pool->printed.emplace_back(w.block, text);
  return length;
}

void engine_pause() {
  Worker &w = here();
  Critical guard(w);
  Fiber &f = *w.current;
  set_waiting(w, f);
  w.paused[f.lane.linear / WARP] |= 1u << (f.lane.linear % WARP);
  schedule(w);
}

void engine_fail(const char *message, const char *file, int line) { fail(here(), file, line, message); }

// ---------------------------------------------------------------- what Python calls

// 0; -1: a launch is under way; -2: the system gives no memory or no thread.
int engine_start(const EngineLaunch *launch, unsigned n_workers) {
  if (!pool || pool->pid != getpid()) {  // threads do not survive a fork: the child starts a pool of its own
    pool = new Pool;
    pool->pid = getpid();
  }
  install_handlers();
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->running) return -1;
  pool->launch = *launch;
  pool->total = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  pool->next = 0;
  pool->stop_at = ~0ull;
  pool->cancelled = pool->expired = false;
  pool->printed.clear();
  memset(&pool->failure, 0, sizeof pool->failure);
  while (pool->workers.size() < n_workers) {
    Worker *worker = new Worker;
    sigset_t all, before;  // signals meant for the program go to its own threads; faults are always ours
    sigfillset(&all);
    for (int signal : FAULTS) sigdelset(&all, signal);
    sigdelset(&all, SIGURG);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = equip(*worker);
    try {
      if (started) std::thread(work, worker).detach();
    } catch (const std::system_error &) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!started && pool->workers.empty()) return -2;
    if (!started) break;
    pool->workers.push_back(worker);
  }
  pool->running = (unsigned)std::min<uint64_t>({n_workers, pool->workers.size(), pool->total});
  for (unsigned i = 0; i < pool->running; ++i) {
    pool->workers[i]->called = true;
    pool->workers[i]->start.notify_one();
  }
  return 0;
}

// 1 when the launch has ended, 0 when the time ran out first.
int engine_wait(int milliseconds) {
  std::unique_lock<std::mutex> lock(pool->mutex);
  return pool->done.wait_for(lock, std::chrono::milliseconds(milliseconds), [] { return pool->running == 0; }) ? 1 : 0;
}

// How many blocks have begun: a sign of life.
uint64_t engine_blocks() { return pool->next.load(); }

void engine_cancel() {
  if (!pool || pool->pid != getpid()) return;
  pool->cancelled = true;
  while (!engine_wait(checking() ? 1 : 20))
    for (Worker *worker : pool->workers)
      if (worker->in_fiber) pthread_kill(worker->os_thread, SIGURG);
}

// As engine_cancel, and the result says where the kernel was.
void engine_expire() {
  pool->expired = true;
  engine_cancel();
}

void engine_result(EngineFailure *failure) { *failure = pool->failure; }

// What the kernels printed, in the order of their blocks; the caller copies it before the next launch.
const char *engine_printed() {
  static std::string text;
  std::stable_sort(pool->printed.begin(), pool->printed.end(),
                   [](const auto &a, const auto &b) { return a.first < b.first; });
  text.clear();
  for (const auto &piece : pool->printed) text += piece.second;
  return text.c_str();
}

// Memory of a device array: poisoned, aligned as CuPy's, with guards on both sides, so that an access past the end is
// a fault at once and not somebody else's data.
void *engine_allocate(size_t bytes) {
  const size_t page = page_bytes();
  size_t data = (bytes + 255) / 256 * 256, pages = (data + page - 1) / page * page;
  if (data < bytes || pages < data || pages + 2 * GUARD_BYTES < pages) return nullptr;
  char *base = map_pages(pages + 2 * GUARD_BYTES, PROT_NONE, 0);  // reserved: more than the machine has is refused
  if (!base) return nullptr;
  char *window = base + GUARD_BYTES;
  if (mprotect(window, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, pages + 2 * GUARD_BYTES);
    return nullptr;
  }
  memset(window, POISON, pages);
  return window + pages - data;
}

// Arrays whose size is no multiple of 256 bytes have slack before the guards: the first byte there that is not poison
// any more, relative to `begin`, or 0 where all of it is. It is poisoned again.
int64_t engine_overrun(char *begin, size_t bytes) {
  const size_t page = page_bytes();
  size_t data = (bytes + 255) / 256 * 256, pages = (data + page - 1) / page * page;
  char *pieces[2][2] = {{begin + bytes, begin + data}, {begin + data - pages, begin}};
  int64_t found = 0;
  for (auto &piece : pieces) {
    char *p = piece[0], *end = piece[1];
    while (p < end && *(unsigned char *)p == POISON) ++p;
    if (p == end) continue;
    if (!found) found = p - begin;
    memset(p, POISON, end - p);
  }
  return found;
}

void engine_release(void *begin, size_t bytes) {
  const size_t page = page_bytes();
  size_t data = (bytes + 255) / 256 * 256, pages = (data + page - 1) / page * page;
  munmap((char *)begin + data - pages - GUARD_BYTES, pages + 2 * GUARD_BYTES);
}

}  // extern "C"
