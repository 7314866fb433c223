// A relaxed arrival at barrier.cluster tells nobody of the thread's writes before it.
// finds: race
// launch: <<<2, 32>>>(out(64))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) relaxed_arrival_at_the_barrier(float *out) {
  __shared__ float own[32];
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  own[t] = t + rank;  // there
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // fix: asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  out[rank * 32 + t] = cluster.map_shared_rank(own, rank ^ 1)[t];  // here
  cluster.sync();
}
