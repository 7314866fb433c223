// Integer divisions that a processor refuses and a GPU does not: by zero, and of the least number by -1.
//
// x86 traps, and nothing is paid as long as nothing traps. The handler reads the instruction, puts a GPU's result into
// its registers and goes on after it. (64-bit ARM does not trap: its quotient is 0 where a GPU's has all bits set.)
#include "worker.h"

namespace {

#if defined(__x86_64__) && defined(__linux__)
#define ENGINE_DIVIDES 1
const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                           REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
uint64_t& register_of(ucontext_t* u, unsigned number) { return (uint64_t&)u->uc_mcontext.gregs[REGISTERS[number]]; }
uint64_t& counter_of(ucontext_t* u) { return (uint64_t&)u->uc_mcontext.gregs[REG_RIP]; }
#elif defined(__x86_64__) && defined(__APPLE__)
#define ENGINE_DIVIDES 1
uint64_t& register_of(ucontext_t* u, unsigned number) {
  auto& s = u->uc_mcontext->__ss;
  uint64_t* all[16] = {(uint64_t*)&s.__rax, (uint64_t*)&s.__rcx, (uint64_t*)&s.__rdx, (uint64_t*)&s.__rbx,
                       (uint64_t*)&s.__rsp, (uint64_t*)&s.__rbp, (uint64_t*)&s.__rsi, (uint64_t*)&s.__rdi,
                       (uint64_t*)&s.__r8,  (uint64_t*)&s.__r9,  (uint64_t*)&s.__r10, (uint64_t*)&s.__r11,
                       (uint64_t*)&s.__r12, (uint64_t*)&s.__r13, (uint64_t*)&s.__r14, (uint64_t*)&s.__r15};
  return *all[number];
}
uint64_t& counter_of(ucontext_t* u) { return (uint64_t&)u->uc_mcontext->__ss.__rip; }
#endif

#ifdef ENGINE_DIVIDES

struct Division {
  unsigned bytes;  // of the divisor
  bool is_signed;
  uint64_t divisor;
  const unsigned char* next;
};

template <typename T>
T read_at(const void* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

// The address of a memory operand; p stands after its first byte, and is moved past the rest.
uint64_t address_of(ucontext_t* u, const unsigned char*& p, unsigned mode, unsigned low, unsigned rex) {
  uint64_t address = 0;
  bool wide = mode == 2, to_counter = false;
  if (low == 4) {
    const unsigned sib = *p++, index = (sib >> 3 & 7) | (rex & 2) << 2, base = sib & 7;
    if (index != 4) address = register_of(u, index) << (sib >> 6);
    if (mode == 0 && base == 5) wide = true;
    else address += register_of(u, base | (rex & 1) << 3);
  } else if (mode == 0 && low == 5) {
    wide = to_counter = true;
  } else {
    address = register_of(u, low | (rex & 1) << 3);
  }
  if (wide) address += (uint64_t)(int64_t)read_at<int32_t>(p), p += 4;
  else if (mode == 1) address += (uint64_t)(int64_t)(signed char)*p++;
  return to_counter ? address + (uint64_t)p : address;
}

// div and idiv: F6 for bytes, F7 for the others. False: another instruction, or one that no compiler writes.
bool decode(ucontext_t* u, Division& d) {
  const unsigned char* p = (const unsigned char*)counter_of(u);
  bool narrow = false;
  unsigned rex = 0;
  for (; *p == 0x66; ++p) narrow = true;
  if ((*p & 0xF0) == 0x40) rex = *p++;
  const unsigned code = *p++, operand = *p++, mode = operand >> 6, kind = operand >> 3 & 7, low = operand & 7;
  if ((code | 1) != 0xF7 || kind < 6) return false;
  d.bytes = code == 0xF6 ? 1 : rex & 8 ? 8 : narrow ? 2 : 4;
  d.is_signed = kind == 7;
  if (mode != 3) {
    const uint64_t address = address_of(u, p, mode, low, rex);
    d.divisor = 0;
    memcpy(&d.divisor, (const void*)address, d.bytes);
  } else if (d.bytes == 1 && !rex && low >= 4) {
    d.divisor = register_of(u, low - 4) >> 8;  // ah, ch, dh, bh
  } else {
    d.divisor = register_of(u, low | (rex & 1) << 3);
  }
  if (d.bytes < 8) d.divisor &= (1ull << 8 * d.bytes) - 1;
  d.next = p;
  return true;
}

bool divide_as_a_gpu(ucontext_t* u) {
  Division d;
  if (!decode(u, d)) return false;
  const unsigned bits = 8 * d.bytes;
  const uint64_t all = d.bytes == 8 ? ~0ull : (1ull << bits) - 1, least = 1ull << (bits - 1);
  uint64_t &rax = register_of(u, 0), &rdx = register_of(u, 2);
  const uint64_t dividend = rax & all;
  uint64_t quotient, remainder;
  if (d.divisor == 0) {
    // A GPU divides two numbers of 64 bits as numbers of 32, where they fit.
    quotient = d.bytes == 8 && dividend >> 32 == 0 ? 0xFFFFFFFF : all;
    remainder = dividend;
  } else if (d.is_signed && d.divisor == all && dividend == least) {
    quotient = least;
    remainder = 0;
  } else {
    return false;
  }
  if (checking() && d.divisor == 0) check_note(NOTE_DIVISION, dividend, (void*)(counter_of(u) + 1));
  if (d.bytes == 1) rax = (rax & ~0xFFFFull) | remainder << 8 | quotient;
  else if (d.bytes == 2) rax = (rax & ~all) | quotient, rdx = (rdx & ~all) | remainder;
  else rax = quotient, rdx = remainder;
  counter_of(u) = (uint64_t)d.next;
  return true;
}

#else

bool divide_as_a_gpu(ucontext_t*) { return false; }

#endif

}  // namespace
