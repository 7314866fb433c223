// Of tests/test_engine_hopper.py.
extern "C" __global__ void bulk(const float *in, float *out, int early) {
  __shared__ __align__(16) float s[64];
  __shared__ unsigned long long b;
  int t = threadIdx.x;
  if (t == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (t == 0) {
    expect(&b, 256);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at(s)), "l"(in), "r"(256), "r"(at(&b)) : "memory");
  }
  if (!early) wait(&b, 0);
  float mine = s[t];
  wait(&b, 0);
  __syncthreads();
  s[t] = 2 * mine;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(out), "r"(at(s)), "r"(256)
                 : "memory");
    commit();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// A thread looks until another one, which waits for a copy, has set the flag.
extern "C" __global__ void looked_for(const float *in, volatile int *flag) {
  __shared__ __align__(16) float s[64];
  __shared__ unsigned long long b;
  int t = threadIdx.x;
  if (t == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (t == 32)
    while (*flag == 0) __nanosleep(20);
  if (t > 0) return;
  expect(&b, 256);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(at(s)), "l"(in), "r"(256), "r"(at(&b)) : "memory");
  wait(&b, 0);
  *flag = (int)s[63];
}
