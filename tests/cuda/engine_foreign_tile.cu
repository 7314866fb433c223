// Of tests/test_engine_foreign.py.
#include <cuda.h>
struct Counter {
  int value;
  __device__ Counter() {}
};
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy(const CUtensorMap* map, unsigned short* out) {
  __shared__ alignas(128) unsigned short tile[64 * 64];
  __shared__ Counter unused;
  __shared__ unsigned long long landed;
  if (threadIdx.x == 0) {
    unused.value = 0;
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(&landed)));
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 8192;" ::"r"(at(&landed)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2}], [%3];"
        ::"r"(at(tile)), "l"(map), "r"(0), "r"(at(&landed)) : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra AGAIN;\n}" ::"r"(at(&landed))
      : "memory");
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) {
    const int row = i / 64, column = i % 64;
    out[i] = tile[64 * row + 8 * (column / 8 ^ row % 8) + column % 8];
  }
}
extern "C" __global__ void swizzled(const __grid_constant__ CUtensorMap map, unsigned short* out) {
  copy(&map, out);
}
extern "C" __global__ void in_memory(const CUtensorMap* map, unsigned short* out) { copy(map, out); }
