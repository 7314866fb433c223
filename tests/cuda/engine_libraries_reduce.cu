// Of tests/test_engine_libraries.py.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cuda/functional>
extern "C" __global__ void kernel(const int* x, int* out, const double* d, double* sums) {
  int t = threadIdx.x;
  {
    typedef cub::BlockReduce<int, 128> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    int sum = Reduce(storage).Sum(x[t]);
    __syncthreads();
    int most = Reduce(storage).Reduce(x[t], cuda::maximum<>{});
    __syncthreads();
    int part = Reduce(storage).Sum(x[t], 77);
    if (t == 0) out[0] = sum, out[1] = most, out[2] = part;
  }
  {
    typedef cub::BlockReduce<int, 128, cub::BLOCK_REDUCE_RAKING> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    int least = Reduce(storage).Reduce(x[t], cuda::minimum<>{});
    if (t == 0) out[3] = least;
  }
  {
    typedef cub::BlockReduce<double, 128, cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    double sum = Reduce(storage).Sum(d[t]);
    if (t == 0) sums[0] = sum;
  }
  {
    typedef cub::WarpReduce<int> Reduce;
    __shared__ typename Reduce::TempStorage storage[4];
    int sum = Reduce(storage[t / 32]).Sum(x[t]);
    if (t % 32 == 0) out[4 + t / 32] = sum;
  }
  {
    typedef cub::WarpReduce<double, 8> Reduce;
    __shared__ typename Reduce::TempStorage storage[16];
    double most = Reduce(storage[t / 8]).Reduce(d[t], [](double a, double b) { return a < b ? b : a; });
    if (t % 8 == 0) sums[1 + t / 8] = most;
  }
}
