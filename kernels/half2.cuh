// Pairs of 2-byte floats in a 32-bit register, as fragments hold them. The type is the first
// argument's, which has no value. Explained in 06's notebook.

#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ float2 unpack(__half, unsigned both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

// A bfloat16 is the upper half of a float32. CUDA's conversion of a pair takes more instructions.
__device__ __forceinline__ float2 unpack(__nv_bfloat16, unsigned both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000));
}
