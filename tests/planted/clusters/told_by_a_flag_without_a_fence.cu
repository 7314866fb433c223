// A block tells the other by a flag that its row is written, and there is no fence before the flag.
// finds: race, own[0], block 0
// launch: <<<2, 32>>>(zeros(2), out(32))
#include "clusters.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) told_by_a_flag_without_a_fence(int *flags, float *out) {
  __shared__ int own[32];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (rank == 1) own[t] = t;  // there
  __syncthreads();
  if (rank == 1 && t == 0) {
    // fix: __threadfence();
    atomicExch(&flags[0], 1);
    while (atomicAdd(&flags[1], 0) == 0) __nanosleep(100);
  } else if (rank == 0) {
    if (t == 0)
      while (atomicAdd(&flags[0], 0) == 0) __nanosleep(100);
    __threadfence();
    __syncthreads();
    out[t] = cluster.map_shared_rank(own, 1)[t];  // here
    __syncthreads();
    __threadfence();
    if (t == 0) atomicExch(&flags[1], 1);
  }
}
