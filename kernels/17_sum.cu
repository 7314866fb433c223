// 17 sum: the parts of a gradient, which kernels and other GPUs have computed in float32, in one pass.
//
// Since 17_merge: gradients have no weights, so that several parts are added where each is read once
// and only the sum is written, rounded if it is complete.
//
// Launch   grid (ceil(rows columns / (WIDTH THREADS)), batch), block THREADS
// Shapes   result (batch, rows, columns) of T, rows first .. first + rows - 1 of a whole; columns of all
//          heads. part_i float32 (batch, rows_i, columns), rows first_i .. first_i + rows_i - 1 of the
//          whole; null: there is none. result may be a part that has the same rows
// Traffic  each part read once, result written once
#include "merge_states.cuh"  // store4: 14

#ifndef WIDTH
#define WIDTH 4  // columns that a thread has: 4, or 1 where columns are no multiple of it
#endif
#ifndef THREADS
#define THREADS 256
#endif
static_assert(WIDTH == 1 || WIDTH == 4, "a thread has one column, or as many as store4 stores");

struct __align__(4 * WIDTH) Chunk {
  float x[WIDTH];
};

template <typename T>
__global__ void __launch_bounds__(THREADS) sum_parts(
    T* result, const float* part_0, const float* part_1, const float* part_2, int columns,
    int first, int rows, int first_0, int rows_0, int first_1, int rows_1, int first_2,
    int rows_2) {
  // ---- prologue: the columns of this thread
  const long long item = (long long)blockIdx.x * THREADS + threadIdx.x, batch = blockIdx.y;
  const int chunks = columns / WIDTH, row = item / chunks, column = item % chunks * WIDTH;
  if (row >= rows) return;
  Chunk sum = {};

  // ---- the parts, in the order in which they were computed
  const auto add = [&](const float* part, int first_part, int rows_part) {
    const int part_row = first + row - first_part;
    if (!part || part_row < 0 || part_row >= rows_part) return;
    const Chunk p =
        *reinterpret_cast<const Chunk*>(part + (batch * rows_part + part_row) * columns + column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum.x[i] += p.x[i];
  };
  add(part_0, first_0, rows_0);
  add(part_1, first_1, rows_1);
  add(part_2, first_2, rows_2);

  // ---- the sum
  T* const out = result + (batch * rows + row) * columns + column;
  if constexpr (WIDTH == 4) store4(out, make_float4(sum.x[0], sum.x[1], sum.x[2], sum.x[3]));
  else out[0] = T(sum.x[0]);
}
