// Of tests/test_engine_eights.py.
#ifndef BUG
#define BUG 0
#endif
constexpr int KEYS = 64;
__device__ __forceinline__ void product(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {SUMS}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}"
    : OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}
__device__ __forceinline__ unsigned pack(float a, float b, float c, float d) {
  unsigned r;
  asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
extern "C" __global__ __launch_bounds__(128) void pv(MAP map, const float *p, float *out) {
  __shared__ __align__(1024) unsigned char v[KEYS * 64], vt[64 * KEYS];
  __shared__ unsigned long long b;
  int t = threadIdx.x, lane = t % 32, warp = t / 32, g = lane / 4, q = lane % 4;
  if (t == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&b, KEYS * 64), load(v, map, &b, 0, 0);
  wait(&b, 0);
  // Each warp transposes 16 columns: pairs of bytes by ldmatrix, then even and odd columns apart.
  int row = 16 * warp + lane / 16 * 8 + lane % 8;
  for (int k = 0; k < KEYS / 32; ++k) {
    unsigned r[4], key = 32 * k + lane;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at(v) + key * 64 + ((warp ^ key / 2 % 4) << 4)) : "memory");
    int chunk = 2 * k + lane / 8 % 2;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at(vt) + row * KEYS + ((chunk ^ row / 2 % 4) << 4)),
                    "r"(__byte_perm(r[0], r[1], 0x6420)), "r"(__byte_perm(r[2], r[3], 0x6420)),
                    "r"(__byte_perm(r[0], r[1], 0x7531)), "r"(__byte_perm(r[2], r[3], 0x7531)) : "memory");
  }
  if (BUG != 1) proxy_fence();
  __syncthreads();
  float s[KEYS / 2], d[32];
  for (int i = 0; i < KEYS / 2; ++i) s[i] = p[(16 * warp + g + i % 4 / 2 * 8) * KEYS + i / 4 * 8 + 2 * q + i % 2];
  for (int i = 0; i < 32; ++i) d[i] = 0;
  unsigned long long tile = (unsigned long long)((at(vt) & 0x3ffff) >> 4) | 512ull >> 4 << 32 | 2ull << 62;
  unsigned a[KEYS / 32][4];
  for (int k = 0; k < KEYS / 32; ++k) {
    const float *x = s + 16 * k;
    a[k][0] = pack(x[0], x[1], x[4], x[5]), a[k][1] = pack(x[2], x[3], x[6], x[7]);
    a[k][2] = pack(x[8], x[9], x[12], x[13]), a[k][3] = pack(x[10], x[11], x[14], x[15]);
  }
  if (BUG != 2) wg_fence();
  for (int k = 0; k < KEYS / 32; ++k) product(d, a[k], tile + 2 * k, k > 0);
  wg_commit();
  if (BUG == 3) vt[t] = 0;
  if (BUG != 4) wg_wait<0>();
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
  // Row r < 8 of each 16 of V^T is column 2 r, the others column 2 (r - 8) + 1.
  for (int i = 0; i < 32; ++i) {
    int r = i / 4 * 8 + 2 * q + i % 2, column = r / 16 * 16 + r % 8 * 2 + r % 16 / 8;
    out[(16 * warp + g + i % 4 / 2 * 8) * 64 + column] = d[i];
  }
}
