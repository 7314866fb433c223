// 17 merge: a partial output and its log-sum-exp join those of the keys before, for the rows of one GPU
// whose keys and values come from others (ring attention).
//
// Since 14: the states are finished outputs with their lse, as any attention kernel returns them, in
// place of m, l and sums. lse = log(e^lse_a + e^lse_b), and O is the mean of both with those weights:
// what a step has not seen changes nothing, to the bit.
//
// Launch   grid (ceil(rows heads / ROWS), batch), block THREADS
// Shapes   O float32 (batch, N, heads, HEAD_DIM), lse float32 (batch, heads, N), both updated in place;
//          O_part float32 (batch, rows_part, heads, HEAD_DIM), lse_part float32 (batch, heads,
//          rows_part): rows first_part .. first_part + rows_part - 1 of O. result: as O, of T; or null
// Needs    rows first .. first + rows - 1 contain those of the part
// Traffic  O and O_part read once, O written once, at the last step result in its place
#include "merge_states.cuh"  // store4: 14; NEG_INF

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr int WIDTH = HEAD_DIM % 4 ? 1 : 4;  // columns that a thread has at a time
constexpr int CHUNKS = HEAD_DIM / WIDTH;
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : 8;  // of a warp, for a row
constexpr int ROWS = THREADS / LANES;
static_assert(THREADS % 32 == 0, "the lanes of a row are in one warp");

struct __align__(4 * WIDTH) Chunk {
  float x[WIDTH];
};

template <typename T>
__global__ void __launch_bounds__(THREADS) merge_partial(
    float* __restrict__ O, float* __restrict__ lse, const float* __restrict__ O_part,
    const float* __restrict__ lse_part, T* __restrict__ result, int N, int heads, int first,
    int rows, int first_part, int rows_part) {
  // ---- prologue: the row of these lanes, and whether the part has it
  const int item = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const long long batch = blockIdx.y;
  const int row = first + item / heads, head = item % heads, part_row = row - first_part;
  const bool exists = item < rows * heads;
  const bool joined = exists && part_row >= 0 && part_row < rows_part;

  // ---- the weights of both
  float* const own = lse + (batch * heads + head) * N + row;
  float keep = 1.0f, join = 0.0f, sum = 0.0f, base = 0.0f;
  if (joined) {
    const float a = *own, b = lse_part[(batch * heads + head) * rows_part + part_row];
    const float larger = fmaxf(a, b);
    base = larger == NEG_INF ? 0.0f : larger;  // -inf - (-inf) is NaN
    keep = expf(a - base), join = expf(b - base);
    sum = keep + join;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    keep *= inverse, join *= inverse;
  }
  __syncwarp();  // hazard: other lanes still read the row's lse
  if (joined && lane == 0) *own = base + logf(sum);

  // ---- the row
  if (!exists) return;
  const long long at = ((batch * N + row) * heads + head) * HEAD_DIM;
  const long long part_at = ((batch * rows_part + part_row) * heads + head) * HEAD_DIM;
#pragma unroll
  for (int c = lane * WIDTH; c < HEAD_DIM; c += LANES * WIDTH) {
    Chunk o = *reinterpret_cast<const Chunk*>(O + at + c);
    if (joined) {
      const Chunk p = *reinterpret_cast<const Chunk*>(O_part + part_at + c);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) o.x[i] = o.x[i] * keep + p.x[i] * join;
    }
    if (!result) *reinterpret_cast<Chunk*>(O + at + c) = o;
    else if constexpr (WIDTH == 4)
      store4(result + at + c, make_float4(o.x[0], o.x[1], o.x[2], o.x[3]));
    else result[at + c] = T(o.x[0]);
  }
}
