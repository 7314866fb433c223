// Of tests/test_engine_foreign.py.
__device__ float word(unsigned long long at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"((unsigned)at) : "memory");
  return x;
}
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ __align__(128) float fixed[64];
  __shared__ unsigned long long bar;
  extern __shared__ __align__(128) float chosen[];
  const int t = threadIdx.x;
  fixed[t] = t, chosen[t] = 100 + t;
  __syncthreads();
  float wide;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(wide) : "l"(chosen + t) : "memory");
  const bool same = (unsigned)(size_t)(chosen + t) == (unsigned)__cvta_generic_to_shared(chosen + t);
  float sum = same + word((unsigned long long)(fixed + t)) + word((unsigned long long)(chosen + t)) + wide;
  __syncthreads();
  if (t == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "l"(&bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "l"(&bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                 :: "l"(fixed), "l"(in), "l"(&bar) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @p bra D; bra W; D: }"
               :: "l"(&bar) : "memory");
  out[blockIdx.x * 64 + t] = sum + fixed[t];
}
