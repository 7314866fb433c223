// A block waits at an mbarrier for an arrival that comes after a cluster.sync(), where all threads have to come first.
// finds: deadlock
// launch: <<<2, 64>>>(out(2))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) told_after_the_cluster_met(float *out) {
  __shared__ unsigned long long ready;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&ready, 1), init_fence();
  cluster.sync();
  if (rank == 1 && t >= 32) wait(&ready, 0);
  // fix: if (rank == 0 && t == 0) arrive_there(&ready, 1);
  cluster.sync();
  if (rank == 0 && t == 0) arrive_there(&ready, 1);  // fix:
  cluster.sync();
  if (t == 0) out[rank] = 1;
}
