// Of tests/test_engine_messages.py.
typedef unsigned long long int uint64_t;
using int64_t = long long;
typedef unsigned int uint32_t;  // uint64_t of 8 bytes
static __device__ __forceinline__ unsigned long long __globaltimer() { return 7; }
__device__ uint64_t twice(uint64_t a) { return 2 * a; }
__device__ int total(std::initializer_list<int> all) {
  int sum = 0;
  for (int one : all) sum += one;
  return sum;
}
struct Pair {
  int first, second;
  __device__ Pair(int a, int b) : first(a), second(b) {}
};
extern "C" __global__ void k(uint64_t *a, int64_t *b, uint32_t c) {
  atomicAdd(&a[0], (uint64_t)1 << 40);
  a[1] = twice(a[1]);
  a[2] = std::move(b[0]) + c;
  a[3] = __globaltimer();
  b[0] = sizeof(uint64_t) + total({1, 2, 3});
  __shared__ alignas(8) unsigned char room[sizeof(Pair)];
  Pair *pair = new (room) Pair(-5, 2);
  b[1] = (int64_t)pair->first / pair->second;
}
