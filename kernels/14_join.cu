// 14 join: attention to a prefix that all sequences share joins that to each sequence's own keys.
//
// Since 17's merge: both parts are finished outputs in T as 14 stores them, with their lse, and the rows
// of all sequences lie one after the other in either, so that nothing is copied before.
//
// Launch   grid (ceil(rows heads / ROWS)), block THREADS
// Shapes   O, O_prefix (rows, heads, HEAD_DIM) of T, rows = sequences * N; lse (sequences, heads, N),
//          lse_prefix (heads, rows): float32. O and lse are updated in place
// Needs    HEAD_DIM times the bytes of T is a multiple of 16
// Traffic  O and O_prefix read once, O written once
#include "merge_states.cuh"  // store4: 14; NEG_INF

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row
#endif
#ifndef THREADS
#define THREADS 256
#endif

constexpr int LANES = HEAD_DIM > 64 ? 32 : 16;  // of a warp, for a row
constexpr int ROWS = THREADS / LANES;
static_assert(HEAD_DIM % 4 == 0 && THREADS % 32 == 0, "the lanes of a row are in one warp");

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
template <typename T>
__device__ __forceinline__ float4 load4(const T* from) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(from);
  const float2 a = unpack(T(), pairs.x), b = unpack(T(), pairs.y);
  return make_float4(a.x, a.y, b.x, b.y);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) join_prefix(
    T* O, float* lse, const T* __restrict__ O_prefix, const float* __restrict__ lse_prefix, int N,
    int heads, int rows) {
  const int item = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int row = item / heads, head = item % heads;
  const bool exists = row < rows;
  float* const own = lse + (row / N * (long long)heads + head) * N + row % N;
  const float a = exists ? *own : NEG_INF;
  const float b = exists ? lse_prefix[head * (long long)rows + row] : NEG_INF;
  const float larger = fmaxf(a, b),
              base = larger == NEG_INF ? 0.0f : larger;  // -inf - (-inf) is NaN
  float keep = expf(a - base), join = expf(b - base);
  const float sum = keep + join, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  keep *= inverse, join *= inverse;
  __syncwarp();  // hazard: other lanes still read the row's lse
  if (!exists) return;
  if (lane == 0) *own = base + logf(sum);
  const long long at = (long long)item * HEAD_DIM;
#pragma unroll
  for (int c = 4 * lane; c < HEAD_DIM; c += 4 * LANES) {
    const float4 o = load4(O + at + c), p = load4(O_prefix + at + c);
    store4(
        O + at + c, make_float4(
                        o.x * keep + p.x * join, o.y * keep + p.y * join, o.z * keep + p.z * join,
                        o.w * keep + p.w * join));
  }
}
