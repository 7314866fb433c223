// Of tests/test_engine_ptx_warp.py.
extern "C" __global__ void doubles(const double *a, const double *b, double *c) {
  int lane = threadIdx.x;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c[2 * lane]), "+d"(c[2 * lane + 1]) : "d"(a[lane]), "d"(b[lane]));
}
extern "C" __global__ void moved(const unsigned *x, unsigned *y) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y[threadIdx.x]) : "r"(x[threadIdx.x]));
}
extern "C" __global__ void orders(const unsigned *x, unsigned *y) {
  __shared__ __align__(16) unsigned s[128];
  int t = threadIdx.x;
  for (int i = t; i < 128; i += 32) s[i] = x[i];
  __syncwarp();
  size_t at = __cvta_generic_to_shared(s + 4 * t);
  unsigned a[4];
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "l"(at) : "memory");
  for (int i = 0; i < 4; ++i) y[t + 32 * i] = a[i];
  asm volatile("ldmatrix.sync.aligned.trans.m8n8.x2.shared::cta.b16 {%0, %1}, [%2+0];"
               : "=r"(a[0]), "=r"(a[1]) : "r"((unsigned)at));
  y[t + 128] = a[0], y[t + 160] = a[1];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_, %0, _, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "l"(at));
  y[t + 192] = a[0], y[t + 224] = a[1];
  float d[2];
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, _, %1, _}, {%2, %2}, {%2},\n"
               "  {0f3FC00000, 0f00000000, 0f40000000, 0f00000000};"
               : "=f"(d[0]), "=f"(d[1]) : "r"(0));
  y[t + 256] = __float_as_uint(d[0]), y[t + 288] = __float_as_uint(d[1]);
}
