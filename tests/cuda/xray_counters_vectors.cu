// Of tests/test_xray_counters.py.
#include <cuda_fp16.h>
struct Pair { float4 a; float2 b; };
union Words { float4 v; float each[4]; };
__constant__ float4 table[2] = {{1, 2, 3, 4}, {5, 6, 7}};
__device__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
extern "C" __global__ void vectors(const float4 *in, float4 *out, double2 *two, uchar4 *bytes, half2 *halves,
                                   float4 value) {
  __shared__ float4 tile[32];
  __shared__ Pair pairs[32];
  __shared__ half2 half_tile[32];
  const int t = threadIdx.x;
  const float4 zero = {}, b{1, 2, 3, 4};
  constexpr float4 first = {1.0f};
  float4 rows[2] = {zero, {1, 2, 3}};
  Words words;
  words.v = in[t];
  words.each[1] += 1;
  tile[t] = words.v;
  half_tile[t] = halves[t];
  pairs[t] = Pair{b, {1, 2}};
  __syncthreads();
  Pair pair = pairs[t];
  out[t] = tile[31 - t] + zero + first + rows[1] + pair.a + table[1] + value;
  double2 d = two[t];
  d.x += pair.b.y;
  two[t] = d;
  uchar4 c = bytes[t];
  c.z++;
  bytes[t] = c;
  halves[t] = half_tile[31 - t];
}
