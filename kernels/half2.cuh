// Pairs of 2-byte floats in a 32-bit register, as fragments hold them. The type is the first
// argument's, which has no value. Explained in 06's notebook.

#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The type of the results of a kernel whose inputs are of T. With -DFLOAT_OUT=1 they are not rounded: they
// are partial, and will be added to others (17).
#if FLOAT_OUT
template <typename T>
using Out = float;
#else
template <typename T>
using Out = T;
#endif

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

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

__device__ __forceinline__ float2 unpack(__half, unsigned both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

// A bfloat16 is the upper half of a float32. CUDA's conversion of a pair takes more instructions.
__device__ __forceinline__ float2 unpack(__nv_bfloat16, unsigned both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000));
}
