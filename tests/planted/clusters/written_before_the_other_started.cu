// A block writes to the other, which may not have started yet.
// finds: peer not started, own[0], block 0
// launch: <<<2, 1>>>(out(2))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) written_before_the_other_started(float *out) {
  __shared__ int own[4];
  cg::cluster_group cluster = cg::this_cluster();
  int rank = cluster.block_rank();
  // fix: cluster.sync();
  if (rank == 0) cluster.map_shared_rank(own, 1)[0] = 7;  // here
  cluster.sync();
  out[rank] = rank ? own[0] : 0;
}
