// The trace of a checked run: what the warps of picked blocks did at barriers, copies and products, in the engine's order.
//
// All of it is here. Elsewhere a line calls trace(), which is one comparison while nothing is recorded. Lanes that do the
// same at the same place share an event: it stands where the first of them did it.
#include "worker.h"

extern "C" {

enum EngineTraceKind : uint32_t {
  TRACE_BLOCK,         // begins; value, phase: the addresses of its static and dynamic shared memory
  TRACE_BLOCK_END,     // value: threads that did not come to their end
  TRACE_EXIT,          // lanes leave the kernel
  TRACE_INIT,          // of mbarrier `number`; value: arrivals of a phase, phase: its address
  TRACE_ARRIVE,        // at mbarrier `number`, in phase `phase`; value: how many arrivals each lane is
  TRACE_EXPECT,        // value: bytes that the phase waits for besides; negative: that it waits for no longer
  TRACE_WAIT,          // for the end of `phase`, -1 for the one before the first; value: the parity
  TRACE_WAITED,        // and goes on
  TRACE_PHASE,         // `phase` ends
  TRACE_LOAD,          // issued; number: of its mbarrier, value: bytes
  TRACE_LANDED,        // the same, when its data are there
  TRACE_STORE,         // issued; value: bytes
  TRACE_STORED,        // value: how many stores have completed at this wait
  TRACE_ASYNC,         // cp.async; value: bytes
  TRACE_ASYNC_COMMIT,  // number: of the group
  TRACE_ASYNC_WAIT,    // value: bytes that have landed at this wait
  TRACE_PRODUCT,       // wgmma; number: how many its warpgroup has issued before, value: n
  TRACE_PRODUCT_COMMIT,
  TRACE_GROUP_WAIT,      // wgmma.wait_group or setmaxnreg (number 1); value: groups that may be left, or registers
  TRACE_GROUP_WAITED,    // and goes on
  TRACE_PRODUCTS_DONE,   // number: how many are by now, value: how many at this wait
  TRACE_BAR_ARRIVE,      // bar.arrive `number`; value: of how many threads
  TRACE_BAR_SYNC,        // bar.sync
  TRACE_BAR_SYNCED,      // and goes on
  TRACE_SYNC,            // __syncthreads
  TRACE_SYNCED,          // and goes on
  TRACE_CLUSTER_ARRIVE,  // barrier.cluster; value: of how many threads
  TRACE_CLUSTER_WAIT,
  TRACE_CLUSTER_WAITED,  // and goes on
  TRACE_KINDS,
};

struct EngineTraced {
  uint64_t block, pc;
  int64_t value, phase;
  uint32_t kind, thread, lanes, number;  // thread: the first, or NOBODY
};

}  // extern "C"

namespace {

constexpr uint32_t NOBODY = ~0u;
constexpr size_t MERGE_REACH = 64;  // how many events a lane may be behind the first of its warp

struct Trace {
  std::vector<uint64_t> blocks;  // none: all
  uint32_t warps = ~0u;
  uint64_t limit = 0, block = ~0ull;
  bool records = false;  // the block that runs is one of those
  bool is_cut = false;   // there were more events than the limit
  std::vector<EngineTraced> events;
  std::vector<size_t> of_warp[MAX_THREADS / WARP];  // events of the block that runs
  size_t seen[MAX_THREADS] = {};                    // how many of its warp's a thread has taken part in or passed
};
Trace traced;
bool is_traced = false;

bool same_event(const EngineTraced& a, const EngineTraced& b) {
  return a.kind == b.kind && a.pc == b.pc && a.number == b.number && a.value == b.value && a.phase == b.phase;
}

// Recorded whichever warps are picked: else phases would end for no reason.
bool changes_mbarrier(uint32_t kind) {
  return kind == TRACE_INIT || kind == TRACE_ARRIVE || kind == TRACE_EXPECT || kind == TRACE_LOAD;
}

bool is_picked(uint64_t block) {
  return traced.blocks.empty() || std::find(traced.blocks.begin(), traced.blocks.end(), block) != traced.blocks.end();
}

void enter_block(uint64_t block) {
  traced.block = block;
  traced.records = is_picked(block);
  for (auto& events : traced.of_warp) events.clear();
  std::fill(traced.seen, traced.seen + MAX_THREADS, 0);
}

void record_event(EngineTraced event) {
  const bool is_elsewhere = event.block != traced.block && event.thread == NOBODY;  // at another block's mbarrier
  if (event.block != traced.block && !is_elsewhere) enter_block(event.block);
  if (is_elsewhere ? !is_picked(event.block) : !traced.records) return;
  const bool is_of_warp = event.thread != NOBODY && event.kind != TRACE_LANDED;
  const unsigned warp = event.thread / WARP;
  if (is_of_warp && !changes_mbarrier(event.kind) && !(traced.warps >> warp & 1)) return;
  if (is_of_warp) {
    const std::vector<size_t>& others = traced.of_warp[warp];
    size_t& seen = traced.seen[event.thread];
    for (size_t i = seen; i < others.size() && i < seen + MERGE_REACH; ++i) {
      EngineTraced& known = traced.events[others[i]];
      if (!same_event(known, event) || known.lanes & event.lanes) continue;
      known.lanes |= event.lanes;
      seen = i + 1;
      return;
    }
  }
  if (traced.events.size() >= traced.limit) {
    traced.is_cut = true;
    return;
  }
  if (event.pc) check_callers((uintptr_t)event.pc);
  traced.events.push_back(event);
  if (!is_of_warp) return;
  traced.of_warp[warp].push_back(traced.events.size() - 1);
  traced.seen[event.thread] = traced.of_warp[warp].size();
}

// An event of a thread of a block, or of the block where it is NOBODY's.
void trace_in(
    uint64_t block, EngineTraceKind kind, unsigned thread, const void* caller, unsigned number, int64_t value,
    int64_t phase) {
  Critical guard(here());
  const unsigned lanes = thread == NOBODY ? 0 : 1u << (thread % WARP);
  record_event({block, (uint64_t)(uintptr_t)caller, value, phase, kind, thread, lanes, number});
}

inline void trace(
    const Worker& w, EngineTraceKind kind, unsigned thread, const void* caller, unsigned number = 0, int64_t value = 0,
    int64_t phase = 0) {
  if (__builtin_expect(is_traced, 0)) trace_in(w.block, kind, thread, caller, number, value, phase);
}

}  // namespace

extern "C" {

// n_blocks 0: of all blocks. warps: a mask of those whose events are recorded.
void engine_trace_start(const uint64_t* blocks, unsigned n_blocks, unsigned warps, uint64_t limit) {
  traced = Trace();
  traced.blocks.assign(blocks, blocks + n_blocks);
  traced.warps = warps;
  traced.limit = limit;
  is_traced = true;
}

// Returns how many events there are; they stay until the next start. is_cut: there were more than the limit.
unsigned engine_trace_stop(const EngineTraced** out, unsigned* is_cut) {
  is_traced = false;
  *out = traced.events.data();
  *is_cut = traced.is_cut;
  return (unsigned)traced.events.size();
}

}  // extern "C"
