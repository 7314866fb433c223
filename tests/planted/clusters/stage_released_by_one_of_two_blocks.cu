// A block loads the stages of both again when its own readers have released theirs.
// finds: wrong byte count
// launch: <<<2, 64, 8192>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "clusters.cuh"
#include "hopper.cuh"
extern "C" __global__ void __cluster_dims__(2, 1, 1) stage_released_by_one_of_two_blocks(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  cg::cluster_group cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();  // fix: if (t == 0) init(&full, 1), init(&empty, 2), init_fence();
  cluster.sync();
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      expect(&full, 8192);
      if (rank == 0) {
        if (i) wait(&empty, 0);
        load_both(s, in, &full, 0, 64 * i);  // here
      }
      if (i == 0 && rank == 1) wait(&full, 0);
    }
  }
  float sum = 0;
  if (t >= 32)
    for (int i = 0; i < 2; ++i) {
      wait(&full, i);
      sum += __half2float(s[t]);
      __syncwarp();
      if (t == 32 && rank == 0) arrive_there(&empty, 0);  // fix: if (t == 32) arrive_there(&empty, 0);
    }
  out[rank * 64 + t] = sum;
  cluster.sync();
}
