// Of tests/test_engine_libraries.py.
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>
extern "C" __global__ void kernel(int* keys, int* values, const float* f, float* down, unsigned* counts) {
  typedef cub::BlockLoad<int, 128, 4, cub::BLOCK_LOAD_TRANSPOSE> Load;
  typedef cub::BlockStore<int, 128, 4, cub::BLOCK_STORE_WARP_TRANSPOSE> Store;
  typedef cub::BlockRadixSort<int, 128, 4, int> Sort;
  __shared__ union {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
    typename Sort::TempStorage sort;
  } storage;
  int key[4], value[4];
  Load(storage.load).Load(keys, key);
  __syncthreads();
  Load(storage.load).Load(values, value);
  __syncthreads();
  Sort(storage.sort).Sort(key, value);
  __syncthreads();
  Store(storage.store).Store(keys, key);
  __syncthreads();
  Store(storage.store).Store(values, value);

  typedef cub::BlockRadixSort<float, 128, 1> Floats;
  __shared__ typename Floats::TempStorage floats;
  float one[1] = {f[threadIdx.x]};
  Floats(floats).SortDescending(one);
  down[threadIdx.x] = one[0];

  typedef cub::BlockHistogram<int, 128, 4, 16> Histogram;
  __shared__ typename Histogram::TempStorage histogram;
  __shared__ unsigned bins[16];
  int digit[4];
  for (int i = 0; i < 4; ++i) digit[i] = key[i] & 15;
  Histogram(histogram).Histogram(digit, bins);
  __syncthreads();
  if (threadIdx.x < 16) counts[threadIdx.x] = bins[threadIdx.x];
}
