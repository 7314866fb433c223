// A block tells the other that its tile may be overwritten, and reads it only then.
// finds: race, s, block 0, thread 0
// launch: <<<2, 64>>>(map_of(halves(64, 64), (64, 8)), out(2))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) copied_over_what_the_other_still_reads(MAP in, float *out) {
  __shared__ __align__(1024) __half s[8 * 64];
  __shared__ unsigned long long full, empty;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&full, 1), init(&empty, 128), init_fence();
  cluster.sync();
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (i && rank == 0 && t == 0) wait(&empty, 0);
    if (t == 0) expect(&full, 1024);
    if (rank == 0 && t == 0) load_both(s, in, &full, 0, 8 * i);  // here
    wait(&full, i);
    if (rank == 1) arrive_there(&empty, 0);  // fix:
    sum += __half2float(s[t]);  // there
    if (rank == 0) arrive_there(&empty, 0);  // fix: arrive_there(&empty, 0);
  }
  if (t == 0) out[rank] = sum;
  cluster.sync();
}
