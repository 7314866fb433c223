// What wgmma computes: D (64 x n) += A (64 x 16) B (16 x n), for four warps, each with 16 rows of A and D.
//
// Thread 32 w + 4 g + t holds of D rows 16 w + g and 8 further, of every 8 columns 2 t and 2 t + 1; of A, where it is in
// registers, the same rows, as mma.sync has them. The sums are cut off as those of mma.sync m16n8k16 are (tensor_core.cpp):
// NVIDIA documents neither.
#include "worker.h"

namespace {

struct Matrices {
  unsigned short a[64][16], b[16][256];  // a[m][k], b[k][n]
};

void read_operands(Worker& w, const WarpgroupOp& op, Matrices& m) {
  const engine::WarpgroupProduct& form = *op.form;
  auto read = [&](uint64_t descriptor, unsigned rows, bool transposed, auto put) {
    for_operand(descriptor, rows, transposed, [&](unsigned low, unsigned row, unsigned k) {
      unsigned short eight[8];
      memcpy(eight, shared_of_descriptor(w, low, 16), 16);
      for (unsigned i = 0; i < 8; ++i) transposed ? put(row + i, k, eight[i]) : put(row, k + i, eight[i]);
    });
  };
  if (form.a_in_registers) {
    for (unsigned thread = 0; thread < GROUP; ++thread)
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, k = thread % 4 * 2 + i / 2 * 8;
        m.a[row][k] = (unsigned short)op.registers[thread][i];
        m.a[row][k + 1] = (unsigned short)(op.registers[thread][i] >> 16);
      }
  } else {
    read(op.a, 64, form.a_transposed, [&](unsigned row, unsigned k, unsigned short x) { m.a[row][k] = x; });
  }
  read(op.b, (unsigned)form.n, form.b_transposed, [&](unsigned n, unsigned k, unsigned short x) { m.b[k][n] = x; });
  if (form.a_negative)
    for (auto& row : m.a)
      for (unsigned short& x : row) x ^= 0x8000;
  if (form.b_negative)
    for (auto& row : m.b)
      for (unsigned short& x : row) x ^= 0x8000;
}

template <typename Format>
void multiply_tiles(const WarpgroupOp& op, const Matrices& m) {
  Sums& sums = *op.sums;
  Operands o;
  for (unsigned first = 0; first < 64; first += 16) {
    for (unsigned row = 0; row < 16; ++row)
      for (unsigned j = 0; j < 8; ++j)
        ((int*)&o.a[row])[j] = m.a[first + row][2 * j] | m.a[first + row][2 * j + 1] << 16;
    for (unsigned tile = 0; tile < (unsigned)op.form->n / 8; ++tile) {
      for (unsigned j = 0; j < 8; ++j)
        for (unsigned n = 0; n < 8; ++n)
          ((int*)&o.b[j])[n] = m.b[2 * j][8 * tile + n] | m.b[2 * j + 1][8 * tile + n] << 16;
      float* places[16][4];
      for (unsigned row = 0; row < 16; ++row)
        for (unsigned t = 0; t < 4; ++t) {
          const unsigned thread = first / 16 * 32 + row % 8 * 4 + t;
          places[row][t] = &sums.values[thread * sums.n + 4 * tile + row / 8 * 2];
          for (unsigned i = 0; i < 2; ++i) ((float*)&o.c[row])[2 * t + i] = op.accumulate ? places[row][t][i] : 0.0f;
        }
      Doubles d[16];
      multiply_operands<Format, 8>(o, d);
      for (unsigned row = 0; row < 16; ++row) {
        const Ints found = rounded(d[row]);
        for (unsigned t = 0; t < 4; ++t) memcpy((void*)places[row][t], (const int*)&found + 2 * t, 8);
      }
    }
  }
}

void multiply_warpgroup(Worker& w, WarpgroupOp& op) {
  Matrices m;
  read_operands(w, op, m);
  if (op.form->is_bfloat) multiply_tiles<Bfloat16>(op, m);
  else multiply_tiles<Binary16>(op, m);
  engine_tensor_flop(64, op.form->n, 16);
}

}  // namespace
