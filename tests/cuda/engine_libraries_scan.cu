// Of tests/test_engine_libraries.py.
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>
#include <cuda/functional>
extern "C" __global__ void kernel(const int* x, int* out, const float* f, float* floats) {
  int t = threadIdx.x, before, total, running, lanes;
  typedef cub::BlockScan<int, 128> Scan;
  __shared__ typename Scan::TempStorage storage;
  Scan(storage).ExclusiveSum(x[t], before, total);
  __syncthreads();
  Scan(storage).InclusiveScan(x[t], running, cuda::maximum<>{});
  typedef cub::WarpScan<int> Lanes;
  __shared__ typename Lanes::TempStorage small[4];
  Lanes(small[t / 32]).InclusiveSum(x[t], lanes);
  out[t] = before; out[128 + t] = total; out[256 + t] = running; out[384 + t] = lanes;
  typedef cub::BlockScan<float, 128, cub::BLOCK_SCAN_WARP_SCANS> Floats;
  __shared__ typename Floats::TempStorage other;
  Floats(other).InclusiveSum(f[t], floats[t]);
}
