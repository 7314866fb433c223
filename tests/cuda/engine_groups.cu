// Of tests/test_engine_groups.py.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

extern "C" __global__ void positions(int *out) {
  cg::thread_block block = cg::this_thread_block();
  cg::grid_group grid = cg::this_grid();
  int at = (int)grid.thread_rank(), n = (int)grid.size();
  dim3 group = block.group_index(), thread = block.thread_index(), threads = block.dim_threads();
  dim3 whole = grid.thread_index(), blocks = grid.dim_blocks(), all = grid.dim_threads();
  int row[] = {
    (int)block.thread_rank(), (int)block.size(), (int)block.num_threads(), (int)group.x, (int)group.y, (int)group.z,
    (int)thread.x, (int)thread.y, (int)thread.z, (int)threads.x, (int)threads.y, (int)threads.z, (int)grid.block_rank(),
    (int)grid.num_blocks(), (int)grid.num_threads(), (int)whole.x, (int)whole.y, (int)whole.z, (int)blocks.x,
    (int)all.y, (int)cg::group_size(block), (int)cg::this_thread().size()
  };
  for (int k = 0; k < 22; ++k) out[k * n + at] = row[k];
}

struct Wide { float a; int b[5]; };  // 24 bytes: more than one shuffle of the hardware moves

// What a tile and a coalesced group both have. Row k of the answer, for thread t.
template <typename Group>
__device__ int collectives(const Group &g, int value, int *out, int n, int t) {
  int k = 0, every = 0;
  out[k++ * n + t] = g.thread_rank();
  out[k++ * n + t] = g.size();
  out[k++ * n + t] = g.meta_group_rank();
  out[k++ * n + t] = g.meta_group_size();
  out[k++ * n + t] = g.shfl(value, g.size() - 1);
  out[k++ * n + t] = g.shfl_up(value, 1);
  out[k++ * n + t] = g.shfl_down(value, 2);
  out[k++ * n + t] = g.any(value > 90);
  out[k++ * n + t] = g.all(value > 10);
  out[k++ * n + t] = g.ballot(value & 1);
  out[k++ * n + t] = g.match_any(value % 3);
  out[k++ * n + t] = g.match_all(value / 50, every);
  out[k++ * n + t] = every;
  out[k++ * n + t] = cg::reduce(g, value, cg::plus<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::less<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::greater<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_and<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_or<int>());
  out[k++ * n + t] = cg::reduce(g, value, cg::bit_xor<int>());
  out[k++ * n + t] = (int)cg::reduce(g, (float)value, [=](float a, float b) { return a > b ? a : b; });
  out[k++ * n + t] = cg::inclusive_scan(g, value);
  out[k++ * n + t] = cg::exclusive_scan(g, value);
  out[k++ * n + t] = cg::inclusive_scan(g, value, cg::greater<int>());
  out[k++ * n + t] = cg::exclusive_scan(g, value, cg::plus<int>());
  Wide wide = {value * 0.5f, {value, value + 1, value + 2, value + 3, value + 4}};
  Wide other = g.shfl(wide, 0);
  out[k++ * n + t] = other.b[4] + (int)(2 * other.a);
  int calls = 0;
  cg::invoke_one(g, [&](int by) { calls += by; }, 7);
  out[k++ * n + t] = calls;
  out[k++ * n + t] = cg::invoke_one_broadcast(g, [&] { return value; });
  cg::sync(g);
  return k;
}

template <int SIZE>
__global__ void tiles(const int *in, int *out, float *sums) {
  int t = threadIdx.x, n = blockDim.x;
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<SIZE> tile = cg::tiled_partition<SIZE>(block);
  int k = collectives(tile, in[t], out, n, t);
  out[k * n + t] = tile.shfl_xor(in[t], SIZE / 2);
  static_assert(decltype(tile)::size() == SIZE && decltype(tile)::num_threads() == SIZE, "known when it is compiled");
  sums[t] = cg::reduce(tile, 0.1f * in[t], cg::plus<float>());
}

// Tiles of tiles, and sizes that are known only now; each writes to memory and reads its neighbour's word after a sync.
__device__ int neighbour(const cg::thread_group &g, int value, volatile int *memory) {
  g.sync();
  memory[g.thread_rank()] = value;
  g.sync();
  return memory[(g.thread_rank() + 1) % g.size()];
}
extern "C" __global__ void partitions(const int *in, int *out, int size) {
  __shared__ int memory[256];
  int t = threadIdx.x, n = blockDim.x, k = 0;
  cg::thread_block block = cg::this_thread_block();
  auto sixteen = cg::tiled_partition<16>(block);
  auto four = cg::tiled_partition<4>(sixteen);
  out[k++ * n + t] = four.meta_group_rank();
  out[k++ * n + t] = four.meta_group_size();
  out[k++ * n + t] = four.shfl(in[t], 3);
  cg::thread_group dynamic = cg::tiled_partition(block, size);
  out[k++ * n + t] = dynamic.thread_rank();
  out[k++ * n + t] = dynamic.size();
  out[k++ * n + t] = neighbour(dynamic, in[t], memory + t / size * size);
  cg::thread_group finer = cg::tiled_partition(dynamic, 2);
  out[k++ * n + t] = finer.thread_rank();
  out[k++ * n + t] = neighbour(finer, in[t], memory + t / 2 * 2);
  out[k++ * n + t] = neighbour(block, in[t], memory);
  block.barrier_wait(block.barrier_arrive());
}

// Some lanes alone; the groups they make of themselves.
extern "C" __global__ void coalesced(const int *in, const int *takes_part, int *out, int *halves, int *labels,
                                     int *cut) {
  int t = threadIdx.x, n = blockDim.x;
  if (takes_part[t]) {
    cg::coalesced_group g = cg::coalesced_threads();
    collectives(g, in[t], out, n, t);
    collectives(cg::binary_partition(g, in[t] % 2 == 0), in[t], halves, n, t);
    collectives(cg::labeled_partition(g, in[t] % 3), in[t], labels, n, t);
    collectives(cg::tiled_partition(g, 4), in[t], cut, n, t);
  }
}

extern "C" __global__ void copies(const float *in, float *out, int count, int elements) {
  __shared__ float s[1000];
  cg::thread_block block = cg::this_thread_block();
  for (int i = threadIdx.x; i < 1000; i += blockDim.x) s[i] = -1.0f;
  block.sync();
  cg::memcpy_async(block, s, in, count * sizeof(float));
  cg::memcpy_async(block, s + 500, 400, in, elements);  // as many elements as both sides have
  cg::wait(block);
  for (int i = threadIdx.x; i < 1000; i += blockDim.x) out[i] = s[999 - i + 0];
}
