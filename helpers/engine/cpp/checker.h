// The interface between the checker, the engine and Python (checked.py) in a checked run.
//
// Apart from books.h, which the checker's own parts alone see: whoever calls the checker needs no more than this.
#pragma once
#include "engine.h"

enum EngineRegionKind { ENGINE_ARRAY = 0, ENGINE_STATIC_SHARED = 1, ENGINE_DYNAMIC_SHARED = 2, ENGINE_VARIABLE = 3 };
enum EngineState : unsigned char { ENGINE_UNWRITTEN = 0, ENGINE_INITIAL = 1, ENGINE_WRITTEN = 2 };
enum EngineFindingKind {
  ENGINE_RACE = 1,
  ENGINE_OUT_OF_BOUNDS = 2,
  ENGINE_UNINITIALISED = 3,
  ENGINE_MISALIGNED = 4,
  ENGINE_IN_FLIGHT = 5,     // touched while a cp.async has not been waited for
  ENGINE_NEVER_WAITED = 6,  // a cp.async, until the end of its thread
  ENGINE_NOTED = 7,         // no access: size is an EngineNote, offset its value, region NO_REGION
  ENGINE_SAME_VALUE = 11,   // a race of two writes of one value
  ENGINE_CONST_WRITTEN = 12,
  ENGINE_INACTIVE_LANE = 13,     // a shuffle asks for the value of a lane that takes no part
  ENGINE_LOCAL_BOUNDS = 14,      // an index past the size that a type gives: maybe of an array of the thread's own
  ENGINE_NO_PROXY_FENCE = 17,    // ordinary writes, and what TMA or wgmma does after them
  ENGINE_SUMS_TOUCHED = 18,      // sums of a wgmma between its issue and its wait
  ENGINE_NO_PRODUCT_FENCE = 19,  // a wgmma without a wgmma.fence before it
  ENGINE_NOT_BEGUN = 22,         // shared memory of a block of the cluster that may not have begun, or may have ended
  ENGINE_ENDED = 23,
  ENGINE_BYTES = 20,      // a phase of an mbarrier ended before all that was sent to it had come; offset: the rest
  ENGINE_OVERTAKEN = 24,  // the next phase of an mbarrier ends, whether or not a thread has seen the end of this one
};

enum EngineNote : unsigned {
  NOTE_SHIFT = 1,       // by a count that is not below the width; the count
  NOTE_CONVERSION = 2,  // of a real number to an integer that has no such number; its bits as double
  NOTE_DIVISION = 3,    // of an integer by zero; the dividend
  NOTE_WMMA = 4,        // a matrix at a multiple of 16 bytes, where CUDA asks for 32; the address
};
constexpr uint32_t NO_REGION = ~0u;

extern "C" {

struct EngineRegion {
  uint64_t address, bytes;
  uint32_t kind, element;  // element: bytes
  uint32_t writable;       // 0: the kernel's parameter is a pointer to const, the variable __constant__
  uint32_t* fetches;       // per element, how often it was read; or null
  unsigned char* state;    // per element, an EngineState; or null
};

struct EngineSite {  // one instruction of the kernel, and one region it touches
  uint64_t pc;
  uint32_t region, size, is_write, is_atomic;
  uint64_t count;                           // accesses, one for each thread
  uint64_t requests, sectors, wavefronts;   // by warps; 0 without a profile
  uint64_t worst;                           // sectors or wavefronts of the costliest request
  uint32_t worst_lanes, worst_offsets[32];  // its lanes, and where in the region each of them went, in bytes
};

struct EngineStep {  // what lanes of a warp executed together between two barriers of a block
  uint64_t block;
  uint32_t interval, warp, site, lanes;  // interval: how many barriers came before it in the block
  uint64_t count;                        // how often
};

struct EngineBarrier {
  uint64_t block;
  const char* file;
  int line;
};

// No error, but worth a note: a barrier that some threads of a block had left the kernel before, or to which a warp came
// at another line.
struct EngineLeft {
  uint64_t block;
  const char* file;
  int line;
  uint32_t count, thread;  // how many had left, and the first of them; 0, and one that stood at other_line
  int other_line;
  uint32_t mask;     // of an operation of a warp: the lanes that it names; 0: a barrier of the block
  const char* name;  // of that operation
};

// Requests of warps to TMA, tensor cores and barriers, and their completion, in order.
enum EngineEventKind : uint32_t {
  EVENT_LOAD = 1,       // issued by a thread; number: of the mbarrier in the block, value: bytes
  EVENT_LANDED,         // the data of one are there; the same
  EVENT_WAIT,           // a warp waits for a phase of mbarrier `number`; value: the parity
  EVENT_WAITED,         // and goes on
  EVENT_ARRIVE,         // at mbarrier `number`; value: bytes that it expects
  EVENT_PRODUCT,        // wgmma, issued by a warpgroup; number: how many it has issued before, value: n
  EVENT_PRODUCTS_DONE,  // at the wait for them; number: how many are by now, value: how many of them at this wait
  EVENT_STORE,          // issued by a thread; value: bytes
  EVENT_STORED,         // at the wait for them; value: how many are
  EVENT_BAR_SYNC,       // a warp comes to bar.sync `number`; value: of how many threads
  EVENT_BAR_SYNCED,     // and goes on
  EVENT_BAR_ARRIVE,     // bar.arrive
};

struct EngineEvent {
  uint64_t block, pc;
  uint32_t thread, kind, number, value;
};

struct EngineFinding {
  int kind;
  uint32_t region;
  int64_t offset;
  uint64_t count, pc, other_pc, block, other_block;
  uint32_t size, thread, other_thread, is_write, other_is_write;
  uint32_t is_volatile;  // both sides
  uint32_t of_peer;      // 1: the shared memory is that of `owner`, another block of the cluster
  uint64_t owner;
  // Of a warp-wide operation or of an index, whose place is known without pc: name of the operation and its lane source,
  // or of the array's type, with the index as offset and its column as source.
  uint32_t mask, source;
  int32_t line;
  const char *file, *name;
};

// What Python calls, before and after a launch.
void engine_check_start(const EngineRegion* regions, unsigned n, uint64_t profiled_code);  // 0: no profile
void engine_check_stop();
void engine_check_counts(uint64_t* barriers, uint64_t* collectives, uint64_t* warp_barriers, uint64_t* tensor_flop);
unsigned engine_check_findings(const EngineFinding** out);
unsigned engine_check_steps(const EngineStep** out, uint64_t* whole);  // whole: blocks before this one have all theirs
unsigned engine_check_barriers(const EngineBarrier** out);
unsigned engine_check_left(const EngineLeft** out);
unsigned engine_check_events(const EngineEvent** out);
// Of the last write of a byte of a region: its pc, or 0 where there was none.
uint64_t engine_check_writer(unsigned region, uint64_t offset, uint64_t* block, unsigned* thread);
unsigned engine_check_callers(uint64_t pc, const uintptr_t** out);
unsigned engine_check_sites(EngineSite* out, unsigned most);  // returns how many there are
}

// What the engine reports to the checker.
extern bool checked_run __attribute__((visibility("hidden")));
inline bool checking() { return checked_run; }
void check_block(uint64_t block, unsigned n_warps, const void* static_shared, const void* dynamic_shared);
void check_block_end(unsigned n_threads);
void* check_set_aside(unsigned n_threads);  // the running block's part of the books, while others run
void check_bring_back(void* kept);
void check_drop(void* kept);
void check_grid_sync();
void check_switch(unsigned thread, const void* stack_top);  // this thread of the block runs from now on
void check_barrier(const char* file, int line, bool whole = true);
// Named barriers of some threads: one arrives; one goes on; all have.
void check_named_arrival(unsigned number);
void check_named_departure(unsigned number, unsigned thread);
void check_named_over(unsigned number);
void check_left(
    const char* file, int line, unsigned count, unsigned thread, int other_line = 0, unsigned mask = 0,
    const char* name = "");
void check_warp_sync(unsigned warp, unsigned mask);
void check_collective(bool is_barrier);
void check_no_such_lane(const engine::Collective& operation, unsigned lane, unsigned source);
void check_fence(bool own_block);
void check_async_issue(void* target, unsigned bytes, void* caller, void* frame);  // by the thread that runs
void check_async_landed(void* target, unsigned bytes);
void check_async_left(void* target, unsigned bytes, void* caller);
// mbarriers, by their number in the block. The thread that runs initialises, uses, arrives at, or has waited for one.
void check_mbarrier_write(void* word, void* caller, void* frame);
void check_mbarrier_init(unsigned number, const void* word, const void* caller);
// rank: of the block whose mbarrier it is.
void check_mbarrier_use(unsigned number, unsigned rank, const void* caller, bool by_copy);
void check_mbarrier_arrive(unsigned number, unsigned rank, const void* caller);
void check_mbarrier_wait(unsigned number, const void* caller);
void check_phase_end(unsigned number, unsigned rank, unsigned bytes_left, const void* caller);
// A cluster of so many blocks begins; barrier.cluster: the running thread arrives, goes on; all have arrived.
void check_cluster(unsigned size);
void check_cluster_arrive(bool releases);
void check_cluster_wait(bool acquires);
void check_cluster_barrier();
void check_last_accesses(unsigned n_threads);
void check_peer_gone(const void* word, const void* caller);  // an arrival at an mbarrier of a block that has ended
// Loads by TMA: issued by the running thread, completed, or never. Their other side, in global memory.
void check_tensor_issue(void* target, unsigned bytes, unsigned mbarrier, unsigned rank, void* caller, void* frame);
void check_tensor_landed(void* target, unsigned bytes, unsigned mbarrier, unsigned rank);
void check_peer_read(void* from, unsigned bytes, unsigned mbarrier, unsigned rank, void* caller);
// thread: of the block with this rank.
void check_tensor_left(void* shared, unsigned bytes, bool is_load, unsigned thread, unsigned rank, void* caller);
void check_tensor_global(void* begin, unsigned bytes, bool is_write, void* caller, bool is_atomic = false);
// Stores by TMA: they read shared memory from their issue to their wait. The epoch of one.
uint64_t check_store_issue();
void check_store_read(void* from, unsigned bytes, void* caller);
void check_store_wait(uint64_t until);
// What a store has written: nobody may rely on it yet; the running thread may from here on.
void check_store_unseen(void* begin, unsigned bytes);
void check_store_seen(void* begin, unsigned bytes);
void check_proxy_fence(bool of_mbarriers);
// Products of the warpgroup whose first thread is `base`, in the same way.
uint64_t check_product_issue(unsigned base, void* caller, bool is_fenced);
void check_product_part(uint64_t epoch);  // the running thread issues it, too
void check_product_read(void* from, unsigned base, void* caller);
void check_products_done(unsigned base, uint64_t until);
void check_sums_written(unsigned thread, void* caller, const void* waits);
void check_products_left(void* caller);
void check_event(EngineEventKind kind, unsigned thread, unsigned number, uint64_t value, const void* caller);
void check_callers(uintptr_t pc);
void check_note(EngineNote what, uint64_t value, const void* caller);
void check_merge(unsigned n_threads);  // all lanes have arrived: at a barrier, or at the end
void check_merge_warp(unsigned warp, unsigned n_threads, unsigned unfinished);  // unfinished: lanes that will go on
extern "C" void engine_pause();  // the engine's: the fiber that runs lets its warp catch up
