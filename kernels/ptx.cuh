// PTX instructions of stage 07, one asm statement per function: ldmatrix and mma.sync, which CUDA
// C++ has no functions for, and cp.async, whose CUDA C++ name is __pipeline_memcpy_async.
//
// Lane l = 4 g + t of a warp holds, of an m16n8k16 product, D += A B (g = l / 4, t = l % 4):
//   A, 16 x 16: a[0] = (g, 2t), (g, 2t+1)   a[1] = the same of row g+8
//               a[2], a[3] = the same of columns 2t+8, 2t+9
//   B, 16 x 8:  b0   = (2t, g), (2t+1, g)   b1   = (2t+8, g), (2t+9, g)
//   D, 16 x 8:  d[0], d[1] = (g, 2t), (g, 2t+1)   d[2], d[3] = the same of row g+8

#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>

// A 32-bit address within shared memory, which is what these instructions take.
__device__ __forceinline__ unsigned smem_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 2-byte elements. Lane l gives the address of row l % 8 of matrix l / 8 (16
// bytes, aligned) and receives elements (g, 2t) and (g, 2t+1) of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same, transposed on the way: elements (2t, g) and (2t+1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// D += A B on the tensor cores, in float32. The first argument gives the elements' type.
__device__ __forceinline__ void mma_m16n8k16(
    __half, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(
    __nv_bfloat16, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of this thread's accumulators, elements (row, 8 n + 2t) and (row, 8 n + 2t + 1), which are
// neighbours; row i of the thread is row g + 8 i of its warp.
template <typename Float, int M, int N>
__device__ __forceinline__ Float* row_pair(Float (&acc)[M][N][4], int i, int n) {
  return &acc[i / 2][n][i % 2 * 2];
}

// Asynchronous 16-byte copy from global to shared memory: it uses no registers, and the thread does
// not wait. Only the first `bytes` are read (0 or 16 here); the rest becomes zeros.
__device__ __forceinline__ void cp_async(unsigned target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// All copies that this thread has started since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's groups are in flight. The other threads' copies need
// a barrier as well.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
