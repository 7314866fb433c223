// The first block waits for the cluster, the second one at its own mbarrier for an arrival that comes after that.
// finds: deadlock, block 1, thread 0
// launch: <<<2, 32>>>(out(2))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) the_other_waits_at_a_barrier(float *out) {
  __shared__ unsigned long long bar;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&bar, 1), init_fence();
  cluster.sync();
  // fix: if (rank == 0 && t == 0) arrive_there(&bar, 1);
  if (rank == 1) wait(&bar, 0);  // here
  cluster.sync();
  if (rank == 0 && t == 0) arrive_there(&bar, 1);  // fix: if (rank == 1 && t == 0) arrive(&bar);
  if (t == 0) out[rank] = 1;
}
