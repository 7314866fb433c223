// Of tests/test_engine_ptx.py.
#define ADD_ONE(TO, FROM)                       \
  asm volatile("mov.b32 %0, %1;"                \
               : "=r"(TO)                       \
               : "r"((FROM) + 1));
template <int N>
__device__ __forceinline__ int immediate() {
  int found;
  asm("mov.s32 %0, %1;" : "=r"(found) : "n"(N * 2));
  return found;
}
__device__ int counter;
__device__ int next() { return ++counter; }
struct Pair { int first, second; };

extern "C" __global__ void integers(const unsigned *x, unsigned *y) {
  int t = threadIdx.x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y[t]) : "r"(x[t]), "r"(x[t + 32]), "r"(x[t + 64]));
  asm("lop3.b32 %0, %1, %2, %3, 0xE8;" : "=r"(y[t + 32]) : "r"(x[t]), "r"(x[t + 32]), "r"(x[t + 64]));
  asm volatile("lop3.b32 %0, %1, %2, %3, %4;"
                       : "=r"(y[t + 64]) : "r"(x[t]), "r"(x[t + 32]), "r"(x[t + 64]), "n"(0x96));
}
extern "C" __global__ void forms(int *y) {
  int i = 0, big = 7;
  Pair pair = {3, 4};
  asm volatile("{\n\t"
               "  .reg .pred p;          // a predicate of its own\n\t"
               "  .reg .b32 a, b;\n\t"
               "  mov.b32 a, %2; /* and a register */\n\t"
               "  setp.ne.b32 p, a, 0;\n\t"
               "  @p mov.b32 %0, 0x1F;\n\t"
               "  @!p mov.b32 %1, -5;\n\t"
               "}\n"
               : "+r"(y[0]), "+r"(y[1])
               : "r"(big));
  asm("mov.b32 %0, %1; mov.b32 %1, %2;" : "=r"(y[2]), "+r"(big) : "r"(pair.first > 2 ? pair.second : 0));
  y[3] = big;
  if (big == 4)
    ADD_ONE(y[4], big)
  else
    asm("mov.b32 %0, 99;" : "=r"(y[4]));
  y[5] = immediate<21>();
  asm("mov.u32 %0, %%laneid;" : "=r"(y[6]));
  asm("mov.b32 %0, %1;" : "=r"(y[7 + i++]) : "r"(next()));
  y[8] = i * 100 + counter;
  y[9] = __LINE__;
  unsigned short h = 9;
  long long wide = 1ll << 40;
  asm("mov.b16 %0, %1;" : "=h"(h) : "h"((unsigned short)7));
  asm("mov.b64 %0, %1;" : "=l"(wide) : "l"(wide + 1));
  y[10] = h + (int)(wide >> 40) * 10 + (int)(wide & 1) * 100;
  float one;
  asm("mov.f32 %0, 0f3F800000;" : "=f"(one));
  y[11] = (int)one;
  asm volatile("" ::: "memory");
  // asm("unknown;");
}
extern "C" __global__ void special(unsigned *y) {
  unsigned *mine = y + (blockIdx.x * blockDim.x + threadIdx.x) * 5;
  asm("mov.u32 %0, %%laneid;" : "=r"(mine[0]));
  asm("mov.u32 %0, %%warpid;" : "=r"(mine[1]));
  asm("mov.u32 %0, %%tid.x;" : "=r"(mine[2]));
  asm("mov.u32 %0, %%ctaid.x;" : "=r"(mine[3]));
  asm("mov.u32 %0, %%ntid.x;" : "=r"(mine[4]));
  asm("bar.warp.sync 0xffffffff;");
}
// Two pairs of warps, each with a barrier of its own: the first hands numbers on, the second adds them up.
extern "C" __global__ void pairs(const int *in, int *out, int turns) {
  __shared__ int s[2][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2, sum = 0;
  for (int i = 0; i < turns; ++i) {
    if (warp % 2 == 0) {
      if (i) asm volatile("bar.sync %0, 64;" :: "r"(4 + pair) : "memory");  // hazard: the old numbers are still read
      s[pair][lane] = in[(2 * i + pair) * 32 + lane];
      asm volatile("bar.arrive %0, 64;" :: "r"(1 + pair) : "memory");
    } else {
      asm volatile("barrier.cta.sync %0, 64;" :: "r"(1 + pair) : "memory");  // hazard: the numbers are not there yet
      sum += s[pair][31 - lane];
      if (i + 1 < turns) asm volatile("bar.sync %0, %1;" :: "r"(4 + pair), "r"(64) : "memory");
    }
  }
  asm volatile("bar.sync 0;");
  if (warp % 2) out[pair * 32 + lane] = sum;
}
