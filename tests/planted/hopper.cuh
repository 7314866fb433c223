// Hopper's instructions as functions, and tiles of 64 columns of halves.
#include <cuda_fp16.h>
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
#define MAP const __grid_constant__ TensorMap
__device__ __forceinline__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(const void *b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect(const void *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(const void *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory");
}
__device__ __forceinline__ void wait(const void *b, int parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
               "bra again;\ndone:\n}" :: "r"(at(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(const void *to, const TensorMap &map, const void *b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :: "r"(at(to)), "l"(&map), "r"(at(b)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store(const TensorMap &map, const void *from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               :: "l"(&map), "r"(at(from)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void bulk_add(float *to, const void *from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Of a tile of rows of 64 halves with the 128-byte swizzle: eight rows are 1024 bytes; panel: of the next 64 columns.
__device__ __forceinline__ unsigned long long tile(const void *p, int step = 0, int panel = 0) {
  return (unsigned long long)(((at(p) & 0x3ffff) + step) >> 4) | (unsigned long long)(panel >> 4) << 16 |
         (unsigned long long)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(adds));
}
// The same for rows of 64 bytes of e4m3 with the 64-byte swizzle, and 32 of them at a time.
__device__ __forceinline__ unsigned long long tile_of_bytes(const void *p, int step = 0) {
  return (unsigned long long)(((at(p) & 0x3ffff) + step) >> 4) | (unsigned long long)(512 >> 4) << 32 | 2ull << 62;
}
__device__ __forceinline__ void multiply_bytes(float (&d)[4], unsigned long long a, unsigned long long b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(adds));
}
__device__ __forceinline__ void hold(float (&d)[4]) {
  for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
// Of clusters: an arrival at the mbarrier of another block, and a load to the first two.
__device__ __forceinline__ void arrive_there(const void *b, int rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" :: "r"(at(b)), "r"(rank) : "memory");
}
__device__ __forceinline__ void load_both(const void *to, const TensorMap &map, const void *b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(at(to)), "l"(&map), "r"(at(b)), "r"(x), "r"(y), "h"((unsigned short)3) : "memory");
}
