// Of tests/test_xray_async.py.
#line 1 "figures.cu"
extern "C" __global__ void figures(const __half *in, float *out) {
  __shared__ __align__(128) __half s[64 * PITCH];
  int t = threadIdx.x;
  for (int i = t; i < 64 * 8; i += 32) {
    int row = i / 8, piece = SWIZZLE ? i % 8 ^ row % 8 : i % 8;
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[row * PITCH + 8 * piece]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + 8 * i));  // copy
  }
  asm volatile("cp.async.wait_all;");
  __syncwarp();
  unsigned r[4], sum = 0;
  for (int k = 0; k < 4; ++k) {
    int row = t % 16, piece = 2 * k + t / 16;
    unsigned from = (unsigned)__cvta_generic_to_shared(&s[row * PITCH + 8 * (SWIZZLE ? piece ^ row % 8 : piece)]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"  // load
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
    sum += r[0] ^ r[1] ^ r[2] ^ r[3];
  }
  out[t] = (float)sum;
}
