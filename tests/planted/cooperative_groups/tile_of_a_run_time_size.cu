// A tile whose size is known at run time needs its sync as well.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64), int32(4))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void tile_of_a_run_time_size(const float *in, float *out, int size) {
  __shared__ float s[64];
  cooperative_groups::thread_group block = cooperative_groups::this_thread_block();
  cooperative_groups::thread_group tile = cooperative_groups::tiled_partition(block, size);
  int t = threadIdx.x;
  s[t] = in[t];  // here
  // fix: tile.sync();
  out[t] = s[t ^ 3];  // there
}
