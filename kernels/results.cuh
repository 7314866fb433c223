// Neighbouring elements of a kernel's results, which are of its inputs' type or of float: see Out in
// hooks.cuh.

#pragma once
#include "half2.cuh"

__device__ __forceinline__ float2 pack(float, float x, float y) { return make_float2(x, y); }

template <typename T>
using Pair = decltype(pack(T(), 0.0f, 0.0f));

// Two and eight neighbouring elements.
template <typename T>
__device__ __forceinline__ void store2(T* target, float x, float y) {
  *reinterpret_cast<Pair<T>*>(target) = pack(T(), x, y);
}

template <typename T>
__device__ __forceinline__ void store8(T* target, const unsigned (&x)[4]) {
  *reinterpret_cast<uint4*>(target) = make_uint4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void store8(float* target, const float2 (&x)[4]) {
  reinterpret_cast<float4*>(target)[0] = make_float4(x[0].x, x[0].y, x[1].x, x[1].y);
  reinterpret_cast<float4*>(target)[1] = make_float4(x[2].x, x[2].y, x[3].x, x[3].y);
}

// Four neighbouring elements.
template <typename T>
__device__ __forceinline__ void store4(T* target, float a, float b, float c, float d) {
  *reinterpret_cast<uint2*>(target) = make_uint2(pack(T(), a, b), pack(T(), c, d));
}

__device__ __forceinline__ void store4(float* target, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
}
