// Of tests/test_engine_ptx_memory.py.
extern "C" __global__ void race(const float *x, float *y) {
  __shared__ float s[64];
  unsigned at = (unsigned)__cvta_generic_to_shared(s);
  float v = 0;
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(at + 4 * threadIdx.x), "f"(x[threadIdx.x]) : "memory");
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at + 4 * (63 - threadIdx.x)) : "memory");
  y[threadIdx.x] = v;
}
extern "C" __global__ void fixed(const float *x, float *y) {
  __shared__ float s[64];
  unsigned at = (unsigned)__cvta_generic_to_shared(s);
  float v = 0;
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(at + 4 * threadIdx.x), "f"(x[threadIdx.x]) : "memory");
  asm volatile("bar.sync 0;" ::: "memory");
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at + 4 * (63 - threadIdx.x)) : "memory");
  y[threadIdx.x] = v;
}
extern "C" __global__ void bounds(const float *x, float *y) {
  float a, b;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "l"(x + 2 * threadIdx.x));
  y[threadIdx.x] = a + b;
}
extern "C" __global__ void hand_over(int *flag, float *y) {
  if (blockIdx.x == 0) {
    y[0] = 3;
    asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
  } else {
    int seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (seen) y[1] = y[0];
  }
}
extern "C" __global__ void no_hand_over(int *flag, float *y) {
  if (blockIdx.x == 0) {
    y[0] = 3;
    asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
  } else {
    int seen;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (seen) y[1] = y[0];
  }
}
extern "C" __global__ void counted(unsigned *n) {
  asm volatile("red.global.add.u32 [%0], 1;" :: "l"(n) : "memory");
}
