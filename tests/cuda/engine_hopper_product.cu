// Of tests/test_engine_hopper.py.
#ifndef SPAN
#define SPAN 128
#endif
#ifndef ITEM
#define ITEM 2
#endif
constexpr int WIDE = SPAN / 2, CODE = SPAN == 128 ? 1 : SPAN == 64 ? 2 : SPAN == 32 ? 3 : 0;
__device__ __forceinline__ unsigned long long described(unsigned address, int leading, int stride = 8 * SPAN) {
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(leading >> 4) << 16 |
         (unsigned long long)(stride >> 4) << 32 | (unsigned long long)CODE << 62;
}
// The 16 of K from 16 k on, of `rows` rows along K, or of `rows` columns. Without a swizzle a panel has 8 columns.
__device__ __forceinline__ unsigned long long part(unsigned tile, int rows, int k, int transposed) {
  if (SPAN == 16 && transposed) return described(tile + 16 * k * 16, 128, KS * 16);
  if (SPAN == 16) return described(tile + 2 * k * rows * 16, rows * 16, 128);
  if (transposed) return described(tile + 16 * k * SPAN, KS * SPAN);
  return described(tile + 16 * k / WIDE * rows * SPAN + 16 * k % WIDE * 2, 0);
}
extern "C" __global__ __launch_bounds__(128) void multiply_all(MAP map_a, MAP map_b, const unsigned *registers,
                                                               const float *c, float *out, int adds) {
  extern __shared__ __align__(1024) char s[];
  char *tile_a = s, *tile_b = s + 64 * KS * 2;
  unsigned long long &ready = *(unsigned long long *)(s + (64 + WIDTH) * KS * 2);
  int t = threadIdx.x;
  if (t == 0) init(&ready, 1), init_fence();
  __syncthreads();
  if (t == 0) {
    expect(&ready, (64 + WIDTH) * KS * 2);
    const int long_a = TRANS_A ? KS : 64, long_b = TRANS_B ? KS : WIDTH;
    for (int x = 0; x < (TRANS_A ? 64 : KS); x += WIDE)
      load(tile_a + x * long_a * 2, map_a, &ready, x * 2 / ITEM, 0);
    for (int x = 0; x < (TRANS_B ? WIDTH : KS); x += WIDE)
      load(tile_b + x * long_b * 2, map_b, &ready, x * 2 / ITEM, 0);
  }
  wait(&ready, 0);
  float d[WIDTH / 2];
  int warp = t / 32, g = t % 32 / 4, q = t % 4;
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = c[(16 * warp + g + i % 4 / 2 * 8) * WIDTH + i / 4 * 8 + 2 * q + i % 2];
  wg_fence();
  for (int k = 0; k < KS / 16; ++k) {
#if REGISTERS
    unsigned a[4];
    for (int i = 0; i < 4; ++i) a[i] = registers[((16 * warp + g + i % 2 * 8) * KS + 16 * k + i / 2 * 8 + 2 * q) / 2];
    wg_fence();
    product(d, a, part(at(tile_b), WIDTH, k, TRANS_B), adds || k > 0);
#else
    product(d, part(at(tile_a), 64, k, TRANS_A), part(at(tile_b), WIDTH, k, TRANS_B), adds || k > 0);
#endif
  }
  wg_commit();
  wg_wait<0>();
  for (int i = 0; i < WIDTH / 2; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
  for (int i = 0; i < WIDTH / 2; ++i) out[(16 * warp + g + i % 4 / 2 * 8) * WIDTH + i / 4 * 8 + 2 * q + i % 2] = d[i];
}
