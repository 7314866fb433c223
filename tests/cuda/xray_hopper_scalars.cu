// Of tests/test_xray_hopper.py.
#line 1 "scalars.cu"
extern "C" __global__ void scalars(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);
  wait(&full, 0);
  struct Four { float a, other, b, c, d; } x = {}, *p = &x;
  wg_fence();
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
               : "+f"(p->a), "+f"(p->b), "+f"(p->c), "+f"(p->d) : "l"(tile(s)));
  wg_commit();
  p->other = t;  // beside the sums, and none of them
  OTHER
  wg_wait<0>();
  out[t] = p->a + p->b + p->c + p->d + p->other;
}
