// Arrays of a thread's own. Their accesses have no hook, as they are in registers on a GPU and many on each line; where the
// compiler knows how many elements there are, -fsanitize=bounds compares the index and calls this with one that is outside.
// The checked builds do without it, as loads stay loads then that a compiler makes one of; a fast build has it, which runs
// once after the checked one (unset.py), and whose findings join that one's.
//
// It is called for every array with a known size, shared ones too, whose rows kernels index as one long row: there the
// address decides, see checker_access.cpp. Python distinguishes the two by the name in the source (locals.py).
#include "books.h"

namespace {

struct Descriptor {  // of a type, as the compiler lays it out
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  const char* file;
  uint32_t line, column;
  const Descriptor *array, *index;
};

// An integer as the compiler hands it over: info is whether it has a sign, and the logarithm of its bits.
int64_t value_of(const Descriptor& type, uint64_t raw) {
  const unsigned bits = 1u << (type.info >> 1);
  if (!(type.info & 1) || bits >= 64) return (int64_t)raw;
  return (int64_t)(raw << (64 - bits)) >> (64 - bits);
}

}  // namespace

extern "C" void __ubsan_handle_out_of_bounds(const OutOfBounds* where, uint64_t index) {
  EngineFinding f = finding_at(ENGINE_LOCAL_BOUNDS, where->file, (int)where->line);
  f.block = this_worker()->block;
  f.thread = this_worker()->current->lane.linear;
  f.source = where->column;
  f.offset = value_of(*where->index, index);
  f.name = where->array->name;
  add_finding(f, (uint64_t)(uintptr_t)where * 16 + ENGINE_LOCAL_BOUNDS);
}

namespace {

struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const Descriptor* type;
  unsigned char alignment, kind;
};

}  // namespace

// Of -fsanitize=object-size, which follows a pointer to the array that it is into, through functions that are inlined. It
// is called for arrays in shared memory and variables of the module too: the address identifies a thread's own.
extern "C" void __ubsan_handle_type_mismatch_v1(const TypeMismatch* where, uintptr_t pointer) {
  const Worker& w = here();
  const uintptr_t stacks = (uintptr_t)w.stacks;
  if (pointer < stacks || pointer >= stacks + w.n_stacks * stack_stride()) return;
  EngineFinding f = finding_at(ENGINE_LOCAL_BOUNDS, where->file, (int)where->line);
  f.block = w.block;
  f.thread = w.current->lane.linear;
  f.source = where->column;
  f.name = "";  // the array's type is not known
  add_finding(f, (uint64_t)(uintptr_t)where * 16 + ENGINE_LOCAL_BOUNDS);
}
