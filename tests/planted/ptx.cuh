// Loads that acquire, and additions that release.
__device__ int acquired(const int *p) {
  int v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ void add_release(int *p) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(p) : "memory"); }
__device__ void add_relaxed(int *p) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(p) : "memory"); }
