// Of tests/test_engine_ptx_memory.py.
extern "C" __global__ void stores(unsigned *y, const unsigned *x) {
  unsigned char *at = (unsigned char *)(y + threadIdx.x * 32);
  unsigned a = x[4 * threadIdx.x], b = x[4 * threadIdx.x + 1], c = x[4 * threadIdx.x + 2], d = x[4 * threadIdx.x + 3];
  unsigned long long both = (unsigned long long)b << 32 | a;
  asm volatile("st.global.u8 [%0], %1;" :: "l"(at), "r"(a) : "memory");
  asm volatile("st.global.b16 [%0 + 2], %1;" :: "l"(at), "h"((unsigned short)b) : "memory");
  asm volatile("st.global.wt.u32 [%0+%2], %1;" :: "l"(at), "r"(c), "n"(4) : "memory");
  asm volatile("st.global.cg.b64 [%0+8], %1;" :: "l"(at), "l"(both) : "memory");
  asm volatile("st.global.v4.u32 [%0+16], {%1, %2, %3, %4};" :: "l"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  asm volatile("st.global.cs.v2.f32 [%0+32], {%1, %2};" :: "l"(at), "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  asm volatile("st.volatile.global.u32 [%0+40], %1;" :: "l"(at), "r"(d) : "memory");
  asm volatile("st.release.gpu.global.u32 [%0+44], %1;" :: "l"(at), "r"(a) : "memory");
  asm volatile("st.relaxed.cta.global.f64 [%0+48], %1;" :: "l"(at), "d"(__longlong_as_double(both)) : "memory");
  asm volatile("st.b32 [%0+-8], 17;" :: "l"(at + 64) : "memory");
  asm volatile("st.global.L1::no_allocate.v2.b64 [%0+64], {%1, %1};" :: "l"(at), "l"(both) : "memory");
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 0x7fffffff;\n"
               "  @p st.global.b32 [%0+80], %1; @!p st.global.b32 [%0+84], %1; }" :: "l"(at), "r"(a) : "memory");
}
