// Of tests/test_engine_foreign.py.
template <int ScaleD>
__device__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, %6, %7, %8, %9, %10;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "n"(ScaleD), "n"(1), "n"(1), "n"(0), "n"(0));
}
__device__ unsigned long long tile(const void* p) {  // 8 rows of 16 bytes follow one another, no swizzle
  const unsigned long long at = __cvta_generic_to_shared(p);
  return (at & 0x3ffff) >> 4 | 8ull << 16 | 16ull << 32;
}
extern "C" __global__ void __launch_bounds__(128) twice(float* out) {
  __shared__ __align__(128) unsigned short a[64 * 16], b[8 * 16];
  for (int i = threadIdx.x; i < 64 * 16; i += 128) a[i] = 0x3c00;
  if (threadIdx.x < 128) b[threadIdx.x] = 0x3c00;
  asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  float d[4] = {7, 7, 7, 7};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply<0>(d, tile(a), tile(b));
  multiply<1>(d, tile(a), tile(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = d[0] + d[3];
}
