// Of tests/test_engine_hopper.py.
// Each block adds its rows of `in` to the one row of `out`, two groups of 32 floats at a time.
extern "C" __global__ void adds(const float *in, float *out, int rows, int spoil) {
  __shared__ __align__(16) float s[64];
  int t = threadIdx.x;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    s[t] = in[row * 64 + t];
    proxy_fence();
    __syncthreads();
    if (t == 0) {
      bulk_add(out, s, 128);
      commit();
      unsigned long long policy;
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0 + 128], [%1], %2, %3;"
                   :: "l"(out), "r"(at(s + 32)), "r"(128), "l"(policy) : "memory");
      commit();
      if (spoil == 1) s[0] = s[32] = 77.0f;
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      if (spoil == 2) s[0] = s[32] = 77.0f;
      if (spoil != 3) wait_read();
    }
    __syncthreads();
  }
  if (t == 0 && spoil != 3) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Four warps write a tile, another one adds it to the array. Of the 160 threads at a barrier some only arrive.
extern "C" __global__ void turns(const float *in, float *out, int tiles) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  for (int i = 0; i < tiles; ++i) {
    if (t < 128) {
      if (i > 0) asm volatile("bar.sync 2, 160;" ::: "memory");  // the tile is free
      s[t] = in[i * 128 + t];
      proxy_fence();
    }
    if (t < 96) asm volatile("bar.arrive 1, 160;" ::: "memory");
    else asm volatile("bar.sync 1, 160;" ::: "memory");  // the tile is full
    if (t >= 128) {
      if (t == 128) {
        bulk_add(out, s, 512);
        commit();
        wait_read();
      }
      __syncwarp();
      if (i + 1 < tiles) asm volatile("bar.arrive 2, 160;" ::: "memory");
    }
  }
  if (t == 128) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
