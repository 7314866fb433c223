// Of tests/test_engine_ptx_memory.py.
extern "C" __global__ void atomics(unsigned *y, unsigned long long *w, float *f, double *d, unsigned *pairs,
                                   unsigned *old) {
  __shared__ unsigned s[2];
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x < 2) s[threadIdx.x] = 0;
  __syncthreads();
  unsigned at = (unsigned)__cvta_generic_to_shared(s), mine;
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(mine) : "l"(y) : "memory");
  old[mine] = 1;
  asm volatile("red.relaxed.gpu.global.add.s32 [%0+4], %1;" :: "l"(y), "r"(-3) : "memory");
  asm volatile("red.global.max.s32 [%0+8], %1;" :: "l"(y), "r"(t - 1000) : "memory");
  asm volatile("red.global.min.u32 [%0+12], %1;" :: "l"(y), "r"(t + 5) : "memory");
  asm volatile("red.global.or.b32 [%0+16], %1;" :: "l"(y), "r"(1 << t % 32) : "memory");
  asm volatile("red.global.and.b32 [%0+20], %1;" :: "l"(y), "r"(~(1 << t % 8)) : "memory");
  asm volatile("atom.global.inc.u32 %0, [%1], 9;" : "=r"(mine) : "l"(y + 6) : "memory");
  asm volatile("atom.cta.shared.add.u32 %0, [%1], %2;" : "=r"(mine) : "r"(at), "r"(t) : "memory");
  asm volatile("red.shared.xor.b32 [%0], %1;" :: "r"(at + 4), "r"(t) : "memory");
  asm volatile("red.global.add.u64 [%0], %1;" :: "l"(w), "l"(1ull << 33) : "memory");
  asm volatile("red.global.add.f32 [%0], 0f3F000000;" :: "l"(f) : "memory");
  asm volatile("red.global.add.v2.f32 [%0], {%1, %1};" :: "l"(f + 2), "f"(1.0f) : "memory");
  asm volatile("red.global.add.f64 [%0], %1;" :: "l"(d), "d"(0.25) : "memory");
  asm volatile("red.global.add.noftz.f16x2 [%0], %1;" :: "l"(pairs), "r"(0x3C004000) : "memory");
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" :: "l"(pairs + 1), "r"(0x3F804000) : "memory");
  if (t == 0) {
    asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old[300]) : "l"(y + 7), "r"(42) : "memory");
    asm volatile("atom.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old[301]) : "l"(y + 7), "r"(42), "r"(43) : "memory");
    asm volatile("atom.global.cas.b64 %0, [%1], %2, %3;" : "=l"(w[2]) : "l"(w + 1), "l"(7ull), "l"(8ull) : "memory");
    asm volatile("membar.gl; fence.acq_rel.gpu; fence.sc.cta; membar.cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 2) old[302 + 2 * blockIdx.x + threadIdx.x] = s[threadIdx.x];
}
