// Of tests/test_engine_hopper.py.
// A from a static array, B from dynamic shared memory: descriptors have 18 bits of an address.
extern "C" __global__ __launch_bounds__(128) void both(const __half *a, const __half *b, float *out) {
  __shared__ __align__(1024) __half first[64 * 64];
  extern __shared__ __align__(1024) __half second[];
  int t = threadIdx.x;
  for (int i = t; i < 64 * 64; i += 128) {
    int row = i / 64, chunk = i % 64 / 8 ^ row % 8;
    first[row * 64 + chunk * 8 + i % 8] = a[i];
    if (row < 8) second[row * 64 + chunk * 8 + i % 8] = b[i];
  }
  proxy_fence();
  __syncthreads();
  float d[4];
  wg_fence();
  for (int k = 0; k < 4; ++k) multiply(d, tile(first, 32 * k), tile(second, 32 * k), k > 0);
  wg_commit();
  wg_wait<0>();
  hold(d);
  for (int i = 0; i < 4; ++i) out[(t / 32 * 16 + t % 32 / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
}
