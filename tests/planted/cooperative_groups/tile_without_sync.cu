// A tile's shuffle is no barrier for shared memory.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void tile_without_sync(const float *in, float *out) {
  __shared__ float s[64];
  auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
  int t = threadIdx.x;
  s[t] = in[t];  // here
  float other = tile.shfl_xor(in[t], 1);
  // fix: tile.sync();
  out[t] = s[t ^ 1] + other;  // there
}
