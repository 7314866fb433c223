// Of tests/test_engine_refusals.py.
#ifndef __CUDACC_RTC__  // the host's part of a file for two compilers
#include <iostream>
int host_variable = 3;
int main() { return 0; }
#endif
#define DEVICE __device__ __forceinline__
template <int N = (1 << 2)> DEVICE int from_macro(int x) { return x + N; }
namespace outer { namespace inner {
struct __align__(8) Pair {
  int a = 1, b;
  Pair() = default;
  DEVICE Pair(int x) : a(x), b{x} {}
  __device__ __host__ int sum() const { return a + b; }
  __device__ operator int() const { return sum(); }
  DEVICE int operator()(int x) const { return a * x; }
 private:
  __device__ static int hidden() { return 3; }
};
enum class Color : int { red, green };
union Word { int i; float f; };
}}
__device__ int declared(int x);
int declared(int x) { return x + 1; }
__constant__ int table[2] = {1, 2};
__constant__ float scale = 2.5f;
__device__ int counter;
const int size = 4;
constexpr int more[2] = {5, 6};
static __device__ int hidden_counter = 7;
typedef struct __align__(16) { float x[4]; } Four;
struct Scaled { float scale; };
extern "C" __global__ void __launch_bounds__(64, 2) k(int *o) {
  __shared__ int a[size], b;
  extern __shared__ int dynamic[];
  __shared__ union { int i; float f; } either;
  __shared__ float odd[size == 4 ? 2 : 3];
  Scaled scaled;
  scaled.scale = 2.0f;
  if (threadIdx.x == 0) either.i = 0, odd[1] = scaled.scale;
  const outer::inner::Pair pair(2);
  auto twice = [](int x) { return 2 * x; };
  auto once = [&](int x) -> int { return x + pair.a; };
  int local[2] = {more[0], (int)scale};
  if (threadIdx.x == 0) b = 1, a[0] = table[0], counter = hidden_counter;
  __syncthreads();
  int table_of_mine = 3, scale = 4;
  scale = 5;
  bool same = b == 1 && table[1] == 2;
  o[0] = pair + pair(2) + twice(1) + once(2) + from_macro(1) + declared(1) + a[0] + local[0] + local[1] + counter + b;
  o[1] = table_of_mine + scale + same + sizeof(Four) + (int)outer::inner::Color::green;
}
