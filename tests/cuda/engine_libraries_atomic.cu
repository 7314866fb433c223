// Of tests/test_engine_libraries.py.
#include <cuda/atomic>
__device__ cuda::atomic<int, cuda::thread_scope_device> counter;
extern "C" __global__ void kernel(int* ints, float* f, double* d, unsigned long long* wide, int* order) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  cuda::atomic_ref<int, cuda::thread_scope_device> sum(ints[0]), most(ints[1]), bits(ints[2]), last(ints[3]);
  sum.fetch_add(t, cuda::memory_order_relaxed);
  most.fetch_max(t * 7 % 256);
  bits.fetch_or(1 << t % 20);
  int seen = last.load(cuda::memory_order_acquire);
  while (!last.compare_exchange_weak(seen, seen > t ? seen : t)) {}
  cuda::atomic_ref<float> single(*f);
  single.fetch_add(0.5f);
  cuda::atomic_ref<double, cuda::thread_scope_system> twice(*d);
  twice += 0.25;
  cuda::atomic_ref<unsigned long long> word(*wide);
  word.fetch_add(1ull << 32 | 1);
  order[t] = counter.fetch_add(1, cuda::memory_order_acq_rel);
  cuda::atomic_thread_fence(cuda::memory_order_seq_cst, cuda::thread_scope_device);
}
