// A block leaves the kernel while the other may still read its shared memory.
// finds: peer exited, own[0], block 0
// launch: <<<2, 1>>>(out(2))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) left_while_the_other_reads(float *out) {
  __shared__ int own[4];
  cg::cluster_group cluster = cg::this_cluster();
  int rank = cluster.block_rank();
  own[0] = rank;
  cluster.sync();
  out[rank] = rank ? 1 : cluster.map_shared_rank(own, 1)[0];  // here
  // fix: cluster.sync();
}
