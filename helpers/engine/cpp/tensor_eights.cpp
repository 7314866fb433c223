// What wgmma makes of numbers of 8 bits: e4m3 and e5m2, 32 products and the addend in one step.
//
// As GPUs of compute capability 9.0 compute it (671,744 sums of an H200, bit for bit; NVIDIA documents none of it): a
// product's exponent is the sum of its factors', even where the product is 2 or more, and a subnormal factor has the
// exponent of the least normal one. All products and the addend are cut off, not rounded, 13 bits behind the largest
// exponent among them, and summed exactly; of the sum 13 bits behind its own first one are kept.
#include "worker.h"

namespace {

typedef signed char Bytes __attribute__((vector_size(32)));
typedef signed char EightBytes __attribute__((vector_size(8)));

constexpr int EIGHT_FRACTION = 13;
constexpr signed char NO_SHORT_EXPONENT = -64;  // of zero: what has it as a factor is below all other products
constexpr int LEAST_PRODUCT = -28;              // the exponent of the least numbers of e5m2, twice

// Both formats by their bytes. A NaN or an infinity is a NaN in `value`: `special_value` tells them apart.
struct Eights {
  float value[256];
  signed char exponent[256];
};
constexpr Eights eights(int exponent_bits, bool has_infinity) {
  Eights found = {};
  const int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  for (int byte = 0; byte < 256; ++byte) {
    const int biased = byte >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = byte & ((1 << mantissa_bits) - 1);
    const int exponent = (biased ? biased : 1) - bias;
    float size = (float)((biased ? 1 << mantissa_bits : 0) + mantissa);
    for (int i = exponent - mantissa_bits; i < 0; ++i) size /= 2;
    for (int i = exponent - mantissa_bits; i > 0; --i) size *= 2;
    const bool is_last = biased == (1 << exponent_bits) - 1;
    if (has_infinity && is_last) size = mantissa ? __builtin_nanf("") : __builtin_inff();
    else if (is_last && mantissa == (1 << mantissa_bits) - 1) size = __builtin_nanf("");
    found.value[byte] = byte & 0x80 ? -size : size;
    found.exponent[byte] = (byte & 0x7F) == 0 ? NO_SHORT_EXPONENT : (signed char)exponent;
  }
  return found;
}
constexpr Eights E4M3 = eights(4, false), E5M2 = eights(5, true);

// Factors taken apart. Columns of B stand side by side; the last ones, up to a multiple of 32, are unused.
struct EightFactors {
  float a[64][32];
  alignas(32) float b[32][256];
  signed char a_exponent[64][32];
  alignas(32) signed char b_exponent[32][256];
  bool special;  // one of them is infinite or NaN
};

void take_apart(const WarpgroupOp& op, const Matrices& m, EightFactors& f) {
  const Eights& of_a = op.form->a == engine::Factor::e4m3 ? E4M3 : E5M2;
  const Eights& of_b = op.form->b == engine::Factor::e4m3 ? E4M3 : E5M2;
  f.special = false;
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 32; ++k) {
      const unsigned char byte = m.a[row][k];
      f.a[row][k] = of_a.value[byte];
      f.a_exponent[row][k] = of_a.exponent[byte];
      f.special |= !__builtin_isfinite(of_a.value[byte]);
    }
  memset(f.b_exponent, NO_SHORT_EXPONENT, sizeof f.b_exponent);
  for (int n = 0; n < op.form->n; ++n)
    for (int k = 0; k < 32; ++k) {
      const unsigned char byte = m.b[n][k];
      f.b[k][n] = of_b.value[byte];
      f.b_exponent[k][n] = of_b.exponent[byte];
      f.special |= !__builtin_isfinite(of_b.value[byte]);
    }
}

// The largest exponent among the products of a row of A and each column of B.
void largest_exponents(const EightFactors& f, int row, int n, signed char* top) {
  for (int first = 0; first < n; first += 32) {
    Bytes most = Bytes{} + (signed char)-128;
    for (int k = 0; k < 32; ++k) {
      const Bytes sum = *(const Bytes*)&f.b_exponent[k][first] + f.a_exponent[row][k];
      most = sum > most ? sum : most;
    }
    memcpy(top + first, &most, sizeof most);
  }
}

Ints least(Ints x, int y) { return x < y ? x : Ints{} + y; }
Ints most(Ints x, int y) { return x > y ? x : Ints{} + y; }

// Eight sums of one row, where all factors and addends are finite.
Ints sum_of_eights(const EightFactors& f, int row, int first, const signed char* tops, Ints addends) {
  EightBytes few;
  memcpy(&few, tops, sizeof few);
  const Ints products = __builtin_convertvector(few, Ints);
  const Ints biased = addends >> 23 & 255, mantissa = addends & 0x7FFFFF;
  const Ints is_zero = (biased | mantissa) == 0;
  const Ints exponent = is_zero ? Ints{} - 1000 : most(biased, 1) - 127;
  const Ints top = larger(products < LEAST_PRODUCT ? Ints{} - 1000 : products, exponent);

  // In units of the last bit that is kept. Where the scale is held within its bounds all products come to 0 anyway.
  const Row scale = (Row)(most(least(127 + EIGHT_FRACTION - top, 254), 64) << 23);
  Ints sum = {};
  for (int k = 0; k < 32; ++k) sum += __builtin_convertvector(*(const Row*)&f.b[k][first] * scale * f.a[row][k], Ints);
  const Ints significand = mantissa | (biased > 0 ? Ints{} + 0x800000 : Ints{});
  const Ints cut = significand >> least(23 - EIGHT_FRACTION + top - exponent, 31);
  sum += addends < 0 ? -cut : cut;

  const Row kept = (Row)((Ints) __builtin_convertvector(sum, Row) & ~((1 << (23 - EIGHT_FRACTION)) - 1));
  // By two powers of 2, as one may be below the least normal float; the product of all is exact.
  const Ints power = top - EIGHT_FRACTION, large = most(power, -126), rest = most(power - large, -100);
  return (Ints)(kept * (Row)((large + 127) << 23) * (Row)((rest + 127) << 23));
}

// Where a factor or the addend is infinite or NaN, floating-point arithmetic has the answer.
void put_special(const EightFactors& f, int row, int first, Ints addends, Ints& sums) {
  for (int n = 0; n < 8; ++n) {
    double sum = float_of((unsigned)addends[n]);
    for (int k = 0; k < 32; ++k) sum += (double)f.a[row][k] * f.b[k][first + n];
    if (sum != sum) sums[n] = 0x7FFFFFFF;
    else if (!__builtin_isfinite(sum)) sums[n] = (int)bits_of((float)sum);
  }
}

void multiply_eights(const WarpgroupOp& op, const Matrices& m) {
  EightFactors f;
  take_apart(op, m, f);
  for (int row = 0; row < 64; ++row) {
    signed char tops[256];
    largest_exponents(f, row, op.form->n, tops);
    for (int first = 0; first < op.form->n; first += 8) {
      const SumsOfRow place(*op.sums, (unsigned)row, (unsigned)first / 8);
      const Ints addends = op.accumulate ? place.load() : Ints{};
      Ints sums = sum_of_eights(f, row, first, tops + first, addends), special = (addends >> 23 & 255) == 255;
      bool any = f.special;
      for (int n = 0; n < 8; ++n) any = any || special[n];
      if (any) put_special(f, row, first, addends, sums);
      place.store(sums);
    }
  }
}

}  // namespace
