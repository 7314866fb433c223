// Clusters: blocks that are on a GPU's processors together, wait for each other, and read and write each other's shared
// memory.
//
// A worker holds all blocks of a cluster from the start of the first to the end of the last. All of them have begun
// before one runs; it runs until none of its threads can go on, then the next one does. So a cluster needs no locks, and
// its order of events is the same every time. The windows of their shared memory lie at multiples of PEER_STRIDE from one
// base, from which addresses of 32 bits count: an address leads to the same byte in every block of the cluster.
#include "worker.h"

namespace {

unsigned cluster_size() {
  const unsigned* const sizes = pool->launch.cluster;
  return sizes[0] * sizes[1] * sizes[2];
}

// The number in the grid of a block of a cluster.
uint64_t block_of_cluster(uint64_t cluster, unsigned rank) {
  const EngineLaunch& l = pool->launch;
  uint64_t block = 0, stride = 1;
  for (unsigned i = 0; i < 3; ++i) {
    const uint64_t clusters = l.grid[i] / l.cluster[i];
    block += (cluster % clusters * l.cluster[i] + rank % l.cluster[i]) * stride;
    stride *= l.grid[i];
    cluster /= clusters;
    rank /= l.cluster[i];
  }
  return block;
}

// The block of the cluster in whose shared memory an address is, or null.
Block* owner_of(Worker& w, const void* address) {
  const char* const p = (const char*)address;
  if (engine_is_shared(p)) return &w;
  if (w.cluster.size == 1 || p < w.cluster.windows) return nullptr;
  const size_t at = (size_t)(p - w.cluster.windows);
  return at / PEER_STRIDE < w.cluster.size && at % PEER_STRIDE <= SHARED_WINDOW
             ? &member(w, (unsigned)(at / PEER_STRIDE))
             : nullptr;
}

bool can_run(const Block& b) {
  for (unsigned i = 0; i < b.n_warps; ++i)
    if (b.ready[i] || b.paused[i]) return true;
  return false;
}

// What has happened in the cluster so far: whoever could not go on tries again when there is more.
uint64_t events(Worker& w) {
  uint64_t all = 1;
  for (unsigned rank = 0; rank < w.cluster.size; ++rank) all += member(w, rank).progress;
  return all;
}

// The block that runs changes places with another one of its cluster.
void change_to(Worker& w, unsigned rank) {
  if (rank == w.rank) return;
  save_arrays(w);
  if (checking()) w.books = check_set_aside(w.n_threads);
  std::swap(static_cast<Block&>(w), *w.cluster.members[w.rank]);
  std::swap(static_cast<Block&>(w), *w.cluster.members[rank]);
  restore_arrays(w);
  if (!checking()) return;
  check_bring_back(w.books);
  w.books = nullptr;
  set_current(w, w.current);
}

// No thread of the block can run: other blocks of the cluster may, or may have to try again. timed_out: its own waits
// have been let go without any progress. False: no block can, and all have tried.
bool wait_for_peers(Worker& w, bool timed_out) {
  if (w.cluster.size == 1) return false;
  const uint64_t now = events(w);
  w.tried = now;
  if (timed_out) w.given_up = now;
  for (unsigned rank = 0; rank < w.cluster.size; ++rank) {
    const Block& b = member(w, rank);
    if (rank == w.rank || b.ended) continue;
    if (!can_run(b) && b.tried == now && (!timed_out || b.given_up == now)) continue;
    park(w);
    return true;
  }
  return false;
}

// Of the blocks that have not ended, in turn: one that can run or has not tried, or else one whose waits may be let go.
unsigned next_member(Worker& w) {
  const uint64_t now = events(w);
  for (const bool timed_out : {false, true})
    for (unsigned i = 1; i <= w.cluster.size; ++i) {
      const unsigned rank = (w.rank + i) % w.cluster.size;
      const Block& b = member(w, rank);
      if (b.ended) continue;
      if (can_run(b) || b.tried != now || (timed_out && b.given_up != now)) return rank;
    }
  unsigned rank = 0;
  while (member(w, rank).ended) ++rank;
  return rank;
}

// All blocks of a cluster begin; the first one is the one that runs next. False: the system gives no memory.
bool begin_cluster(Worker& w, uint64_t cluster) {
  Cluster& c = w.cluster;
  const unsigned size = cluster_size();
  if (!c.windows) c.windows = map_shared(MAX_CLUSTER * PEER_STRIDE);
  if (!c.windows) return false;
  while (c.members.size() < size) c.members.push_back(new Block);
  for (unsigned rank = 0; rank < size; ++rank)
    if (!equip(*c.members[rank], c.windows + rank * PEER_STRIDE)) return false;
  c.size = size;
  if (checking()) check_cluster(size);
  for (unsigned rank = 0; rank < size; ++rank) {
    if (rank) {
      save_arrays(w);
      if (checking()) w.books = check_set_aside(w.n_threads);
      std::swap(static_cast<Block&>(w), *c.members[rank - 1]);
    }
    std::swap(static_cast<Block&>(w), *c.members[rank]);
    w.rank = rank;
    w.space = c.windows;
    w.ended = false;
    w.tried = w.given_up = 0;
    mprotect(w.static_limit - (STATIC_BYTES - STATIC_SHIFT), STATIC_BYTES - STATIC_SHIFT, PROT_READ | PROT_WRITE);
    mprotect(w.dynamic_limit - DYNAMIC_BYTES, DYNAMIC_BYTES, PROT_READ | PROT_WRITE);
    begin_block(w, block_of_cluster(cluster, rank));
  }
  member(w, 0).cluster_barrier.alive = size * w.n_threads;
  change_to(w, 0);
  return true;
}

// A block has ended: nobody may touch its shared memory any more. (A checked run reports who does.)
void close_windows(Worker& w) {
  w.ended = true;
  if (checking()) return;
  mprotect(w.static_limit - (STATIC_BYTES - STATIC_SHIFT), STATIC_BYTES - STATIC_SHIFT, PROT_NONE);
  mprotect(w.dynamic_limit - DYNAMIC_BYTES, DYNAMIC_BYTES, PROT_NONE);
}

void end_cluster(Worker& w) {
  Cluster& c = w.cluster;
  std::swap(static_cast<Block&>(w), *c.members[w.rank]);
  for (unsigned rank = 0; rank < c.size; ++rank) {
    Block& b = *c.members[rank];
    if (is_traced && !b.ended) trace_in(b.block, TRACE_BLOCK_END, NOBODY, nullptr, 0, b.n_threads - b.finished, 0);
    if (checking() && b.books) check_drop(b.books);
    b.books = nullptr;
  }
  w.rank = 0;
  c.size = 1;
}

// After a launch: the memory of few threads is kept for the next one.
void give_members_back(Worker& w) {
  unsigned kept = 0;
  for (Block* b : w.cluster.members) kept += b->n_stacks;
  if (kept <= 4 * MAX_THREADS) return;
  for (Block* b : w.cluster.members) {
    if (b->stacks) munmap(b->stacks, stack_stride() * b->n_stacks);
    delete b;
  }
  w.cluster.members.clear();
}

// Clusters, one after the other, until there are none that this worker can begin.
void run_clusters(Worker& w) {
  const unsigned size = cluster_size();
  w.parking = w.give_way = false;
  w.unplaced = 0;
  while (!pool->cancelled.load()) {
    const uint64_t first = pool->next.fetch_add(size);
    if (first >= pool->total || block_of_cluster(first / size, 0) >= pool->stop_at.load()) break;
    if (!begin_cluster(w, first / size)) {
      EngineFailure failure = failure_at(w, STATED, "", 0);
      copy_text(failure.message, sizeof failure.message, "the system gives no memory for the blocks of a cluster");
      record(failure);
      break;
    }
    bool failed = false;
    for (unsigned left = size; left && !failed;) {
      run(w);
      if (!w.parking) {
        failed = w.finished < w.n_threads;
        close_windows(w);
        --left;
      } else if (pool->cancelled.load()) {
        if (pool->expired.load()) run(w), w.ended = true;  // it says where it waits
        failed = true;
      }
      w.parking = false;
      if (left && !failed) change_to(w, next_member(w));
    }
    end_cluster(w);
  }
  give_members_back(w);
}

// All threads of the cluster that have not left the kernel have arrived in barrier.cluster: those that wait go on.
void complete_cluster_barrier(Worker& w) {
  ClusterBarrier& barrier = member(w, 0).cluster_barrier;
  if (!barrier.arrived || barrier.arrived < barrier.alive) return;
  barrier.arrived = 0;
  ++barrier.turn;
  if (checking()) check_cluster_barrier();
  for (unsigned rank = 0; rank < w.cluster.size; ++rank) {
    Block& b = member(w, rank);
    for (unsigned i = 0; i < b.n_threads; ++i) {
      if (!b.fibers[i].at_cluster) continue;
      b.fibers[i].at_cluster = false;
      b.ready[i / WARP] |= 1u << (i % WARP);
    }
    b.idle = 0;
  }
  ++w.progress;
}

// The current fiber has left the kernel.
void leave_cluster_barrier(Worker& w, Fiber& f) {
  ClusterBarrier& barrier = member(w, 0).cluster_barrier;
  --barrier.alive;
  if (f.cluster_turn == barrier.turn) --barrier.arrived;
  complete_cluster_barrier(w);
}

[[noreturn]] void fail_in_cluster(const char* file, int line, const void* caller, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
[[noreturn]] void fail_in_cluster(const char* file, int line, const void* caller, const char* format, ...) {
  EngineFailure failure = failure_from(here(), STATED, file, line, caller);
  va_list values;
  va_start(values, format);
  vsnprintf(failure.message, sizeof failure.message, format, values);
  va_end(values);
  fail(here(), failure);
}

}  // namespace

extern "C" {

void engine_cluster_arrive(int orders, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  ClusterBarrier& barrier = member(w, 0).cluster_barrier;
  Fiber& f = *w.current;
  if (f.cluster_turn)
    fail_in_cluster(
        file, line, __builtin_return_address(0),
        "barrier.cluster.arrive: the thread has arrived already, and not waited since (barrier.cluster.wait)");
  f.cluster_turn = barrier.turn;
  ++barrier.arrived;
  ++w.progress;
  w.idle = 0;
  if (checking()) check_cluster_arrive(orders != 0);
  trace(w, TRACE_CLUSTER_ARRIVE, f.lane.linear, __builtin_return_address(0), 0, barrier.alive);
  complete_cluster_barrier(w);
}

void engine_cluster_wait(int orders, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  if (!f.cluster_turn)
    fail_in_cluster(
        file, line, __builtin_return_address(0),
        "barrier.cluster.wait: the thread has not arrived before "
        "(barrier.cluster.arrive)");
  trace(w, TRACE_CLUSTER_WAIT, f.lane.linear, __builtin_return_address(0));
  if (f.cluster_turn == member(w, 0).cluster_barrier.turn) {
    f.at_cluster = true;
    f.file = file;
    f.line = line;
    f.caller = __builtin_return_address(0);
    set_waiting(w, f);
    schedule(w);
  }
  f.cluster_turn = 0;
  if (checking()) check_cluster_wait(orders != 0);
  trace(w, TRACE_CLUSTER_WAITED, f.lane.linear, __builtin_return_address(0));
}

void* engine_map_shared(const void* pointer, unsigned rank, const char* name, const char* file, int line) {
  Worker& w = here();
  const void* const caller = __builtin_return_address(0);
  if (rank >= w.cluster.size)
    fail_in_cluster(file, line, caller, "%s: block rank %u, and the cluster has %u", name, rank, w.cluster.size);
  const Block* const owner = owner_of(w, pointer);
  if (!owner) fail(w, failure_from(w, NO_SHARED_POINTER, file, line, caller));
  const char* const p = (const char*)pointer;
  if (owner->rank == rank) return (void*)p;
  if (p < owner->shared || p > owner->shared + SHARED_WINDOW)
    fail_in_cluster(
        file, line, caller,
        "%s: on this system static __shared__ arrays of other blocks have no address: use dynamic shared memory", name);
  return member(w, rank).shared + (p - owner->shared);
}

unsigned engine_shared_rank(const void* pointer, const char* name, const char* file, int line) {
  Worker& w = here();
  const Block* const owner = owner_of(w, pointer);
  if (!owner)
    fail_in_cluster(file, line, __builtin_return_address(0), "%s takes an address in shared memory of a block", name);
  return owner->rank;
}

int engine_is_cluster_shared(const void* pointer) { return owner_of(here(), pointer) != nullptr; }

void* engine_cluster_pointer(unsigned offset, unsigned bytes, const char* name, const char* file, int line) {
  Worker& w = here();
  if (offset % bytes == 0 && offset < w.cluster.size * PEER_STRIDE && owner_of(w, w.space + offset))
    return w.space + offset;
  return engine_shared_pointer(offset, bytes, name, file, line);
}

}  // extern "C"
