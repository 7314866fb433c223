// A sync of 8 threads does not reach the partner 8 threads away.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void tile_too_small(const float *in, float *out) {
  __shared__ float s[64];
  auto block = cooperative_groups::this_thread_block();
  auto tile = cooperative_groups::tiled_partition<8>(cooperative_groups::tiled_partition<32>(block));  // fix: auto tile = cooperative_groups::tiled_partition<16>(cooperative_groups::tiled_partition<32>(block));
  int t = threadIdx.x;
  s[t] = in[t];  // here
  cooperative_groups::sync(tile);
  out[t] = s[t ^ 8];  // there
}
