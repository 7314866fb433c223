// A block leaves the kernel without waiting for the flag by which the other says that it has read.
// finds: peer exited, own[0], block 0
// launch: <<<2, 32>>>(zeros(2), out(32))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) left_before_the_flag(int *flags, float *out) {
  __shared__ int own[32];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  own[t] = t;
  cluster.sync();
  if (rank == 0) {
    out[t] = cluster.map_shared_rank(own, 1)[t];  // here
    __threadfence();
    __syncthreads();
    if (t == 0) atomicExch(&flags[1], 1);
  }
  // fix: while (rank == 1 && atomicAdd(&flags[1], 0) == 0) __nanosleep(100);
}
