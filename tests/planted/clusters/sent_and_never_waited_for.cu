// A block copies a tile into the other, which leaves the kernel without waiting for it.
// finds: never waited for, s[0], block 1, thread 0
// launch: <<<2, 64>>>(map_of(halves(8, 64), (64, 8)), out(2))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_and_never_waited_for(MAP in, float *out) {
  __shared__ __align__(1024) __half s[8 * 64];
  __shared__ unsigned long long full;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&full, 1), init_fence();
  cluster.sync();
  if (t == 0) expect(&full, 1024);
  if (t == 0 && rank == 1) load_both(s, in, &full, 0, 0);  // here
  if (rank == 1) wait(&full, 0);  // fix: wait(&full, 0);
  if (t == 0) out[rank] = rank == 1 ? __half2float(s[0]) : 0.0f;
}
