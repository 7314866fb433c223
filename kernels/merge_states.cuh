// The merge of softmaxes over several sets of keys, as exercise 03_merge_halves has it for two:
// each comes with its maximum m, its sum l of 2^(s - m), and its sum o of 2^(s - m) v.

#pragma once
#include "half2.cuh"
#include "softmax.cuh"

struct State {
  float m, l;  // m in units of log2
  float4 o;    // four columns
};

// A set without keys has m = M_INIT, which is finite, and l = 0: it changes nothing.
template <typename StateOf>
__device__ __forceinline__ State merge(int count, const StateOf& state_of) {
  State sum = {M_INIT, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    const State s = state_of(i);
    const float m = fmaxf(sum.m, s.m), a = exp2f(sum.m - m), b = exp2f(s.m - m);
    sum.m = m;
    sum.l = sum.l * a + s.l * b;
    sum.o.x = sum.o.x * a + s.o.x * b;
    sum.o.y = sum.o.y * a + s.o.y * b;
    sum.o.z = sum.o.z * a + s.o.z * b;
    sum.o.w = sum.o.w * a + s.o.w * b;
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ void store4(T* target, float4 x) {
  *reinterpret_cast<uint2*>(target) = make_uint2(pack(T(), x.x, x.y), pack(T(), x.z, x.w));
}

__device__ __forceinline__ void store4(float* target, float4 x) {
  *reinterpret_cast<float4*>(target) = x;
}
