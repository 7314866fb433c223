// Products of a warp whose numbers are integers, bits or doubles. Their sums are exact, or rounded as a chain of fma.
//
// Lane l = 4 g + t holds, in a register of A, row g or g + 8 and the neighbours along K from t times as many as fit;
// in one of B, column g; of C and D, row g or g + 8 and columns 2 t and 2 t + 1. As the PTX ISA draws it.
#include "worker.h"

namespace {

struct OtherRegisters : Registers {
  const engine::Products* form;
};

int element(unsigned word, int at, int bits, bool is_signed) {
  const int shifted = (int)(word << (32 - bits - at * bits));
  return is_signed ? shifted >> (32 - bits) : (int)((unsigned)shifted >> (32 - bits));
}

long long dot(unsigned a, unsigned b, const engine::Products& form) {
  if (form.how != '*') return __builtin_popcount(form.how == '^' ? a ^ b : a & b);
  long long sum = 0;
  for (int i = 0; i < 32 / form.bits; ++i)
    sum += element(a, i, form.bits, form.a_signed) * element(b, i, form.bits, form.b_signed);
  return sum;
}

void multiply_integers(Collective* const* lanes, const engine::Products& form) {
  const int chunks = form.k / (4 * 32 / form.bits), tall = form.m / 8;
  for (int lane = 0; lane < 32; ++lane) {
    OtherRegisters& r = *static_cast<OtherRegisters*>(lanes[lane]);
    for (int i = 0; i < 2 * tall; ++i) {
      long long sum = (int)r.c[i];
      for (int chunk = 0; chunk < chunks; ++chunk)
        for (int t = 0; t < 4; ++t) {
          const Registers& row = *static_cast<Registers*>(lanes[lane / 4 * 4 + t]);
          const Registers& column = *static_cast<Registers*>(lanes[(lane % 4 * 2 + i % 2) * 4 + t]);
          sum += dot(row.a[chunk * tall + i / 2], column.b[chunk], form);
        }
      if (form.saturated) sum = sum < -0x80000000ll ? -0x80000000ll : sum > 0x7fffffff ? 0x7fffffff : sum;
      r.d[i] = (unsigned)sum;
    }
  }
}

void multiply_doubles(Collective* const* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    OtherRegisters& r = *static_cast<OtherRegisters*>(lanes[lane]);
    for (int i = 0; i < 2; ++i) {
      double sum, a, b;
      memcpy(&sum, (const char*)&r.c + 8 * i, 8);
      for (int k = 0; k < 4; ++k) {
        memcpy(&a, &static_cast<Registers*>(lanes[lane / 4 * 4 + k])->a, 8);
        memcpy(&b, &static_cast<Registers*>(lanes[(lane % 4 * 2 + i) * 4 + k])->b, 8);
        sum = __builtin_fma(a, b, sum);
      }
      memcpy((char*)&r.d + 8 * i, &sum, 8);
    }
  }
}

void run_other(Collective* const* lanes, unsigned mask) {
  need_whole_warp(lanes, mask);
  const engine::Products& form = *static_cast<OtherRegisters*>(lanes[0])->form;
  if (form.bits != 64) return multiply_integers(lanes, form);
  multiply_doubles(lanes);
  engine_tensor_flop(form.m, 8, form.k);
}

}  // namespace

extern "C" engine::Words engine_mma_other(
    const engine::Products* form, engine::Words a, engine::Words b, engine::Words c, const char* file, int line) {
  OtherRegisters mine;
  mine.form = form;
  mine.a = a, mine.b = b, mine.c = c, mine.d = engine::Words{};
  const char* name = form->bits == 64  ? "mma.sync (f64)"
                     : form->bits == 1 ? "mma.sync (b1)"
                     : form->bits == 4 ? "mma.sync (4-bit integers)"
                                       : "mma.sync (8-bit integers)";
  return together(mine, name, run_other, file, line);
}
