// A labeled partition exchanges words without a sync of its part.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void parts_of_a_tile(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
  auto part = cooperative_groups::labeled_partition(tile, t % 4);
  s[t] = in[t];  // here
  // fix: part.sync();
  out[t] = s[t ^ 4];  // there
}
