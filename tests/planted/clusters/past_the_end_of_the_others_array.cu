// An index goes past the end of the other block's array.
// finds: out of bounds, own[32]
// launch: <<<2, 32>>>(out(64))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) past_the_end_of_the_others_array(float *out) {
  __shared__ int own[32];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  own[t] = t;
  cluster.sync();
  out[rank * 32 + t] = cluster.map_shared_rank(own, 1 - rank)[t + 1];  // here  // fix: out[rank * 32 + t] = cluster.map_shared_rank(own, 1 - rank)[t];
  cluster.sync();
}
