// Exercise 08: the order of dQ. Several blocks add their fragments of 16 x 8 floats to accum, and a
// last kernel makes rows of it. This version is right, but accum is in the order of rows: the lanes
// of a request have eight rows.
//
// Launch   add: grid (N / 16, blocks), rows_of: grid N / 16; block 32. accum is 0 before
// Shapes   shares (blocks, N, 64), accum (64 N,), dQ (N, 64): float32; N a multiple of 16
// Limit    each addition of a warp touches 4 sectors of accum

constexpr int d = 64, FRAGMENTS = d / 8;  // of 16 rows and all columns

// Where 16 rows have element i of this lane in fragment f: the layout of mma.sync's accumulators.
__device__ __forceinline__ int element(int f, int i) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  return (g + i / 2 * 8) * d + 8 * f + 2 * t + i % 2;
}

// Where accum has the same element.
__device__ __forceinline__ int place(int f, int i) {
  // BEGIN hole: about 1 line - one place for each f, i and lane; neighbours for neighbouring lanes
  // DEFAULT: return element(f, i);
  return 128 * f + 32 * i + threadIdx.x;
  // END hole
}

extern "C" __global__ void __launch_bounds__(32)
    add(const float* __restrict__ shares, float* __restrict__ accum, int N) {
  const int first = 16 * d * blockIdx.x;
  shares += blockIdx.y * N * d;
  for (int f = 0; f < FRAGMENTS; ++f)
    for (int i = 0; i < 4; ++i)
      atomicAdd(&accum[first + place(f, i)], shares[first + element(f, i)]);
}

extern "C" __global__ void __launch_bounds__(32)
    rows_of(const float* __restrict__ accum, float* __restrict__ dQ) {
  const int first = 16 * d * blockIdx.x;
  for (int f = 0; f < FRAGMENTS; ++f)
    for (int i = 0; i < 4; ++i) {
      // BEGIN hole: about 1 line - from the order of accum to rows
      // DEFAULT: dQ[first + element(f, i)] = accum[first + element(f, i)];
      dQ[first + element(f, i)] = accum[first + place(f, i)];
      // END hole
    }
}
