// Of tests/test_engine_libraries.py.
#include <cuda/std/array>
#include <cuda/std/bit>
#include <cuda/std/complex>
#include <cuda/std/functional>
#include <cuda/std/limits>
#include <cuda/std/span>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#include <cuda/cmath>
template <typename T, cuda::std::enable_if_t<cuda::std::is_integral_v<T>, int> = 0>
__device__ T twice(T x) { return 2 * x; }
extern "C" __global__ void kernel(int* out, float* floats) {
  cuda::std::array<int, 3> a{1, 2, 3};
  cuda::std::span<int> all(out, 8);
  auto [x, y] = cuda::std::make_tuple(5, 2.5f);
  cuda::std::complex<float> z(1.0f, 2.0f);
  z *= z;
  all[0] = a[0] + a[2];
  all[1] = twice(x);
  all[2] = cuda::std::popcount(0xF0F0u);
  all[3] = cuda::std::numeric_limits<short>::max();
  all[4] = cuda::ceil_div(17, 5);
  all[5] = cuda::std::countl_zero(1u);
  all[6] = cuda::std::bit_cast<int>(1.0f);
  all[7] = cuda::std::plus<int>{}(3, 4);
  floats[0] = y, floats[1] = z.real(), floats[2] = z.imag(), floats[3] = abs(z);
}
