// Of tests/test_engine_arithmetic.py.
template <typename To, typename From> __device__ To as_argument(To x) { return x; }
template <typename To, typename From> __device__ To returned(From x) { return x; }
template <typename To, typename From> __global__ void convert(To *out, const From *x, const To *zero) {
  int i = threadIdx.x, n = blockDim.x;
  out[i] = (To)x[i];
  out[n + i] = static_cast<To>(x[i]);
  out[2 * n + i] = x[i];
  To y = x[i] + 0;
  out[3 * n + i] = y;
  out[4 * n + i] = returned<To, From>(x[i]);
  out[5 * n + i] = as_argument<To, From>(x[i]);
  To z = zero[0];
  z += x[i];
  out[6 * n + i] = z;
}
#define AS(TO, x, i) ((TO)x[i])
extern "C" __global__ void to_int(int *out, const float *x, const double *y) {
  int i = threadIdx.x, n = blockDim.x;
  out[i] = AS(int, x, i), out[n + i] = AS(int, y, i);
}
extern "C" __global__ void to_uint(unsigned *out, const float *x, const double *y) {
  int i = threadIdx.x, n = blockDim.x;
  out[i] = AS(unsigned int, x, i), out[n + i] = AS(unsigned int, y, i);
}
extern "C" __global__ void one_by_one(int *out, unsigned *uns, const float *x, int some) {
  out[0] = (int)x[2] * 6 / 2, out[1] = (int)-x[0], out[2] = int(x[1] * 3), out[3] = -(int)x[0];
  out[4] = some > 1 ? (int)x[0] : (int)x[1], out[5] = (int)(float)(int)x[0] == (int)x[0];
  uns[0] = (unsigned)-5.0f * 1u + (unsigned)x[1], uns[1] = (unsigned int)x[0];
  int a = 5, b = 5;
  a *= x[0], b -= x[0];
  out[6] = a, out[7] = b;
  for (int k = x[2]; k < 12; k++) out[k] = x[2] * k;
}
