// 14 join: attention to a prefix that all sequences share joins that to each sequence's own keys.
//
// Since 17's merge: both are finished outputs with their lse, of any type. That to the prefix may be in
// parts, each of some of its keys, and its rows and heads lie as the kernel that made it had them.
//
// Launch   grid (ceil(rows heads / ROWS)), block THREADS
// Shapes   O (rows, heads, HEAD_DIM) of T, rows = sequences N; lse float32 (sequences, heads, N): both
//          updated in place. O_prefix of P, lse_prefix float32: by the steps of params
// Traffic  O and O_prefix read once, O written once
#include "merge_states.cuh"  // store4: 14; NEG_INF

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row
#endif
#ifndef THREADS
#define THREADS 128
#endif

constexpr int LANES = HEAD_DIM > 64 ? 32 : 16;  // of a warp, for a row
constexpr int ROWS = THREADS / LANES;
static_assert(THREADS % 32 == 0, "the lanes of a row are in one warp");

// Four columns from c on; rows that are no multiple of four long are read and written one by one.
__device__ __forceinline__ float4 load4(const float* row, int c) {
  if (HEAD_DIM % 4 == 0) return *reinterpret_cast<const float4*>(row + c);
  const auto at = [&](int i) { return c + i < HEAD_DIM ? row[c + i] : 0.0f; };
  return make_float4(at(0), at(1), at(2), at(3));
}
template <typename T>
__device__ __forceinline__ float4 load4(const T* row, int c) {
  if (HEAD_DIM % 4 == 0) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(row + c);
    const float2 a = unpack(T(), pairs.x), b = unpack(T(), pairs.y);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  const auto at = [&](int i) { return c + i < HEAD_DIM ? float(row[c + i]) : 0.0f; };
  return make_float4(at(0), at(1), at(2), at(3));
}
template <typename T>
__device__ __forceinline__ void store_columns(T* row, int c, const float (&x)[4]) {
  if (HEAD_DIM % 4 == 0) {
    store4(row + c, make_float4(x[0], x[1], x[2], x[3]));
    return;
  }
  for (int i = 0; i < 4 && c + i < HEAD_DIM; ++i) row[c + i] = T(x[i]);
}

struct JoinParams {
  long long o_part, o_row, o_kv_head, o_head;  // elements from one to the next; o_head: in a group
  long long lse_part, lse_row, lse_kv_head, lse_head;  // the same of lse_prefix
  int parts, N, rows, heads, group;                    // group: heads that share a head of K and V
};

// Four blocks a multiprocessor: registers for several parts that are on their way.
template <typename T, typename P>
__global__ void __launch_bounds__(THREADS, 4) join_prefix(
    T* O, float* lse, const P* __restrict__ O_prefix, const float* __restrict__ lse_prefix,
    const JoinParams params) {
  // ---- prologue: the row of these lanes
  const int item = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int heads = params.heads, N = params.N, row = item / heads, head = item % heads;
  if (row >= params.rows) return;  // all lanes of the row
  const int kv_head = head / params.group, in_group = head % params.group;
  O_prefix += row * params.o_row + kv_head * params.o_kv_head + in_group * params.o_head;
  lse_prefix += row * params.lse_row + kv_head * params.lse_kv_head + in_group * params.lse_head;
  T* const o = O + (long long)item * HEAD_DIM;
  float* const own = lse + (row / N * (long long)heads + head) * N + row % N;
  const float own_lse = *own;
  __syncwarp();  // hazard: the row's lse could be replaced while other lanes read it

  // ---- four columns at a time: the mean of all parts
#pragma unroll
  for (int c = 4 * lane; c < HEAD_DIM; c += 4 * LANES) {
    const State sum = merge(params.parts + 1, [&](int i) {
      const float l = i ? lse_prefix[(i - 1) * params.lse_part] : own_lse;
      const float4 x = i ? load4(O_prefix + (i - 1) * params.o_part, c) : load4(o, c);
      if (l == NEG_INF) return State{M_INIT, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
      return State{LOG2_E * l, 1.0f, x};
    });
    const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;  // no key: zeros, lse = -inf
    if (c == 0) *own = LN_2 * (sum.m + log2f(sum.l));
    const float x[4] = {sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse};
    store_columns(o, c, x);
  }
}
