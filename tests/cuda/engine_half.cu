// Of tests/test_engine_half.py.
#include <HEADER>
typedef unsigned short bits_t;
__device__ TYPE of(bits_t v) { return __ushort_as_WORD(v); }
__device__ bits_t as(TYPE v) { return __WORD_as_ushort(v); }

// Each function of one, two or three numbers, and whether its pair does the same to both halves.
__device__ void same(TYPE2 pair, TYPE low, TYPE high, unsigned *wrong) {
  if (as(pair.x) != as(low) || as(__high2WORD(pair)) != as(high)) atomicAdd(wrong, 1u);
}
#define UNARY(K, F, F2)                                 \
  out[K * n + i] = as(F(a));                            \
  same(F2(TYPE2(a, b)), F(a), F(b), wrong + K);
extern "C" __global__ void unary(const bits_t *in, bits_t *out, unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in[i]), b = of(in[n - 1 - i]);
  UNARY(0, hsqrt, h2sqrt) UNARY(1, hrsqrt, h2rsqrt) UNARY(2, hrcp, h2rcp) UNARY(3, hexp, h2exp)
  UNARY(4, hexp2, h2exp2) UNARY(5, hexp10, h2exp10) UNARY(6, hlog, h2log) UNARY(7, hlog2, h2log2)
  UNARY(8, hlog10, h2log10) UNARY(9, hsin, h2sin) UNARY(10, hcos, h2cos) UNARY(11, htanh, h2tanh)
  UNARY(12, htrunc, h2trunc) UNARY(13, hceil, h2ceil) UNARY(14, hfloor, h2floor) UNARY(15, hrint, h2rint)
  UNARY(16, __hneg, __hneg2) UNARY(17, __habs, __habs2) UNARY(18, -, -) UNARY(19, +, +)
}

#define OPERATOR(NAME, OP, T) __device__ T NAME(T a, T b) { return a OP b; }
#define UPDATE(NAME, OP, T) __device__ T NAME(T a, T b) { T c = a; c OP b; return c; }
OPERATOR(plus, +, TYPE) OPERATOR(plus, +, TYPE2) OPERATOR(minus, -, TYPE) OPERATOR(minus, -, TYPE2)
OPERATOR(times, *, TYPE) OPERATOR(times, *, TYPE2) OPERATOR(over, /, TYPE) OPERATOR(over, /, TYPE2)
UPDATE(add, +=, TYPE) UPDATE(add, +=, TYPE2) UPDATE(sub, -=, TYPE) UPDATE(sub, -=, TYPE2)
UPDATE(mul, *=, TYPE) UPDATE(mul, *=, TYPE2) UPDATE(div, /=, TYPE) UPDATE(div, /=, TYPE2)
#define BINARY(K, F, F2)                                         \
  out[K * n + i] = as(F(a, b));                                  \
  same(F2(TYPE2(a, b), TYPE2(b, a)), F(a, b), F(b, a), wrong + K);
extern "C" __global__ void binary(const bits_t *in_a, const bits_t *in_b, bits_t *out, unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in_a[i]), b = of(in_b[i]);
  BINARY(0, __hadd, __hadd2) BINARY(1, __hsub, __hsub2) BINARY(2, __hmul, __hmul2) BINARY(3, __hdiv, __h2div)
  BINARY(4, __hadd_rn, __hadd2_rn) BINARY(5, __hsub_rn, __hsub2_rn) BINARY(6, __hmul_rn, __hmul2_rn)
  BINARY(7, __hadd_sat, __hadd2_sat) BINARY(8, __hsub_sat, __hsub2_sat) BINARY(9, __hmul_sat, __hmul2_sat)
  BINARY(10, __hmax, __hmax2) BINARY(11, __hmin, __hmin2) BINARY(12, __hmax_nan, __hmax2_nan)
  BINARY(13, __hmin_nan, __hmin2_nan) BINARY(14, plus, plus) BINARY(15, minus, minus) BINARY(16, times, times)
  BINARY(17, over, over) BINARY(18, add, add) BINARY(19, sub, sub) BINARY(20, mul, mul) BINARY(21, div, div)
}

#define TERNARY(K, F, F2)                                                                      \
  out[K * n + i] = as(F(a, b, c));                                                             \
  same(F2(TYPE2(a, b), TYPE2(b, c), TYPE2(c, a)), F(a, b, c), F(b, c, a), wrong + K);
extern "C" __global__ void ternary(const bits_t *in_a, const bits_t *in_b, const bits_t *in_c, bits_t *out,
                                   unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in_a[i]), b = of(in_b[i]), c = of(in_c[i]);
  TERNARY(0, __hfma, __hfma2) TERNARY(1, __hfma_sat, __hfma2_sat) TERNARY(2, __hfma_relu, __hfma2_relu)
}

// Comparison k is bit k of the answer; it must be the same in all its forms.
#define COMPARE(K, OP)                                                                                      \
  {                                                                                                         \
    bool one = __h##OP(a, b), other = __h##OP(b, a);                                                        \
    TYPE2 p(a, b), q(b, a), r = __h##OP##2(p, q);                                                           \
    unsigned masks = (one ? 0xFFFFu : 0u) | (other ? 0xFFFF0000u : 0u);                                     \
    if (float(r.x) != float(one) || float(r.y) != float(other) || __h##OP##2_mask(p, q) != masks ||         \
        __hb##OP##2(p, q) != (one && other)) atomicAdd(wrong + K, 1u);                                      \
    answer |= unsigned(one) << K;                                                                           \
  }
extern "C" __global__ void compare(const bits_t *in_a, const bits_t *in_b, unsigned *out, unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in_a[i]), b = of(in_b[i]);
  unsigned answer = 0;
  COMPARE(0, eq) COMPARE(1, ne) COMPARE(2, lt) COMPARE(3, le) COMPARE(4, gt) COMPARE(5, ge)
  COMPARE(6, equ) COMPARE(7, neu) COMPARE(8, ltu) COMPARE(9, leu) COMPARE(10, gtu) COMPARE(11, geu)
  answer |= unsigned(a == b) << 12 | unsigned(a != b) << 13 | unsigned(a < b) << 14 | unsigned(a <= b) << 15 |
            unsigned(a > b) << 16 | unsigned(a >= b) << 17;
  TYPE2 p(a, a), q(b, b);
  answer |= unsigned(p == q) << 18 | unsigned(p != q) << 19 | unsigned(p < q) << 20 | unsigned(p <= q) << 21 |
            unsigned(p > q) << 22 | unsigned(p >= q) << 23;
  answer |= unsigned(__hisnan(a)) << 24 | unsigned(__hisinf(a) == 1) << 25 | unsigned(__hisinf(a) == -1) << 26 |
            unsigned(float(__hisnan2(TYPE2(b, a)).y) == 1.0f) << 27 | unsigned(a ? 1 : 0) << 28;
  out[i] = answer;
}

extern "C" __global__ void from_float(const float *in, bits_t *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float f = in[i];
  TYPE made = f;
  out[0 * n + i] = as(__float2WORD_rn(f));
  out[1 * n + i] = as(__float2WORD_rz(f));
  out[2 * n + i] = as(__float2WORD_ru(f));
  out[3 * n + i] = as(__float2WORD_rd(f));
  out[4 * n + i] = as(__float2WORD(f));
  out[5 * n + i] = as(made);
  out[6 * n + i] = as(__float2WORD2_rn(f).y);
  out[7 * n + i] = as(__floats2WORD2_rn(1.0f, f).y);
  out[8 * n + i] = as(__float22WORD2_rn(make_float2(f, 1.0f)).x);
}

extern "C" __global__ void from_double(const double *in, bits_t *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = as(__double2WORD(in[i]));
  out[n + i] = as(TYPE(in[i]));
}

extern "C" __global__ void to_float(const bits_t *in, float *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in[i]);
  TYPE2 p(a, of(in[n - 1 - i]));
  out[0 * n + i] = __WORD2float(a);
  out[1 * n + i] = a;
  out[2 * n + i] = __low2float(p);
  out[3 * n + n - 1 - i] = __high2float(p);
  out[4 * n + i] = __WORD22float2(p).x;
}

#define MODES(K, T, NAME)                                                          \
  out[(4 * K + 0) * n + i] = (long long)__WORD2##NAME##_rn(a);                     \
  out[(4 * K + 1) * n + i] = (long long)__WORD2##NAME##_rz(a);                     \
  out[(4 * K + 2) * n + i] = (long long)__WORD2##NAME##_ru(a);                     \
  out[(4 * K + 3) * n + i] = (long long)__WORD2##NAME##_rd(a);                     \
  if ((T)a != __WORD2##NAME##_rz(a)) atomicAdd(wrong, 1u);
extern "C" __global__ void to_integer(const bits_t *in, long long *out, unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  TYPE a = of(in[i]);
  MODES(0, short, short) MODES(1, unsigned short, ushort) MODES(2, int, int) MODES(3, unsigned, uint)
  MODES(4, long long, ll) MODES(5, unsigned long long, ull)
  out[24 * n + i] = (signed char)a;
  out[25 * n + i] = (unsigned char)a;
}

#define ROUNDED(K, T, NAME)                                   \
  out[(4 * K + 0) * n + i] = as(__##NAME##2WORD_rn((T)v));    \
  out[(4 * K + 1) * n + i] = as(__##NAME##2WORD_rz((T)v));    \
  out[(4 * K + 2) * n + i] = as(__##NAME##2WORD_ru((T)v));    \
  out[(4 * K + 3) * n + i] = as(__##NAME##2WORD_rd((T)v));    \
  if (as(TYPE((T)v)) != as(__##NAME##2WORD_rn((T)v))) atomicAdd(wrong, 1u);
extern "C" __global__ void from_integer(const long long *in, bits_t *out, unsigned *wrong, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  long long v = in[i];
  ROUNDED(0, short, short) ROUNDED(1, unsigned short, ushort) ROUNDED(2, int, int) ROUNDED(3, unsigned, uint)
  ROUNDED(4, long long, ll) ROUNDED(5, unsigned long long, ull)
}

// One warp. Pairs taken apart and put together, shuffles, loads, atomics.
__device__ void put(bits_t *out, int &k, TYPE2 v) { out[k++] = as(v.x), out[k++] = as(v.y); }
extern "C" __global__ void pairs(const bits_t *in, bits_t *out, bits_t *lanes, TYPE *sum, TYPE2 *sum2) {
  TYPE2 p(of(in[0]), of(in[1])), q = make_WORD2(of(in[2]), of(in[3]));
  int lane = threadIdx.x, k = 0;
  if (lane == 0) {
    put(out, k, __WORD2WORD2(p.x)), put(out, k, __halves2WORD2(p.x, q.x)), put(out, k, __lows2WORD2(p, q));
    put(out, k, __highs2WORD2(p, q)), put(out, k, __low2WORD2(p)), put(out, k, __high2WORD2(p));
    put(out, k, __lowhigh2highlow(p)), put(out, k, TYPE2(__low2WORD(p), __high2WORD(p)));
    put(out, k, TYPE2(__short_as_WORD(__WORD_as_short(q.y)), __ldg(&((const TYPE *)in)[2])));
    put(out, k, __ldg((const TYPE2 *)in));
    TYPE2 r = p;
    put(out, k, r++), put(out, k, ++r), put(out, k, r--), put(out, k, --r);
    put(out, k, __hcmadd(p, q, p));
  }
  TYPE mine = of(in[lane]);
  lanes[lane] = as(__shfl_sync(0xFFFFFFFFu, mine, 5));
  lanes[32 + lane] = as(__shfl_up_sync(0xFFFFFFFFu, mine, 1));
  lanes[64 + lane] = as(__shfl_down_sync(0xFFFFFFFFu, mine, 2));
  lanes[96 + lane] = as(__shfl_xor_sync(0xFFFFFFFFu, mine, 7));
  TYPE2 both(mine, of(in[31 - lane]));
  lanes[128 + lane] = as(__shfl_xor_sync(0xFFFFFFFFu, both, 16).y);
  lanes[160 + lane] = as(__shfl_sync(0xFFFFFFFFu, both, 3, 8).x);
  atomicAdd(sum, TYPE(1.0f));
  atomicAdd(sum2, TYPE2(1.0f, 2.0f));
  __shared__ TYPE tile[64];
  tile[lane] = mine;
  __syncthreads();
  lanes[192 + lane] = as(tile[31 - lane]);
}
