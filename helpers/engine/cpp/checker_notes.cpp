// What a checked run notes of arithmetic: where C++ says "undefined" and this build may have another result than a GPU.
//
// Shifts and conversions that arithmetic.py has edited never come here: they are right. Of the others the compiler's
// -fsanitize tells; its library is not linked, these take the names of its functions. NVIDIA's wmma comes here too,
// where an address is one that hardware takes and the documentation does not.
#include "books.h"

void check_note(EngineNote what, uint64_t value, const void* caller) {
  if (!books.running) return;
  report(ENGINE_NOTED, NO_REGION, value, what, (uintptr_t)caller, current.thread, false);
}

extern "C" {

void engine_note(int what, unsigned long long value) {
  check_note((EngineNote)what, value, __builtin_return_address(0));
}

// As compilers lay them out: where, and two types.
struct UbsanType {
  uint16_t kind, info;  // kind 0: an integer, info: 2 * log2 of its bits, and 1 where it is signed; 1: floating
  char name[1];
};
struct UbsanSite {
  const char* file;
  uint32_t line, column;
  const UbsanType *first, *second;
};

void __ubsan_handle_shift_out_of_bounds(const UbsanSite*, uintptr_t, uintptr_t count) {
  check_note(NOTE_SHIFT, count, __builtin_return_address(0));
}
void __ubsan_handle_float_cast_overflow(const UbsanSite* site, uintptr_t value) {
  double real = 0;
  if (site->first->info == 32) {
    float narrow;
    const uint32_t bits = (uint32_t)value;
    memcpy(&narrow, &bits, sizeof narrow);
    real = narrow;
  } else {
    memcpy(&real, &value, sizeof real);
  }
  uint64_t bits;
  memcpy(&bits, &real, sizeof bits);
  check_note(NOTE_CONVERSION, bits, __builtin_return_address(0));
}

}  // extern "C"
