// Of tests/test_engine_eights.py.
extern "C" __global__ void permuted(MAP map, unsigned char *out) {
  __shared__ __align__(1024) unsigned char s[32 * 64];
  __shared__ unsigned long long b;
  int t = threadIdx.x;
  if (t == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (t == 0) {
    expect(&b, 32 * 64);
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %4, %4, %5}], [%2];"
                 :: "r"(at(s)), "l"(&map), "r"(at(&b)), "r"(64), "r"(0), "r"(1) : "memory");
  }
  wait(&b, 0);
  for (int i = t; i < 32 * 64; i += 128) out[i] = s[i / 64 * 64 + (i % 64 / 16 ^ i / 64 / 2 % 4) * 16 + i % 16];
}
