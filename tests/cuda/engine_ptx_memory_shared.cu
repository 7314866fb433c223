// Of tests/test_engine_ptx_memory.py.
extern "C" __global__ void shared(const float *x, float *y) {
  __shared__ float s[128];
  extern __shared__ float dynamic[];
  int t = threadIdx.x;
  unsigned at = (unsigned)__cvta_generic_to_shared(s), wide, more;
  asm volatile("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(wide) : "l"(dynamic));
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(at + 4 * t), "f"(x[t]) : "memory");
  asm volatile("st.shared::cta.v2.f32 [%0], {%1, %1};" :: "r"(wide + 8 * t), "f"(2 * x[t]) : "memory");
  asm volatile("bar.sync 0;" ::: "memory");
  float a, b, c, d, e;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4+256];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
               : "r"(at + 16 * (t % 16)) : "memory");
  asm volatile("{ .reg .u64 p; cvta.shared.u64 p, %1; ld.f32 %0, [p]; }"
               : "=f"(e) : "l"((unsigned long long)(wide + 8 * (127 - t))));
  y[t] = a + 10 * b + 100 * c + 1000 * d;
  y[t + 128] = e;
  asm volatile("{ .reg .pred p, q; isspacep.shared p, %1; isspacep.global q, %2; and.pred p, p, q;\n"
               "  selp.u32 %0, 1, 0, p; }" : "=r"(more) : "l"(s), "l"(y));
  y[t + 256] = (float)more;
  asm volatile("prefetch.global.L2 [%0]; fence.proxy.async;" :: "l"(y));
}
