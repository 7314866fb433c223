// Tensor cores: what mma.sync, ldmatrix and stmatrix do with the registers of a warp. Each lane brings its registers;
// the last one to come computes for all of them.
//
// Lane l = 4 g + t holds rows g and g + 8, and of a row neighbours in pairs, as the PTX ISA draws it.
#include "engine.h"

#include <stdio.h>
#include <string.h>

namespace {

using engine::Collective;

typedef float Row __attribute__((vector_size(32)));  // the 8 columns of B, C and D, or 8 numbers of a row of A
typedef int Ints __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef long long Longs __attribute__((vector_size(64)));

unsigned bits_of(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
float float_of(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

float half_to_float(unsigned half) {
  const unsigned magnitude = half & 0x7FFF, sign = (half & 0x8000) << 16;
  if (magnitude < 0x0400) return float_of(bits_of((float)magnitude * 0x1p-24f) | sign);
  return float_of(((magnitude << 13) + (magnitude < 0x7C00 ? 112u << 23 : 224u << 23)) | sign);
}

// To nearest even, by way of a float whose last bit says that something was cut off: rounding twice is rounding once.
unsigned half_of(double value) {
  float cut = (float)value;
  unsigned all = bits_of(cut);
  if ((double)cut != value && !(all & 1)) all += __builtin_fabs((double)cut) > __builtin_fabs(value) ? -1 : 1;
  const unsigned sign = all >> 16 & 0x8000, magnitude = all & 0x7FFFFFFF;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;                                             // 65520 and more
  if (magnitude < 0x38800000) return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000);  // subnormal
  return sign | (((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112 << 10));
}

struct Registers : Collective {
  int kind;
  engine::Words a, b, c, d;
};

void need_whole_warp(Collective* const* lanes, unsigned mask) {
  if (mask == ~0u) return;
  const Collective* first = lanes[__builtin_ctz(mask)];
  EngineFailure failure = failure_at(here(), INCOMPLETE_WARP, first->file, first->line);
  copy_text(failure.name, sizeof failure.name, first->name);
  failure.lanes = ~mask;
  fail(here(), failure);
}

engine::Words together(
    Registers& mine, const char* name, void (*run)(Collective* const*, unsigned), const char* file, int line) {
  mine.name = name;
  mine.run = run;
  mine.mask = ~0u;
  mine.file = file;
  mine.line = line;
  engine_collective(&mine);
  return mine.d;
}

// ---------------------------------------------------------------- mma.sync

const char* const MMA_NAMES[] = {
    "mma.sync.m16n8k16 (f16)", "mma.sync.m16n8k16 (bf16)", "mma.sync.m16n8k16 (f16, f16 accumulators)",
    "mma.sync.m16n8k8 (f16)",  "mma.sync.m16n8k8 (bf16)",  "mma.sync.m16n8k8 (f16, f16 accumulators)",
    "mma.sync.m16n8k8 (tf32)", "mma.sync.m16n8k4 (tf32)"};
const int MMA_K[] = {16, 16, 16, 8, 8, 8, 8, 4};

// The words of all lanes in their places. A word is two neighbours along K, or one number of tf32.
struct Operands {
  Ints a[16], b[8], c[16];  // a[m][word], b[word][n], c[m][n]
};

template <int N_WORDS, bool HALF>
void gather(Operands& o, Collective* const* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    const Registers& r = *static_cast<Registers*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < N_WORDS / 2; ++i) ((int*)&o.a[g + i % 2 * 8])[t + i / 2 * 4] = (int)r.a[i];
    for (int i = 0; i < N_WORDS / 4; ++i) ((int*)&o.b[t + i * 4])[g] = (int)r.b[i];
    for (int i = 0; i < 2; ++i) {  // two neighbours of row g, then of row g + 8
      float* c = (float*)&o.c[g + 8 * i] + 2 * t;
      if (HALF) c[0] = half_to_float(r.c[i] & 0xFFFF), c[1] = half_to_float(r.c[i] >> 16);
      else memcpy(c, (const char*)&r.c + 8 * i, 8);
    }
  }
}

// Numbers taken apart: the significand with its sign, from 1 to 2 (less where it is subnormal), and the exponent of 2.
struct Parts {
  Row significand;
  Ints exponent;
};
constexpr int NO_EXPONENT = -2000;  // of zero, which has no say in what is the largest

// Of a format with so many bits each. special: which of them are infinite or NaN.
template <int EXPONENT, int MANTISSA>
inline Parts apart(Ints bits, Ints& special) {
  const int top = (1 << EXPONENT) - 1, sign = (int)(1u << (EXPONENT + MANTISSA));
  const Ints biased = bits >> MANTISSA & top, mantissa = bits & ((1 << MANTISSA) - 1), normal = biased > 0;
  const Ints zero = (biased | mantissa) == 0;
  special |= biased == top;
  const Row magnitude = __builtin_convertvector(mantissa | (normal & (1 << MANTISSA)), Row) * (1.0f / (1 << MANTISSA));
  Parts parts;
  parts.significand = (Row)((Ints)magnitude | (bits & sign) << (31 - EXPONENT - MANTISSA));
  parts.exponent = (normal & (biased - 1)) + 2 - (1 << (EXPONENT - 1)) + (zero & NO_EXPONENT);
  return parts;
}

struct Binary16 {
  static constexpr int halves = 2;
  static Parts part(Ints words, int half, Ints& special) { return apart<5, 10>(words >> 16 * half & 0xFFFF, special); }
  static double value(int word, int half) { return half_to_float((unsigned)word >> 16 * half & 0xFFFF); }
};
struct Bfloat16 {
  static constexpr int halves = 2;
  static Parts part(Ints words, int half, Ints& special) { return apart<8, 7>(words >> 16 * half & 0xFFFF, special); }
  static double value(int word, int half) { return float_of((unsigned)word >> 16 * half << 16); }
};
struct Tf32 {  // a float without its last 13 bits
  static constexpr int halves = 1;
  static Parts part(Ints words, int, Ints& special) { return apart<8, 10>(words >> 13 & 0x7FFFF, special); }
  static double value(int word, int) { return float_of((unsigned)word & 0xFFFFE000u); }
};

// One row of D = A B + C as GPUs of compute capability 9.0 compute it (measured on an H200, bit for bit; NVIDIA
// documents none of it, and other GPUs may differ in the last bits): the exact products and the addend are cut off, not
// rounded, 25 bits behind the largest exponent among them, and then summed exactly. A product's exponent is the sum of
// its factors', even where the product is 2 or more.
constexpr int FRACTION = 25, LEAST = -133;  // LEAST: no exponent counts as less

inline Ints larger(Ints x, Ints y) {
  const Ints more = x > y;
  return (x & more) | (y & ~more);
}

constexpr int WORDS = 8;  // of a row of A or a column of B; the last ones may be 0, and then change nothing

template <typename Format>
inline Doubles sum_of_products(const Parts* a, const Parts (*b)[8], const Parts& c) {
  Ints top = larger(c.exponent, Ints{} + LEAST);
  for (int h = 0; h < Format::halves; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < WORDS; ++j) top = larger(top, a[h].exponent[j] + b[h][j].exponent);
  const Ints base = FRACTION + 127 - top;
  auto cut = [&](Row significand, Ints exponent) {
    const Ints biased = exponent + base;
    return __builtin_convertvector(significand * (Row)((biased & (biased > 0)) << 23), Ints);
  };
  // Numbers that fit 32 bits: below 2^27 each, so that two sums are enough.
  Ints sums[2] = {cut(c.significand, c.exponent), Ints{}};
  for (int h = 0; h < Format::halves; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < WORDS; ++j)
      sums[h] += cut(a[h].significand[j] * b[h][j].significand, a[h].exponent[j] + b[h][j].exponent);
  const Longs exponent = __builtin_convertvector(top + (1023 - FRACTION), Longs);
  return (__builtin_convertvector(sums[0], Doubles) + __builtin_convertvector(sums[1], Doubles)) *
         (Doubles)(exponent << 52);
}

// Where a factor or the addend is infinite or NaN, floating-point arithmetic has the answer.
template <typename Format>
double special_sum(const Operands& o, int m, int n) {
  double sum = float_of((unsigned)o.c[m][n]);
  for (int j = 0; j < WORDS; ++j)
    for (int h = 0; h < Format::halves; ++h) sum += Format::value(o.a[m][j], h) * Format::value(o.b[j][n], h);
  return sum;
}

void give_halves(const Doubles* d, Collective* const* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    Registers& r = *static_cast<Registers*>(lanes[lane]);
    for (int i = 0; i < 2; ++i) {
      const double* pair = (const double*)&d[lane / 4 + 8 * i] + lane % 4 * 2;
      auto one = [](double x) {
        const unsigned half = half_of(x);
        return x != x ? 0x7FFF : half == 0x8000 ? 0 : half;  // there is no -0
      };
      r.d[i] = one(pair[0]) | one(pair[1]) << 16;
    }
  }
}

constexpr long long MAGNITUDE = ~0ull >> 1, TOO_LARGE = 0x47F0000000000000;  // of doubles: all but the sign; 2^128

// D = A B + C of 16 x 8 numbers, not rounded yet.
template <typename Format>
__attribute__((noinline)) void multiply_operands(const Operands& o, Doubles* d) {
  Ints special = {};
  Parts b[2][8];
  for (int h = 0; h < Format::halves; ++h)
    for (int j = 0; j < WORDS; ++j) b[h][j] = Format::part(o.b[j], h, special);
  for (int m = 0; m < 16; ++m) {
    Parts a[2];
    for (int h = 0; h < Format::halves; ++h) a[h] = Format::part(o.a[m], h, special);
    d[m] = sum_of_products<Format>(a, b, apart<8, 23>(o.c[m], special));
  }
  bool any = false;
  for (int n = 0; n < 8; ++n) any = any || special[n];
  for (int m = 0; m < 16 && any; ++m)
    for (int n = 0; n < 8; ++n) {
      const double sum = special_sum<Format>(o, m, n);
      if (!__builtin_isfinite(sum)) d[m][n] = sum;
    }
}

// Rounded towards zero: where the conversion went away from it, one step back. What is too large is infinite, -0 is 0.
Ints rounded(const Doubles& d) {
  Row near = __builtin_convertvector(d, Row);
  const Doubles back = __builtin_convertvector(near, Doubles);
  const Longs size = (Longs)d & MAGNITUDE, away = (((Longs)back & MAGNITUDE) > size) & (size < TOO_LARGE);
  const Row cut = (Row)((Ints)near + __builtin_convertvector(away, Ints)) + 0.0f;
  const Ints nan = cut != cut;
  return (nan & 0x7FFFFFFF) | ((Ints)cut & ~nan);
}

template <typename Format, int N_WORDS, bool HALF>
void multiply(Collective* const* lanes) {
  Operands o = {};
  gather<N_WORDS, HALF>(o, lanes);
  Doubles d[16];
  multiply_operands<Format>(o, d);
  if (HALF) return give_halves(d, lanes);
  Ints rows[16];
  for (int m = 0; m < 16; ++m) rows[m] = rounded(d[m]);
  for (int lane = 0; lane < 32; ++lane) {
    Registers& r = *static_cast<Registers*>(lanes[lane]);
    for (int i = 0; i < 2; ++i) memcpy((char*)&r.d + 8 * i, (int*)&rows[lane / 4 + 8 * i] + lane % 4 * 2, 8);
  }
}

void run_mma(Collective* const* lanes, unsigned mask) {
  need_whole_warp(lanes, mask);
  static void (*const RUN[])(Collective* const*) = {multiply<Binary16, 8, false>, multiply<Bfloat16, 8, false>,
                                                    multiply<Binary16, 8, true>,  multiply<Binary16, 4, false>,
                                                    multiply<Bfloat16, 4, false>, multiply<Binary16, 4, true>,
                                                    multiply<Tf32, 8, false>,     multiply<Tf32, 4, false>};
  const int kind = static_cast<Registers*>(lanes[0])->kind;
  RUN[kind](lanes);
  engine_tensor_flop(16, 8, MMA_K[kind]);
}

// ---------------------------------------------------------------- ldmatrix, stmatrix

// Lane 8 i + r brings row r of matrix i and receives, of each matrix, two neighbours of row g; transposed, of column g.
void run_load(Collective* const* lanes, unsigned mask) {
  need_whole_warp(lanes, mask);
  const int n = static_cast<Registers*>(lanes[0])->kind & 7;
  const bool transposed = static_cast<Registers*>(lanes[0])->kind & 8;
  unsigned short rows[32][8];
  for (int lane = 0; lane < 8 * n; ++lane) memcpy(rows[lane], &static_cast<Registers*>(lanes[lane])->a, 16);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < n; ++i) {
      const unsigned short* low = transposed ? &rows[8 * i + 2 * t][g] : &rows[8 * i + g][2 * t];
      static_cast<Registers*>(lanes[lane])->d[i] = low[0] | (unsigned)low[transposed ? 8 : 1] << 16;
    }
  }
}

// The same backwards: each lane leaves with the row that it has to write.
void run_store(Collective* const* lanes, unsigned mask) {
  need_whole_warp(lanes, mask);
  const int n = static_cast<Registers*>(lanes[0])->kind & 7;
  const bool transposed = static_cast<Registers*>(lanes[0])->kind & 8;
  unsigned short rows[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < n; ++i) {
      const unsigned word = static_cast<Registers*>(lanes[lane])->a[i];
      unsigned short* low = transposed ? &rows[8 * i + 2 * t][g] : &rows[8 * i + g][2 * t];
      low[0] = (unsigned short)word;
      low[transposed ? 8 : 1] = (unsigned short)(word >> 16);
    }
  }
  for (int lane = 0; lane < 8 * n; ++lane) memcpy(&static_cast<Registers*>(lanes[lane])->d, rows[lane], 16);
}

}  // namespace

extern "C" {

void engine_whole_warp(const char* name, const char* file, int line) {
  Registers mine;
  together(mine, name, need_whole_warp, file, line);
}

engine::Words engine_mma(
    engine::Mma kind, engine::Words a, engine::Words b, engine::Words c, const char* file, int line) {
  Registers mine;
  mine.kind = kind;
  mine.a = a, mine.b = b, mine.c = c, mine.d = engine::Words{};
  return together(mine, MMA_NAMES[kind], run_mma, file, line);
}

engine::Words engine_ldmatrix(const char* name, int kind, engine::Words row, const char* file, int line) {
  Registers mine;
  mine.kind = kind;
  mine.a = row, mine.d = engine::Words{};
  return together(mine, name, run_load, file, line);
}

engine::Words engine_stmatrix(const char* name, int kind, engine::Words words, const char* file, int line) {
  Registers mine;
  mine.kind = kind;
  mine.a = words, mine.d = engine::Words{};
  return together(mine, name, run_store, file, line);
}

}  // extern "C"
