// Of tests/test_engine_arithmetic.py.
#define TIMES_POWER(x, n) ((x) << (n))
template <typename T> struct Pair { T a, b; };
template <typename T> struct Of { typedef T type; };
template <typename T, typename C>
__global__ void shifts(T *left, T *right, T *updated, T *macro, const T *x, const C *n) {
  int i = threadIdx.x;
  typename Of<Pair<Pair<T>>>::type nested;  // two lists of a template end here, and nothing is shifted
  nested.a.a = x[i] << n[i];
  left[i] = nested.a.a;
  right[i] = x[i] >> n[i];
  T twice[2] = {x[i], x[i]};
  twice[0] <<= n[i];
  twice[1] >>= n[i];
  updated[2 * i] = twice[0];
  updated[2 * i + 1] = twice[1];
  macro[i] = TIMES_POWER(x[i], n[i]) + (1 << 3 >> 1 << 1) - 8;  // from left to right
}
extern "C" __global__ void masks(unsigned *out, const int *n) {
  int i = threadIdx.x;
  out[i] = (1u << n[i]) - 1 & 0xffffffffu >> 0;
}
#if (1 << 4) == 16 && 256 >> 4 == 16
#define BITS (1 << 4)
#endif
static_assert(BITS == 16 && sizeof(char[1 << 3]) == 8, "constants stay constants");
