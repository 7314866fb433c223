// Of tests/test_engine_ptx_warp.py.
#define LOAD(TO, FROM)                              \
  asm volatile("ld.global" /* a hint: */ ".nc"      \
               ".s32 %0, [%1];" /* and no clobber */ \
               : "=r"(TO)                           \
               : "l"(FROM))
#define TEXT(x) #x
#define MOVE "mov.b32 "
#define ADD(TO, A, B, KIND) asm("add." TEXT(KIND) " %0, %1, %2;" : "=r"(TO) : "r"(A), "r"(B))
#define WIDTH 4
#define FOR_EACH(F) F(0) F(1) F(2)
__device__ __forceinline__ unsigned lane() {
  unsigned found;
  asm("mov.u32 %0, %laneid;" : "=r"(found));
  return found;
}
#if __CUDA_ARCH__ < 100
#error "no macros"
#endif

extern "C" __global__ void written(const int *x, int *y) {
  int t = threadIdx.x, a, b = 0;
  LOAD(a, x + t);
  ADD(b, a, 10, s32);
  y[t] = b;
  asm(MOVE "%0, %1;"
      // the value
      : "=r"(y[t + 32])
      : "r"(__LINE__));
  asm("add.u32 %0, %1, %2;" : "=&r"(y[t + 64]) : "r"(lane()), "n"(WIDTH * 2));
#define STEP(I) asm("mad.lo.s32 %0, %1, %2, %0;" : "+r"(y[t + 96]) : "r"(t), "n"(I));
  FOR_EACH(STEP)
  asm(R"({
    .reg .u32 low<2>, %%high;
    mov.u32 low0, 1 + 2 * 3;   // seven
    { .reg .u32 low0; mov.u32 low0, 100; mov.u32 low1, low0; }
    mov.u32 %%high, WARP_SZ;
    add.u32 %0, low0, low1;
    add.u32 %0, %0, %%high;
  })" : "=r"(y[t + 128]));
}
extern "C" __global__ void loops(const unsigned *x, unsigned *y) {
  unsigned n = x[threadIdx.x], steps;
  asm volatile(
      "{\n"
      "  .reg .pred p, odd;\n"
      "  .reg .u32 n, bit;\n"
      "  mov.u32 n, %1; mov.u32 %0, 0;\n"
      "AGAIN:\n"
      "  setp.le.u32 p, n, 1;\n"
      "  @p bra.uni DONE_%=;\n"
      "  and.b32 bit, n, 1;\n"
      "  setp.eq.u32 odd, bit, 1;\n"
      "  @odd mad.lo.u32 n, n, 3, 1;\n"
      "  @!odd shr.u32 n, n, 1;\n"
      "  add.u32 %0, %0, 1;\n"
      "  bra AGAIN;\n"
      "DONE_%=:\n"
      "}"
      : "=r"(steps) : "r"(n));
  y[threadIdx.x] = steps;
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %0, 40; @p exit; }" :: "r"(steps));
  y[threadIdx.x + 32] = 1;

}
