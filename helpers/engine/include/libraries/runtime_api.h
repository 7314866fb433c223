// What libcu++, CUB and Thrust require of a CUDA compiler and of the host's runtime API. Kernels call none of it.
#pragma once
#define __NVCC__ 1
#ifndef CUDA_VERSION
#define CUDA_VERSION 12090
#endif
#ifndef CUDART_VERSION
#define CUDART_VERSION 12090
#endif

#include "../driver_types.h"

static inline const char* cudaGetErrorString(cudaError_t) { return "an error of the CUDA runtime"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
