// Of tests/test_engine_ptx_warp.py.
extern "C" __global__ void shuffles(const unsigned *x, unsigned *y, const unsigned *by, const unsigned *c) {
  int t = threadIdx.x;
  unsigned all = 0xffffffffu, inside[4];
#define SHUFFLE(I, MODE)                                                                                    \
  asm volatile("{ .reg .pred p; shfl.sync." MODE ".b32 %0|p, %2, %3, %4, %5; selp.u32 %1, 1, 0, p; }"        \
               : "=r"(y[t + 64 * I]), "=r"(inside[I]) : "r"(x[t]), "r"(by[t]), "r"(c[0]), "r"(all));         \
  y[t + 64 * I + 32] = inside[I];
  SHUFFLE(0, "up") SHUFFLE(1, "down") SHUFFLE(2, "bfly") SHUFFLE(3, "idx")
  asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, -1;" : "=r"(y[t + 256]) : "r"(x[t]));
}
extern "C" __global__ void votes(const unsigned *x, unsigned *y) {
  int t = threadIdx.x;
  unsigned found[13], all = 0xffffffffu, value = x[t];
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 3; vote.sync.ballot.b32 %0, p, %2; }"
               : "=r"(found[0]) : "r"(value), "r"(all));
  asm volatile("{ .reg .pred p, q; setp.gt.u32 p, %1, 3; vote.sync.any.pred q, !p, 0xffffffff; selp.b32 %0, 1, 0, q; }"
               : "=r"(found[1]) : "r"(value));
  asm volatile("{ .reg .pred p, q; setp.lt.u32 p, %1, 9; vote.sync.all.pred q, p, %2; selp.b32 %0, 1, 0, q; }"
               : "=r"(found[2]) : "r"(value), "r"(all));
  asm volatile("match.any.sync.b32 %0, %1, %2;" : "=r"(found[3]) : "r"(value), "r"(all));
  asm volatile("{ .reg .pred p; match.all.sync.b32 %0|p, %2, %3; selp.u32 %1, 1, 0, p; }"
               : "=r"(found[4]), "=r"(found[5]) : "r"(7), "r"(all));
  asm volatile("redux.sync.add.s32 %0, %1, %2;" : "=r"(found[6]) : "r"(value), "r"(all));
  asm volatile("redux.sync.max.u32 %0, %1, %2;" : "=r"(found[7]) : "r"(value), "r"(all));
  asm volatile("redux.sync.xor.b32 %0, %1, %2;" : "=r"(found[8]) : "r"(value), "r"(all));
  asm volatile("activemask.b32 %0;" : "=r"(found[9]));
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(found[10]));
  asm volatile("bar.warp.sync %0;" :: "r"(all) : "memory");
  asm volatile("{ .reg .u32 a, b; mov.u32 a, %%lanemask_lt; mov.u32 b, %lanemask_ge; xor.b32 %0, a, b; }"
               : "=r"(found[11]));
  asm volatile("{ .reg .u32 a, b; mov.u32 a, %lanemask_eq; mov.u32 b, %lanemask_gt; or.b32 a, a, b;"
               " mov.u32 b, %lanemask_le; sub.u32 %0, b, a; }" : "=r"(found[12]));
  for (int i = 0; i < 13; ++i) y[i * 32 + t] = found[i];
}
extern "C" __global__ void registers(unsigned *y, unsigned long long *w) {
  unsigned a, b, c;
  asm volatile("mov.u32 %0, %tid.y; mov.u32 %1, %%ntid.y; mov.u32 %2, %nctaid.x;" : "=r"(a), "=r"(b), "=r"(c));
  unsigned long long before, after;
  unsigned low, size;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(before));
  asm volatile("mov.u32 %0, %clock;" : "=r"(low));
  asm volatile("mov.u32 %0, %dynamic_smem_size;" : "=r"(size));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(after));
  int t = threadIdx.y * blockDim.x + threadIdx.x;
  y[4 * t] = a, y[4 * t + 1] = b, y[4 * t + 2] = c, y[4 * t + 3] = size;
  w[t] = after >= before && low == low;
}
extern "C" __global__ void counts(const int *x, int *y) {
  int t = threadIdx.x;
  asm volatile("{ .reg .pred p, q, r; setp.gt.s32 p, %3, 0; barrier.cta.red.popc.aligned.u32 %0, 0, p;\n"
               "  bar.red.and.pred q, 0, p; bar.red.or.pred r, 0, p; selp.s32 %1, 1, 0, q; selp.s32 %2, 1, 0, r; }"
               : "=r"(y[t]), "=r"(y[t + 64]), "=r"(y[t + 128]) : "r"(x[t]) : "memory");
}
