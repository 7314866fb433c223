// The fence that tells other blocks of an mbarrier comes after the arrival at barrier.cluster.
// finds: race
// launch: <<<2, 32>>>(out(64))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) fence_of_an_mbarrier_after_the_arrival(float *out) {
  __shared__ unsigned long long ready;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&ready, 32);  // there  // fix: if (t == 0) init(&ready, 32), init_fence();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  if (t == 0) init_fence();  // fix:
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  arrive_there(&ready, rank ^ 1);  // here
  if (t == 0) wait(&ready, 0);
  cluster.sync();
  out[rank * 32 + t] = 1;
}
