// Of tests/test_engine_residents.py.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void smooth(float *a, float *b, int steps) {
  extern __shared__ float kept[];  // every block has its own, static and dynamic, over all meetings
  __shared__ float mine[256];
  cg::grid_group grid = cg::this_grid();
  const int n = (int)grid.size(), i = (int)grid.thread_rank();
  float sum = 0;
  kept[threadIdx.x] = (float)i;
  for (int step = 0; step < steps; ++step) {
    mine[threadIdx.x] = a[(i + 1) % n] + a[(i + n - 1) % n];
    b[i] = mine[threadIdx.x];
    grid.sync();  // before a is written
    a[i] = b[i] * 0.5f;
    sum += mine[threadIdx.x];
    cg::sync(grid);  // before a is read
  }
  b[i] = kept[threadIdx.x] == (float)i ? sum : -1.0f;
}
extern "C" __global__ void valid(int *out) {
  cg::grid_group grid = cg::this_grid();
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = grid.is_valid();
}
extern "C" __global__ void some_threads_leave(int *count, int *out) {
  if (threadIdx.x >= 40) return;
  atomicAdd(count, 1);
  cg::this_grid().sync();
  if (threadIdx.x == 0) out[blockIdx.x] = *(volatile int *)count;
}
