// Of tests/test_xray_hopper.py.
#line 1 "figures.cu"
extern "C" __global__ void figures(MAP in, MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // load
  wait(&full, 0);
  unsigned r[4];
  for (int k = 0; k < 4; ++k) {
    int row = t / 32 * 16 + t % 16, chunk = 2 * k + t % 32 / 16;
    unsigned place = at(s) + row * 128 + (SWIZZLE ? chunk ^ row % 8 : chunk) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"  // read
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"  // write
                 :: "r"(place), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // store
    commit();
    wait_read();
  }
}
