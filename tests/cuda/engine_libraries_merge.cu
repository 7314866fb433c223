// Of tests/test_engine_libraries.py.
#include <cub/block/block_discontinuity.cuh>
#include <cub/block/block_exchange.cuh>
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_shuffle.cuh>
#include <cub/warp/warp_merge_sort.cuh>
struct Less {
  __device__ bool operator()(int a, int b) const { return a < b; }
};
struct Differ {
  __device__ bool operator()(int a, int b) const { return a != b; }
};
extern "C" __global__ void kernel(const int* x, int* sorted, int* warps, int* heads, int* moved) {
  int t = threadIdx.x, key[4], lane[1] = {x[t]};
  for (int i = 0; i < 4; ++i) key[i] = x[i * 128 + t];
  typedef cub::BlockExchange<int, 128, 4> Exchange;
  __shared__ typename Exchange::TempStorage exchange;
  Exchange(exchange).StripedToBlocked(key, key);
  typedef cub::BlockShuffle<int, 128> Shuffle;
  __shared__ typename Shuffle::TempStorage shuffle;
  moved[t] = -1;
  Shuffle(shuffle).Offset(key[0], moved[t], 3);
  typedef cub::BlockMergeSort<int, 128, 4> Sort;
  __shared__ typename Sort::TempStorage sort;
  Sort(sort).Sort(key, Less());
  typedef cub::BlockDiscontinuity<int, 128> Discontinuity;
  __shared__ typename Discontinuity::TempStorage discontinuity;
  int head[4];
  Discontinuity(discontinuity).FlagHeads(head, key, Differ());
  for (int i = 0; i < 4; ++i) sorted[4 * t + i] = key[i], heads[4 * t + i] = head[i];
  typedef cub::WarpMergeSort<int, 1> Warp;
  __shared__ typename Warp::TempStorage warp[4];
  Warp(warp[t / 32]).Sort(lane, Less());
  warps[t] = lane[0];
}
