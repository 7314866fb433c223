// What the checker, the engine and Python (checked.py) tell each other of a checked run.
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
  ENGINE_INACTIVE_LANE = 13,  // a shuffle asks for the value of a lane that takes no part
  ENGINE_LOCAL_BOUNDS = 14,   // an index past the size that a type gives: maybe of an array of the thread's own
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

struct EngineLeft {  // a barrier that some threads of a block had left the kernel before: no error, but worth a note
  uint64_t block;
  const char* file;
  int line;
  uint32_t count, thread;  // how many had left, and the first of them
};

struct EngineFinding {
  int kind;
  uint32_t region;
  int64_t offset;
  uint64_t count, pc, other_pc, block, other_block;
  uint32_t size, thread, other_thread, is_write, other_is_write;
  uint32_t is_volatile;  // both sides
  // Of a warp-wide operation or of an index, whose place is known without pc: name of the operation and its lane source,
  // or of the array's type, with the index as offset and its column as source.
  uint32_t mask, source;
  int32_t line;
  const char *file, *name;
};

// What Python calls, before and after a launch.
void engine_check_start(const EngineRegion* regions, unsigned n, uint64_t profiled_code);  // 0: no profile
void engine_check_stop();
void engine_check_counts(uint64_t* barriers, uint64_t* collectives);
unsigned engine_check_findings(const EngineFinding** out);
unsigned engine_check_steps(const EngineStep** out, uint64_t* whole);  // whole: blocks before this one have all theirs
unsigned engine_check_barriers(const EngineBarrier** out);
unsigned engine_check_left(const EngineLeft** out);
// Of the last write of a byte of a region: its pc, or 0 where there was none.
uint64_t engine_check_writer(unsigned region, uint64_t offset, uint64_t* block, unsigned* thread);
unsigned engine_check_sites(EngineSite* out, unsigned most);  // returns how many there are
}

// What the engine tells the checker.
bool checking();
void check_block(uint64_t block, unsigned n_warps, const void* static_shared, const void* dynamic_shared);
void check_block_end(unsigned n_threads);
void* check_set_aside(unsigned n_threads);  // the running block's part of the books, while others run
void check_bring_back(void* kept);
void check_drop(void* kept);
void check_grid_sync();
void check_switch(unsigned thread, const void* stack_top);  // this thread of the block runs from now on
void check_barrier(const char* file, int line);
void check_left(const char* file, int line, unsigned count, unsigned thread);
void check_warp_sync(unsigned warp, unsigned mask);
void check_collective();
void check_no_such_lane(const engine::Collective& operation, unsigned lane, unsigned source);
void check_fence(bool own_block);
void check_async_issue(void* target, unsigned bytes, void* caller, void* frame);  // by the thread that runs
void check_async_landed(void* target, unsigned bytes);
void check_async_left(void* target, unsigned bytes, void* caller);
void check_note(EngineNote what, uint64_t value, const void* caller);
void check_merge(unsigned n_threads);  // all lanes have arrived: at a barrier, or at the end
void check_merge_warp(unsigned warp, unsigned n_threads, unsigned unfinished);  // unfinished: lanes that will go on
extern "C" void engine_pause();  // the engine's: the fiber that runs lets its warp catch up
