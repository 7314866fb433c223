// Of tests/test_engine_groups.py.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
template <int SIZE>
__global__ void tiles(const int *x, int *out) {
  __shared__ int s[1024];
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<SIZE, cg::thread_block> tile = cg::tiled_partition<SIZE>(block);
  cg::thread_block_tile<32, cg::thread_block_tile<SIZE, cg::thread_block>> warp = cg::tiled_partition<32>(tile);
  int t = threadIdx.x, n = blockDim.x;
  s[t] = x[t];
  tile.sync();
  out[t] = s[t / SIZE * SIZE + SIZE - 1 - tile.thread_rank()];
  tile.sync();
  out[n + t] = cg::reduce(tile, x[t], cg::plus<int>());
  out[2 * n + t] = cg::reduce(tile, x[t], cg::greater<int>());
  out[3 * n + t] = tile.meta_group_rank() * 10000 + tile.meta_group_size() * 100 + tile.any(x[t] == 7) * 10;
  out[3 * n + t] += tile.all(x[t] > -200) + (tile.num_threads() == SIZE) * 2 + warp.meta_group_rank() * 1000000;
  out[4 * n + t] = cg::reduce(warp, x[t], cg::plus<int>());
}
