// A launch from start to end: workers that take blocks from the pool, and the functions by which Python starts a
// launch, waits for it, cancels it and reads how it ended.
//
// Workers are kept from launch to launch. The mutex of the pool orders everything here: what engine_start writes under
// it, a worker sees when it wakes, and what workers wrote, engine_wait's caller sees when the last one is done.
#include "worker.h"

namespace {

unsigned threads_of(const EngineLaunch& l) { return l.block[0] * l.block[1] * l.block[2]; }

// A GPU's window of shared memory begins at a multiple of 4 GiB, so the low 32 bits of a pointer into it are the address
// in shared memory, and sources cast the one to the other. Where a system has no room for that, they are refused.
char* map_shared(size_t bytes) {
  constexpr size_t WINDOWS = (size_t)1 << 32;
  char* const all = map_pages(bytes + WINDOWS, PROT_NONE);
  if (!all) return map_pages(bytes, PROT_NONE);
  const size_t before = (WINDOWS - (uintptr_t)all % WINDOWS) % WINDOWS;
  if (before) munmap(all, before);
  if (before < WINDOWS) munmap(all + before + bytes, WINDOWS - before);
  return all + before;
}

// The shared memory of a block, and its fibers: only addresses, until they are touched. window: where a cluster has its
// shared memory. False: the system has none left.
bool equip(Block& b, char* window_of_cluster) {
  if (!b.shared) {
    b.shared = b.space = window_of_cluster ? window_of_cluster : map_shared(SHARED_WINDOW);
    if (!b.shared) return false;
    char* window = b.shared + GUARD_BYTES;
    mprotect(window, STATIC_BYTES - STATIC_SHIFT, PROT_READ | PROT_WRITE);
    b.static_limit = window + STATIC_BYTES - STATIC_SHIFT;
    window += STATIC_BYTES + GUARD_BYTES;
    mprotect(window, DYNAMIC_BYTES, PROT_READ | PROT_WRITE);
    b.dynamic_limit = window + DYNAMIC_BYTES;
  }
  const unsigned n = threads_of(pool->launch);
  if (n > b.n_stacks) {
    if (b.stacks) munmap(b.stacks, stack_stride() * b.n_stacks);
    b.fibers.clear();
    b.n_stacks = 0;
    b.stacks = map_pages(stack_stride() * n);
    if (!b.stacks) return false;
    b.n_stacks = n;
  }
  for (unsigned i = (unsigned)b.fibers.size(); i < n; ++i) {
    Fiber f = {};
    f.stack = b.stacks + i * stack_stride();
    // A recursion without end is a fault, not the next fiber's stack.
    if (mprotect(f.stack, page_bytes(), PROT_NONE) != 0) return false;
    b.fibers.push_back(f);
  }
  return true;
}

// Place the kernel's static __shared__ arrays so that they end where a guard begins.
void place_static(Worker& w) {
  const EngineLaunch& l = pool->launch;
  w.static_base = nullptr;
  if (!l.anchor || l.static_begin == l.static_end) return;
  w.static_base = w.static_limit - l.static_end;
  w.static_base -= ((uintptr_t)w.static_base + l.static_aligned) % l.static_align;
  engine_static_base = w.static_base;
  // If compilers do not call __tls_get_addr() for thread-locals, they are where the C library put them.
  char* anchor = l.anchor();
  if (anchor != w.static_base + l.anchor_offset) w.static_base = anchor - l.anchor_offset;
}

void begin_block(Worker& w, uint64_t block) {
  const EngineLaunch& l = pool->launch;
  const unsigned n = threads_of(l);
  w.n_threads = n;
  w.n_warps = (n + WARP - 1) / WARP;
  w.finished = w.arrived = w.warp = 0;
  w.barrier_sum = 0;
  w.named_open = w.idle = w.looks = 0;
  w.grid_led = w.at_grid = false;
  w.mbarriers.clear();
  w.progress = w.last_progress = w.timeouts = 0;
  w.cluster_barrier = ClusterBarrier();
  w.cluster_barrier.alive = n;
  begin_warpgroups(w);
  w.order = l.order ? (l.order + block) * 0x9E3779B97F4A7C15 | 1 : 0;
  w.block = block;
  place_static(w);
  // On a GPU the contents of the previous block remain; NaN marks memory that was not written.
  if (w.static_base) memset(w.static_base + l.static_begin, POISON, l.static_end - l.static_begin);
  const size_t align = std::max<size_t>(l.dynamic_align, 128);
  const size_t dynamic = (l.dynamic_shared + align - 1) / align * align;
  w.dynamic = w.dynamic_limit - dynamic;
  if (checking()) w.dynamic = (char*)w.dynamic - CHECKED_SLACK;  // just past the end is a finding, not a fault
  if (dynamic) memset(w.dynamic, POISON, dynamic);

  uint3 index = {
      (unsigned)(block % l.grid[0]), (unsigned)(block / l.grid[0] % l.grid[1]),
      (unsigned)(block / l.grid[0] / l.grid[1])};
  uint3 thread = {0, 0, 0};
  for (unsigned i = 0; i < n; ++i) {
    Fiber& f = w.fibers[i];
    f.lane.thread_index = thread;
    if (++thread.x == l.block[0]) {
      thread.x = 0;
      if (++thread.y == l.block[1]) thread.y = 0, ++thread.z;
    }
    f.lane.block_index = index;
    f.lane.block_size = dim3(l.block[0], l.block[1], l.block[2]);
    f.lane.grid_size = dim3(l.grid[0], l.grid[1], l.grid[2]);
    f.lane.linear = i;
    f.lane.cluster_size = dim3(l.cluster[0], l.cluster[1], l.cluster[2]);
    f.collective = nullptr;
    f.copies.clear();
    f.groups = 0;
    f.mbarrier = nullptr;
    f.phase_over = f.product_fence = false;
    if (!f.stores.empty()) f.stores.clear();
    if (!f.unseen.empty()) f.unseen.clear();
    f.store_groups = f.product_groups = 0;
    f.group_name = nullptr;
    f.products = 0;
    f.named = -1;
    f.watched = nullptr;
    f.looks = 0;
    f.at_barrier = f.at_activemask = f.at_cluster = f.finished = f.carry = false;
    f.cluster_turn = 0;
    f.fresh = true;
    f.preempted = 0;
  }
  for (unsigned i = 0; i < w.n_warps; ++i) {
    unsigned lanes = std::min(n - i * WARP, WARP);
    w.paused[i] = w.meeting[i] = 0;
    w.ready[i] = w.alive[i] = lanes == WARP ? ~0u : (1u << lanes) - 1;
  }
  if (checking()) check_block(block, w.n_warps, w.static_base, w.dynamic);
  trace(w, TRACE_BLOCK, NOBODY, nullptr, 0, (int64_t)w.static_base, (int64_t)w.dynamic);
  set_current(w, &w.fibers[0]);
}

// An OS thread's whole life.
void work(Worker* mine) {
  Worker& w = *mine;
  engine_worker = mine;
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
    if (cluster_size() > 1) run_clusters(w);
    else run_blocks(w);
    std::lock_guard<std::mutex> lock(pool->mutex);
    if (--pool->running == 0) pool->done.notify_all();
  }
}

}  // namespace

extern "C" {

// 0; -1: a launch is under way; -2: the system gives no memory or no thread.
int engine_start(const EngineLaunch* launch, unsigned n_workers) {
  if (!pool || pool->pid != getpid()) {  // threads do not survive a fork: the child starts a pool of its own
    pool = new Pool;
    pool->pid = getpid();
  }
  install_handlers();
  std::lock_guard<std::mutex> lock(pool->mutex);
  if (pool->running) return -1;
  pool->launch = *launch;
  pool->total = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  pool->next = pool->ended = 0;
  pool->grid_turn = pool->grid_arrived = 0;
  pool->slice = LONG_SLICE;
  pool->looked = std::chrono::steady_clock::now();
  pool->shared_out = false;
  pool->code_begin = pool->code_end = 0;
  for (Worker* worker : pool->workers) worker->seen = 0;
  pool->stop_at = ~0ull;
  pool->cancelled = pool->expired = false;
  pool->printed.clear();
  memset(&pool->failure, 0, sizeof pool->failure);
  while (pool->workers.size() < n_workers) {
    Worker* worker = new Worker;
    sigset_t all, before;  // signals meant for the program go to its own threads; faults are always ours
    sigfillset(&all);
    for (int signal : FAULTS) sigdelset(&all, signal);
    sigdelset(&all, SIGURG);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    worker->rescue = map_pages(STACK_BYTES);
    worker->signal_stack = map_pages(STACK_BYTES);
    bool started = worker->rescue && worker->signal_stack && equip(*worker);
    try {
      if (started) std::thread(work, worker).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!started && pool->workers.empty()) return -2;
    if (!started) break;  // fewer than asked for will do
    pool->workers.push_back(worker);
  }
  pool->running = (unsigned)std::min<uint64_t>({n_workers, pool->workers.size(), pool->total / cluster_size()});
  if (cluster_size() > 1) {  // a system has a limit of mappings, and each stack takes two
    constexpr unsigned MOST_FIBERS = 16 * MAX_THREADS;
    pool->running = std::min(pool->running, std::max(1u, MOST_FIBERS / (cluster_size() * threads_of(*launch))));
  }
  for (unsigned i = 0; i < pool->running; ++i)
    if (!equip(*pool->workers[i])) pool->running = i;  // fewer will do
  if (!pool->running) return -2;
  for (unsigned i = 0; i < pool->running; ++i) {
    pool->workers[i]->called = true;
    pool->workers[i]->start.notify_one();
  }
  return 0;
}

// 1 when the launch has ended, 0 when the time ran out first.
int engine_wait(int milliseconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  std::unique_lock<std::mutex> lock(pool->mutex);
  for (;;) {
    if (pool->done.wait_until(lock, std::min(until, pool->looked + pool->slice), [] { return pool->running == 0; }))
      return 1;
    const auto now = std::chrono::steady_clock::now();
    if (now >= pool->looked + pool->slice) {
      nudge(std::chrono::duration_cast<std::chrono::microseconds>(now - pool->looked));
      pool->looked = now;
    }
    if (now >= until) return 0;
  }
}

// How many blocks have begun, and how many have ended: a sign of life.
uint64_t engine_blocks() { return pool->next.load() + pool->ended.load(); }

// How many blocks cannot begin, because as many as can be resident at once have begun and not ended.
uint64_t engine_without_room() {
  const uint64_t next = pool->next.load();
  if (next >= pool->total || next - pool->ended.load() < pool->launch.most_blocks) return 0;
  return pool->total - next;
}

// Returns when all workers have left their kernels. They are asked again and again: an interrupt that meets the
// engine's own code is ignored, and in_fiber may be old by the time it is looked at.
void engine_cancel() {
  if (!pool || pool->pid != getpid()) return;
  pool->cancelled = true;
  while (!engine_wait(checking() ? 1 : 20))
    for (Worker* worker : pool->workers)
      if (worker->in_fiber) pthread_kill(worker->os_thread, SIGURG);
}

// As engine_cancel, and the result says where the kernel was.
void engine_expire() {
  pool->expired = true;
  engine_cancel();
}

// How large a struct is that Python has as well, and how many reasons there are: 0 for a name that is not known.
uint64_t engine_size_of(const char* name) {
  const std::pair<const char*, uint64_t> sizes[] = {
      {"EngineLaunch", sizeof(EngineLaunch)},   {"EngineFailure", sizeof(EngineFailure)},
      {"EngineRegion", sizeof(EngineRegion)},   {"EngineSite", sizeof(EngineSite)},
      {"EngineStep", sizeof(EngineStep)},       {"EngineBarrier", sizeof(EngineBarrier)},
      {"EngineFinding", sizeof(EngineFinding)}, {"FailureReason", N_REASONS},
      {"EngineLeft", sizeof(EngineLeft)},       {"EngineEvent", sizeof(EngineEvent)},
      {"EngineTraced", sizeof(EngineTraced)},   {"EngineTraceKind", TRACE_KINDS},
  };
  for (const auto& [known, size] : sizes)
    if (strcmp(known, name) == 0) return size;
  return 0;
}

void engine_result(EngineFailure* failure) { *failure = pool->failure; }

// What the kernels printed, in the order of their blocks; the caller copies it before the next launch.
const char* engine_printed() {
  static std::string text;
  std::stable_sort(
      pool->printed.begin(), pool->printed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  text.clear();
  for (const auto& piece : pool->printed) text += piece.second;
  return text.c_str();
}

}  // extern "C"
