// Of tests/test_engine_ptx_memory.py.
extern "C" __global__ void misaligned(const float *x, float *y) {
  float a, b;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "l"(x + 1));
  y[0] = a + b;
}
extern "C" __global__ void misaligned_shared(const float *x, float *y) {
  __shared__ float s[32];
  asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};" :: "r"((unsigned)__cvta_generic_to_shared(s + 1)), "f"(x[0]));
  y[0] = s[0];
}
extern "C" __global__ void past_the_end(const float *x, float *y) {
  float a;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(a) : "l"(x + 1000) : "memory");
  y[0] = a;
}
extern "C" __global__ void not_shared(const float *x, float *y) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y[0]) : "r"(0x20000000));
}
