// Of tests/test_engine_ptx.py.
#define NEVER_USED() asm volatile("wgmma.fence.sync.aligned;")
#if 0
asm(nothing that could be read);
#endif
__device__ void unused() { asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(0)); }
extern "C" __global__ void right(int *a) {
  if (a[0] > 100) asm volatile("wgmma.fence.sync.aligned;");
  a[0] = 7;
}
extern "C" __global__ void wrong(int *a) {
  unsigned x = 0;
  a[0] = 7;
  asm volatile(
      "vote.any.u32 %0, 1;"  // an old one
      : "=r"(x));
}
extern "C" __global__ void few(int *a) {
  asm volatile("mov.b32 %0;" : "=r"(a[0]));
}
extern "C" __global__ void many(int *a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0}, [%1];" : "=r"(a[0]) : "r"(1));
}
extern "C" __global__ void host(int *a) {
  asm volatile("rdtsc" : "=a"(a[0]));
}
extern "C" __global__ void special(int *a) {
  asm volatile("mov.u32 %0, %total_smem_size;" : "=r"(a[0]));
}
extern "C" __global__ void almost(int *a) {
  asm volatile("cp.async.wait_groups 0;" ::: "memory");
}
extern "C" __global__ void strange(int *a) {
  asm volatile("quux.v9 {%0, %1}, \"x\";" :: "r"(1), "r"(2));
}
