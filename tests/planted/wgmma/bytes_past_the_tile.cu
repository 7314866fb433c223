// A step of 32 bytes is taken for one of 32 halves: the second product begins a row too late, and reads past the tile.
// finds: uninitialised
// launch: <<<1, 128, 8192>>>(some(1024, "uint32"), out(128))
#include "hopper.cuh"
extern "C" __global__ void bytes_past_the_tile(const unsigned *in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  int t = threadIdx.x;
  for (int i = t; i < 1024; i += 128) ((unsigned *)s)[i] = in[i];  // 64 rows of 64 bytes
  proxy_fence();
  __syncthreads();
  float d[4] = {};
  wg_fence();
  multiply_bytes(d, tile_of_bytes(s), tile_of_bytes(s), 0);
  multiply_bytes(d, tile_of_bytes(s, 64), tile_of_bytes(s, 64), 1);  // here  // fix: multiply_bytes(d, tile_of_bytes(s, 32), tile_of_bytes(s, 32), 1);
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
