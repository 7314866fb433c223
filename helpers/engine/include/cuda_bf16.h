// bfloat16: __nv_bfloat16 (nv_bfloat16) and __nv_bfloat162 (nv_bfloat162), with CUDA's functions for them.
#pragma once
#include "cuda_fp16.h"

#define ENGINE_H __nv_bfloat16
#define ENGINE_H2 __nv_bfloat162
#define ENGINE_RAW __nv_bfloat16_raw
#define ENGINE_RAW2 __nv_bfloat162_raw
#define ENGINE_WORD bfloat16
#define ENGINE_WORD2 bfloat162
#define ENGINE_DTYPE "bfloat16"
#define ENGINE_FORMAT engine::Bfloat16
#define ENGINE_OTHER __half
#ifdef __CUDA_NO_BFLOAT16_CONVERSIONS__
#define ENGINE_NO_CONVERSIONS 1
#endif
#ifdef __CUDA_NO_BFLOAT16_OPERATORS__
#define ENGINE_NO_OPERATORS 1
#endif
#ifdef __CUDA_NO_BFLOAT162_OPERATORS__
#define ENGINE_NO_OPERATORS2 1
#endif
#include "float16_type.h"

#ifndef __CUDA_NO_HALF_CONVERSIONS__
inline __half::__half(__nv_bfloat16 value) : __half(engine_of(value.engine_value())) {}
#endif
#ifndef __CUDA_NO_BFLOAT16_CONVERSIONS__
inline __nv_bfloat16::__nv_bfloat16(__half value) : __nv_bfloat16(engine_of(value.engine_value())) {}
#endif

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7F80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7FFF)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7F7F)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3F80)
