// Blocks that wait for each other, on few OS threads: in grid.sync(), or by looking at memory again and again.
//
// As a rule a worker runs a block from its start to its end. A block that waits for others is set aside with all its
// fibers and its shared memory, and the worker begins another one, as a GPU has many blocks on its processors at once.
#include "worker.h"

#include <errno.h>

namespace {

uint64_t n_begun() { return std::min(pool->next.load(), pool->total); }
bool may_begin() {
  return pool->next.load() < pool->total && n_begun() - pool->ended.load() < pool->launch.most_blocks;
}
bool is_over() { return pool->cancelled.load() || pool->stop_at.load() != ~0ull; }

// The block that runs waits for others, and its worker runs them meanwhile.
void park(Worker& w) {
  w.parking = true;
  w.in_fiber = false;
  switch_to(w.current->context, w.main);
  if (pool->cancelled.load()) leave_cancelled(w);
}

// If a compiler calls no function for the address of a __shared__ array, all blocks of an OS thread share one place.
bool in_one_place(const Block& b) {
  return b.static_base && !(b.static_base >= b.shared && b.static_base < b.shared + SHARED_WINDOW);
}

// The arrays there of a block that gives way to another one, and of one that comes back.
void save_arrays(Worker& w) {
  const EngineLaunch& l = pool->launch;
  if (in_one_place(w)) w.left_behind.assign(w.static_base + l.static_begin, w.static_base + l.static_end);
}
void restore_arrays(Worker& w) {
  if (in_one_place(w)) memcpy(w.static_base + pool->launch.static_begin, w.left_behind.data(), w.left_behind.size());
}

void set_aside(Worker& w, Block* to) {
  save_arrays(w);
  if (checking()) w.books = check_set_aside(w.n_threads);
  std::swap(static_cast<Block&>(w), *to);
  w.parked.push_back(to);
}

void bring_back(Worker& w, Block* from) {
  std::swap(static_cast<Block&>(w), *from);
  w.parked.erase(std::find(w.parked.begin(), w.parked.end(), from));
  w.spare.push_back(from);
  restore_arrays(w);
  if (checking()) {
    check_bring_back(w.books);
    w.books = nullptr;
    set_current(w, w.current);
  }
}

// Memory for one more block, or null.
Block* take_spare(Worker& w) {
  if (w.spare.empty()) w.spare.push_back(new Block);
  Block* b = w.spare.back();
  if (!equip(*b)) return nullptr;
  w.spare.pop_back();
  return b;
}

// After a launch: some are kept for the next one.
void give_back(Worker& w) {
  for (Block* b : w.parked) {
    if (checking() && b->books) check_drop(b->books);
    b->books = nullptr;
    w.spare.push_back(b);
  }
  w.parked.clear();
  unsigned kept = 0;
  for (size_t i = 0; i < w.spare.size();) {
    Block* b = w.spare[i];
    kept += b->n_stacks;
    if (kept <= 8 * MAX_THREADS && ++i) continue;
    if (b->shared) munmap(b->shared, SHARED_WINDOW);
    if (b->stacks) munmap(b->stacks, stack_stride() * b->n_stacks);
    delete b;
    w.spare[i] = w.spare.back();
    w.spare.pop_back();
  }
}

// Of those set aside that can go on: the one that began first, or the one that has waited longest for its turn.
Block* choose(Worker& w, bool first) {
  Block* found = nullptr;
  std::unique_lock<std::mutex> lock(pool->mutex);
  for (Block* b : w.parked) {
    if (b->at_grid && b->grid_turn == pool->grid_turn) continue;
    if (!found || (first && b->block < found->block)) found = b;
  }
  return found;
}

// A block has ended. Others may wait for it in grid.sync() in vain.
void note_end(Worker& w) {
  const uint64_t ended = pool->ended.fetch_add(1) + 1;
  if (!pool->launch.cooperative || w.finished < w.n_threads) return;
  std::unique_lock<std::mutex> lock(pool->mutex);
  if (!pool->grid_arrived || pool->grid_arrived + ended < pool->total) return;
  EngineFailure failure = pool->grid_waiter;
  failure.count = (unsigned)pool->grid_arrived;
  failure.other_count = (unsigned)ended;
  lock.unlock();
  record(failure);
  pool->turned.notify_all();
}

// The block that the worker holds, until it ends or waits for others.
void run(Worker& w) {
  w.parking = false;
  w.critical = 1;  // before in_fiber: else an interrupt in between would take the worker's stack for a kernel's
  w.in_fiber = true;
  engine_static_base = w.static_base;
  engine_own_shared = w.shared;
  enter(w.main, *w.current);
  w.in_fiber = false;
  if (w.parking) return;
  if (w.finished == w.n_threads) leave_mbarriers(w);
  if (checking()) check_block_end(w.n_threads);
  trace(w, TRACE_BLOCK_END, NOBODY, nullptr, 0, w.n_threads - w.finished);
  note_end(w);
}

bool begin_next(Worker& w) {
  const uint64_t block = pool->next.fetch_add(1);
  if (block >= pool->total || block >= pool->stop_at.load() || pool->cancelled.load()) return false;
  begin_block(w, block);
  run(w);
  return true;
}

// Until all blocks that this worker can begin have ended. The block that ran last stays where it is while nobody else
// takes its place: w.parking is true if there is one.
void run_blocks(Worker& w) {
  w.parking = w.give_way = false;
  w.unplaced = 0;
  bool first = false;  // every other turn belongs to the block that began first: so one of them comes to its end
  while (!is_over()) {
    if (!w.parking && w.parked.empty()) {
      if (!begin_next(w)) break;
      continue;
    }
    first = !first;
    Block* next = first ? choose(w, true) : nullptr;
    if (!next && may_begin()) {
      Block* room = w.parking ? take_spare(w) : nullptr;
      if (room) set_aside(w, room);
      if (room || !w.parking) {
        w.parking = false;
        begin_next(w);
        continue;
      }
      pool->launch.most_blocks = std::max<uint64_t>(n_begun() - pool->ended.load(), 1);  // the system gives no memory
    }
    if (!next) next = choose(w, false);
    const bool here_can = w.parking && !(w.at_grid && w.grid_turn == pool->grid_turn);
    if (next) {
      Block* room = w.parking ? take_spare(w) : nullptr;
      if (w.parking && !room) next = nullptr;
      if (room) set_aside(w, room);
      if (next) {
        bring_back(w, next);
        run(w);
        continue;
      }
    }
    if (here_can) {
      run(w);
      continue;
    }
    std::unique_lock<std::mutex> lock(pool->mutex);  // all wait in grid.sync(), for blocks of other workers
    pool->turned.wait_for(lock, std::chrono::milliseconds(5));
  }
  // The time is up: a block that waits says where.
  if (pool->expired.load() && !w.parking && !w.parked.empty()) bring_back(w, w.parked.front()), w.parking = true;
  if (pool->expired.load() && w.parking) run(w);
  give_back(w);
}

// Other threads of the block first, each of them once; then other blocks.
void let_others_run(Worker& w) {
  if (pool->cancelled.load(std::memory_order_relaxed)) leave_cancelled(w);
  Fiber* from = w.current;
  unsigned n_ready = 0;
  for (unsigned i = 0; i < w.n_warps; ++i) n_ready += (unsigned)__builtin_popcount(w.ready[i]);
  if (n_ready == 1) {  // lanes whose trace is full wait for this one to wait
    for (unsigned i = 0; i < w.n_warps; ++i) {
      if (!w.paused[i]) continue;
      check_merge_warp(i, w.n_threads, w.paused[i] | w.ready[i]);
      n_ready += (unsigned)__builtin_popcount(w.paused[i]);
      w.ready[i] |= w.paused[i];
      w.paused[i] = 0;
    }
  }
  // A block that only looks is set aside when each of its threads has had its turn; one that meets in barriers between
  // its looks, when they have become many.
  if (w.idle++ >= n_ready || ++w.looks >= 4 * w.n_threads + 64) {
    w.idle = w.looks = 0;
    if (deliver_copies(w)) return;  // a copy that a thread waits for arrives although others look
    if (!w.parked.empty() || w.cluster.size > 1 || may_begin()) return park(w);
  }
  for (unsigned i = 1; i < w.n_threads; ++i) {
    unsigned at = (from->lane.linear + i) % w.n_threads;
    if (!(w.ready[at / WARP] >> (at % WARP) & 1)) continue;
    w.warp = at / WARP;
    set_current(w, &w.fibers[at]);
    enter(from->context, *w.current);
    return;
  }
}

// A thread that has been running ever since the last look may wait for what another one does: others are let run. Where
// that helped nobody so far, the next look is soon. A block whose threads meet in barriers may wait for other blocks too.
void nudge(std::chrono::microseconds since) {
  bool found = false;
  for (Worker* worker : pool->workers) {
    const uint64_t fiber = worker->in_fiber ? (uint64_t)*(Fiber* volatile*)&worker->current : 0;
    const uint64_t block = *(volatile uint64_t*)&worker->block + 1;
    if (!fiber || block != worker->seen_block) worker->same_block = std::chrono::microseconds(0);
    else worker->same_block += since;
    const bool same_thread = fiber && fiber == worker->seen && block == worker->seen_block;
    if (fiber && worker->same_block >= (pool->shared_out ? SHORT_TURN : LONG_TURN)) {
      worker->give_way = pool->shared_out = true;
      worker->same_block = std::chrono::microseconds(0);
    }
    if (same_thread || (fiber && worker->give_way)) {
      if (!pool->code_end) find_code();
      pthread_kill(worker->os_thread, SIGURG);
    }
    found = found || same_thread;
    worker->seen = fiber;
    worker->seen_block = block;
  }
  pool->slice = found ? std::max(SHORT_SLICE, pool->slice / 4) : std::min(LONG_SLICE, pool->slice * 3 / 2);
}

// From a signal handler, between two instructions of a kernel.
void preempt(Worker& w) {
  const int kept = errno;
  w.critical++;
  w.interrupted = false;
  w.looks += w.give_way ? 4 * w.n_threads + 64 : w.n_threads;
  w.give_way = false;
  let_others_run(w);
  w.critical--;
  errno = kept;
}

}  // namespace

extern "C" {

int engine_cooperative() { return (int)pool->launch.cooperative; }

// All threads of the block, then all blocks of the grid. One thread waits for the others' blocks.
void engine_grid_sync(const char* file, int line) {
  Worker& w = here();
  if (!pool->launch.cooperative)
    engine_fail(
        "grid.sync() needs a cooperative launch, in which all blocks are on the GPU at once: make the kernel with "
        "cp.RawKernel(..., enable_cooperative_groups=True)",
        file, line);
  if (w.fibers[0].finished)
    engine_fail(
        "thread (0,0,0) of the block has left the kernel, and in grid.sync() it speaks for its block", file, line);
  engine_barrier(BarrierOp::none, 0, file, line);
  const bool leads = !w.grid_led;
  if (leads) {
    Critical guard(w);
    w.grid_led = true;
    std::unique_lock<std::mutex> lock(pool->mutex);
    const uint64_t turn = pool->grid_turn, arrived = ++pool->grid_arrived;
    if (arrived == pool->total) {
      pool->grid_arrived = 0;
      pool->grid_turn++;
      lock.unlock();
      pool->turned.notify_all();
      if (checking()) check_grid_sync();
    } else {
      EngineFailure failure = failure_at(w, LEFT_BEFORE_GRID_SYNC, file, line);
      if (arrived == 1) pool->grid_waiter = failure;
      const uint64_t ended = pool->ended.load();
      lock.unlock();
      if (ended && arrived + ended == pool->total) {
        failure.count = (unsigned)arrived;
        failure.other_count = (unsigned)ended;
        fail(w, failure);
      }
      w.at_grid = true;
      w.grid_turn = turn;
      park(w);  // it is brought back when all have come
      w.at_grid = false;
    }
  }
  engine_barrier(BarrierOp::none, 0, file, line);
  if (leads) w.grid_led = false;
}

}  // extern "C"
