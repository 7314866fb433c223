// Of tests/test_engine_clusters.py.
#define REGISTER(NAME, PTX) __device__ int NAME() { unsigned r; asm("mov.u32 %0, %" PTX ";" : "=r"(r)); return r; }
REGISTER(ctarank, "cluster_ctarank") REGISTER(nctarank, "cluster_nctarank")
REGISTER(ctaid_x, "cluster_ctaid.x") REGISTER(ctaid_y, "cluster_ctaid.y")
REGISTER(nctaid_x, "cluster_nctaid.x") REGISTER(nctaid_y, "cluster_nctaid.y")
REGISTER(id_x, "clusterid.x") REGISTER(id_y, "clusterid.y")
REGISTER(nid_x, "nclusterid.x") REGISTER(nid_y, "nclusterid.y")
extern "C" __global__ void __cluster_dims__(2, 3, 1) places(int *out) {
  cg::cluster_group cluster = cg::this_cluster();
  cg::grid_group grid = cg::this_grid();
  if (threadIdx.x == 0) {
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    const int all[] = {
        (int)cluster.block_rank(), (int)cluster.num_blocks(), (int)cluster.block_index().x,
        (int)cluster.block_index().y, (int)cluster.dim_blocks().x, (int)cluster.dim_blocks().y,
        (int)cluster.num_threads(),
        ctarank(), nctarank(), ctaid_x(), ctaid_y(), nctaid_x(), nctaid_y(), id_x(), id_y(), nid_x(), nid_y(),
        (int)grid.num_clusters(), (int)grid.cluster_rank()};
    for (int i = 0; i < 19; ++i) out[19 * block + i] = all[i];
  }
  if (threadIdx.x == 31) atomicAdd(&out[19 * 24], (int)cluster.thread_rank());
}
