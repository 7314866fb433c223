// IEEE half precision: __half (half) and __half2 (half2), with CUDA's functions for them.
#pragma once
#include "float16_formats.h"

struct __nv_bfloat16;

#define ENGINE_H __half
#define ENGINE_H2 __half2
#define ENGINE_RAW __half_raw
#define ENGINE_RAW2 __half2_raw
#define ENGINE_WORD half
#define ENGINE_WORD2 half2
#define ENGINE_DTYPE "float16"
#define ENGINE_FORMAT engine::Binary16
#define ENGINE_OTHER __nv_bfloat16
#ifdef __CUDA_NO_HALF_CONVERSIONS__
#define ENGINE_NO_CONVERSIONS 1
#endif
#ifdef __CUDA_NO_HALF_OPERATORS__
#define ENGINE_NO_OPERATORS 1
#endif
#ifdef __CUDA_NO_HALF2_OPERATORS__
#define ENGINE_NO_OPERATORS2 1
#endif
#include "float16_type.h"

#ifndef CUDA_NO_HALF
typedef __half half;
typedef __half2 half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;
typedef __half_raw __nv_half_raw;
typedef __half2_raw __nv_half2_raw;
typedef __half nv_half;
typedef __half2 nv_half2;
#endif

#define CUDART_INF_FP16 __ushort_as_half(0x7C00)
#define CUDART_NAN_FP16 __ushort_as_half(0x7FFF)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7BFF)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000)
#define CUDART_ZERO_FP16 __ushort_as_half(0x0000)
#define CUDART_ONE_FP16 __ushort_as_half(0x3C00)
