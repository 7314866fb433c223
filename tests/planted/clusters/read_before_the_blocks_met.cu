// A block reads the other's word without a cluster.sync() after the write, only with a barrier of its own.
// finds: race
// launch: <<<2, 32>>>(out(64))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) read_before_the_blocks_met(float *out) {
  __shared__ int own[32];
  cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  int t = threadIdx.x, rank = cluster.block_rank();
  own[t] = rank + t;  // there
  __syncthreads();  // fix: cluster.sync();
  out[rank * 32 + t] = cluster.map_shared_rank(own, 1 - rank)[t];  // here
  cluster.sync();
}
