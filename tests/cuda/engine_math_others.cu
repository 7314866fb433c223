// Of tests/test_engine_math.py.
extern "C" __global__ void mixed(double *out) {
  int k = 0;
  float s, c;
  out[k++] = max(3, 5), out[k++] = max(-3, 5u), out[k++] = min(2.5f, 2.0f), out[k++] = max(1ll << 40, 7ll);
  out[k++] = min(1.5, 1.25f), out[k++] = max(true, false), out[k++] = umax(3000000000u, 1u);
  out[k++] = min((unsigned char)200, (unsigned char)100), out[k++] = llmin(-1ll << 40, 0);
  sincosf(0.5f, &s, &c), out[k++] = s, out[k++] = c;
  __sincosf(0.25f, &s, &c), out[k++] = s, out[k++] = c;
  sincospif(0.25f, &s, &c), out[k++] = s, out[k++] = c;
  out[k++] = fmaf(2, 3, 4), out[k++] = __fmaf_rn(2, 3, 4), out[k++] = __fdividef(7, 2), out[k++] = __powf(2, 0.5f);
  out[k++] = norm3df(1, 2, 2), out[k++] = rnorm3df(1, 2, 2);
  out[k++] = norm4df(1, 1, 1, 1), out[k++] = rnorm4d(1, 1, 1, 1);
  float v[4] = {1, 2, 3, 4};
  out[k++] = normf(4, v), out[k++] = __saturatef(1.5f), out[k++] = __saturatef(-1), out[k++] = __saturatef(nanf(""));
  out[k++] = ldexpf(1.5f, 4), out[k++] = ilogbf(10);
  out[k++] = isnan(nanf("")) + 2 * isinf(__int_as_float(0x7f800000)) + 4 * isfinite(1.0f);
  int e;
  out[k++] = frexpf(10, &e), out[k++] = e, out[k++] = modff(2.75f, &s), out[k++] = s, out[k++] = signbit(-0.0f) != 0;
  out[k++] = llrintf(2.5f), out[k++] = lroundf(2.5f), out[k++] = nextafterf(1, 2);
  out[k++] = abs(-3.5f), out[k++] = abs(-4);
  out[k++] = __fadd_rn(0.1f, 0.2f), out[k++] = __fmul_rn(0.1f, 0.3f);
  out[k++] = __frcp_rn(3), out[k++] = __fdiv_rn(1, 3);
  // 1 - x * x rounded twice: a fused operation would give another number
  float x = 1.0f + (float)out[0] * 1e-4f;
  out[k++] = __fsub_rn(1.0f, __fmul_rn(x, x));
}

template <typename T>
__device__ void put(int *out, int &k) { out[k++] = sizeof(T), out[k++] = alignof(T); }
extern "C" __global__ void vector_sizes(int *out) {
  int k = 0;
#define PUT(T) put<T##1>(out, k), put<T##2>(out, k), put<T##3>(out, k), put<T##4>(out, k);
  PUT(char) PUT(uchar) PUT(short) PUT(ushort) PUT(int) PUT(uint) PUT(long) PUT(ulong) PUT(longlong) PUT(ulonglong)
  PUT(float) PUT(double)
  put<dim3>(out, k);
}
extern "C" __global__ void vectors(const float4 *in, float4 *out, float2 *pairs, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float4 v = __ldg(&in[i]);
  const float *row = reinterpret_cast<const float *>(&v);
  float3 three = make_float3(v.x, v.y, v.z);
  int2 whole = make_int2((int)v.x, (int)row[3]);
  out[i] = make_float4(three.z, three.y, three.x, v.w + whole.x * 0);
  pairs[i] = float2{v.x + v.y, (float)whole.y};
  __stcs(&reinterpret_cast<float2 *>(pairs)[i], pairs[i]);
}

extern "C" __global__ void bits(const unsigned *in, unsigned *out, int n) {
  int i = threadIdx.x, k = 0;
  unsigned a = in[i], b = in[n + i];
  unsigned long long both = (unsigned long long)a << 32 | b;
#define OUT(value) out[k++ * n + i] = (unsigned)(value)
  OUT(__popc(a)); OUT(__popcll(both)); OUT(__clz(a)); OUT(__clzll(both)); OUT(__ffs(a)); OUT(__ffsll(both));
  OUT(__brev(a)); OUT(__brevll(both)); OUT(__brevll(both) >> 32);
  OUT(__byte_perm(a, b, 0x7250)); OUT(__byte_perm(a, b, b));
  OUT(__funnelshift_l(a, b, b)); OUT(__funnelshift_r(a, b, b)); OUT(__funnelshift_lc(a, b, 32 + b % 2));
  OUT(__funnelshift_rc(a, b, 31 + b % 2)); OUT(__mulhi((int)a, (int)b)); OUT(__umulhi(a, b)); OUT(__mul24(a, b));
  OUT(__umul24(a, b)); OUT(__dp4a((int)a, (int)b, 5)); OUT(__dp4a(a, b, 5u)); OUT(__sad((int)a, (int)b, 7u));
  OUT(__usad(a, b, 7u)); OUT(__hadd((int)a, (int)b)); OUT(__rhadd((int)a, (int)b)); OUT(__uhadd(a, b));
  OUT(__umul64hi(both, both) >> 32); OUT(__mul64hi((long long)both, -3)); OUT(__float_as_uint(__uint_as_float(a)));
  OUT(__double2hiint(__hiloint2double((int)a, (int)b))); OUT(__double2loint(__hiloint2double((int)a, (int)b)));
  OUT(__fns(a, b % 32, 2)); OUT(__fns(a, b % 32, -1)); OUT(__float_as_int(__int_as_float((int)b)));
  OUT(__longlong_as_double(__double_as_longlong(1.5)) == 1.5);
}
