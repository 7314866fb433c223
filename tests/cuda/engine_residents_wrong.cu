// Of tests/test_engine_residents.py.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void one_block_ends(int *a) {
  if (blockIdx.x == 2) return;
  a[0] = 1;
  cg::this_grid().sync();  // one_block_ends
}
extern "C" __global__ void thread_0_leaves(int *a) {
  if (threadIdx.x == 0) return;
  cg::this_grid().sync();  // thread_0_leaves
}
extern "C" __global__ void one_fails(int *a) {
  if (blockIdx.x == 1) a[1 << 16] = 1;  // one_fails
  cg::this_grid().sync();
}
extern "C" __global__ void for_ever(volatile int *a) {
  while (a[1] == 0);  // for_ever
}
extern "C" __global__ void for_nobody(int *a) {
  while (atomicCAS(a, 1, 2) != 1);  // for_nobody
}
extern "C" __global__ void good(int *a) {
  cg::this_grid().sync();
  a[threadIdx.x] = threadIdx.x;
}
