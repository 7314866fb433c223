// What wgmma computes: D (64 x n) += A (64 x k) B (k x n), for four warps, each with 16 rows of A and D. A row of A, and a
// column of B, has 32 bytes: k is 16, or 32 of numbers of 8 bits.
//
// Thread 32 w + 4 g + t holds of D rows 16 w + g and 8 further, of every 8 columns 2 t and 2 t + 1; of A, where it is in
// registers, of the same rows bytes 4 t to 4 t + 3 and 16 further, as mma.sync has them. The sums are cut off as those of
// mma.sync m16n8k16 are (tensor_core.cpp), or as tensor_eights.cpp says: NVIDIA documents neither.
#include "worker.h"

namespace {

struct Matrices {
  alignas(32) unsigned char a[64][32], b[256][32];  // rows of A and columns of B, along K
};

void read_operands(Worker& w, const WarpgroupOp& op, Matrices& m) {
  const engine::WarpgroupProduct& form = *op.form;
  auto read = [&](uint64_t descriptor, unsigned rows, bool transposed, unsigned char (*to)[32]) {
    for_operand(descriptor, rows, transposed, [&](unsigned low, unsigned row, unsigned at) {
      const char* const chunk = shared_of_descriptor(w, low, 16);
      if (!transposed) memcpy(to[row] + at, chunk, 16);
      else
        for (unsigned i = 0; i < 8; ++i) memcpy(to[row + i] + 2 * at, chunk + 2 * i, 2);
    });
  };
  if (form.a_in_registers) {
    for (unsigned thread = 0; thread < GROUP; ++thread)
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, word = op.registers[thread][i];
        memcpy(m.a[row] + thread % 4 * 4 + i / 2 * 16, &word, 4);
      }
  } else {
    read(op.a, 64, form.a_transposed, m.a);
  }
  read(op.b, (unsigned)form.n, form.b_transposed, m.b);
  auto negate = [&](unsigned char (*rows)[32], unsigned count) {
    const unsigned step = form.of_eights() ? 1 : 2;  // the sign is in the last byte of a number
    for (unsigned row = 0; row < count; ++row)
      for (unsigned i = step - 1; i < 32; i += step) rows[row][i] ^= 0x80;
  };
  if (form.a_negative) negate(m.a, 64);
  if (form.b_negative) negate(m.b, (unsigned)form.n);
}

// Where the eight sums are that a row has in a tile of eight columns: four threads have two each.
struct SumsOfRow {
  float* two[4];

  SumsOfRow(Sums& sums, unsigned row, unsigned tile) {
    for (unsigned t = 0; t < 4; ++t) {
      const unsigned thread = row / 16 * 32 + row % 8 * 4 + t;
      two[t] = &sums.values[thread * sums.n + 4 * tile + row % 16 / 8 * 2];
    }
  }
  Ints load() const {
    Ints all;
    for (unsigned t = 0; t < 4; ++t) memcpy((int*)&all + 2 * t, two[t], 8);
    return all;
  }
  void store(const Ints& all) const {
    for (unsigned t = 0; t < 4; ++t) memcpy((void*)two[t], (const int*)&all + 2 * t, 8);
  }
};

template <typename Format>
void multiply_tiles(const WarpgroupOp& op, const Matrices& m) {
  Operands o;
  for (unsigned first = 0; first < 64; first += 16) {
    memcpy(o.a, m.a[first], sizeof o.a);
    for (unsigned tile = 0; tile < (unsigned)op.form->n / 8; ++tile) {
      for (unsigned n = 0; n < 8; ++n)
        for (unsigned j = 0; j < 8; ++j) memcpy((int*)&o.b[j] + n, &m.b[8 * tile + n][4 * j], 4);
      for (unsigned row = 0; row < 16; ++row)
        o.c[row] = op.accumulate ? SumsOfRow(*op.sums, first + row, tile).load() : Ints{};
      Doubles d[16];
      multiply_operands<Format>(o, d);
      for (unsigned row = 0; row < 16; ++row) SumsOfRow(*op.sums, first + row, tile).store(rounded(d[row]));
    }
  }
}

void multiply_eights(const WarpgroupOp& op, const Matrices& m);  // tensor_eights.cpp

void multiply_warpgroup(Worker& w, WarpgroupOp& op) {
  const engine::WarpgroupProduct& form = *op.form;
  Matrices m;
  read_operands(w, op, m);
  if (form.of_eights()) multiply_eights(op, m);
  else if (form.a == engine::Factor::bf16) multiply_tiles<Bfloat16>(op, m);
  else multiply_tiles<Binary16>(op, m);
  engine_tensor_flop(64, form.n, form.of_eights() ? 32 : 16);
}

}  // namespace
