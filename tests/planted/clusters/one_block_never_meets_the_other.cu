// The second block waits in one cluster.sync() more than the first, which waits for it at an mbarrier.
// finds: deadlock, block 0, thread 0
// launch: <<<2, 32>>>(out(2))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) one_block_never_meets_the_other(float *out) {
  __shared__ unsigned long long bar;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&bar, 32), init_fence();
  cluster.sync();
  if (rank == 1) cluster.sync();  // fix:
  if (rank == 1) arrive_there(&bar, 0);
  if (rank == 0) wait(&bar, 0);  // here
  cluster.sync();
  if (t == 0) out[rank] = 1;
}
