// Of tests/test_engine_groups.py.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
namespace cg = cooperative_groups;
extern "C" __global__ void whole_grid(float *x) {
  cg::grid_group grid = cg::this_grid();
  x[0] = grid.is_valid();
  grid.sync();
}
extern "C" __global__ void lonely_shuffle(float *x) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  if (threadIdx.x % 8 < 3)
    x[threadIdx.x] = tile.shfl_down(x[threadIdx.x], 1);
  else
    tile.sync();
}
extern "C" __global__ void odd_tile(float *x) {
  cg::thread_group g = cg::tiled_partition(cg::this_thread_block(), 6);
  g.sync();
}
extern "C" __global__ void no_wait(const float *x, float *out) {
  __shared__ float s[64];
  cg::thread_block block = cg::this_thread_block();
  cg::memcpy_async(block, s, x, sizeof(s));
  out[threadIdx.x] = s[63 - threadIdx.x];
}
