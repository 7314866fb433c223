// Exercise 02: four lanes share a row. A block copies 32 rows of Q to shared memory; lane 4 r +
// part of a warp then adds up the squares of every fourth word of its row r, from word `part` on.
// The result is right; the reads have bank conflicts. Choose another layout of the tile: a stride,
// or another place for each word.
//
// Launch   grid ceil(N / ROWS), block 4 ROWS = 128: a warp has 8 rows
// Shapes   Q (N, HEAD_DIM); PART (N, 4), whose rows add up to |q_i|^2; float32, row-major
// Limit    no bank conflict, with at most 9,000 bytes of shared memory for HEAD_DIM = 64

#ifndef HEAD_DIM
#define HEAD_DIM 64  // a multiple of 32
#endif
#define ROWS 32
// BEGIN hole: about 1 line - the distance in words between rows of the tile
// DEFAULT: constexpr int STRIDE = HEAD_DIM | 1;
constexpr int STRIDE = HEAD_DIM + 4;
// END hole

// The index in the tile of word c of row r. It may change too: any permutation of a row is right.
__device__ int place(int r, int c) { return r * STRIDE + c; }

extern "C" __global__ void __launch_bounds__(4 * ROWS)
    squares(const float* __restrict__ Q, float* __restrict__ PART, int N) {
  __shared__ float tile[ROWS * STRIDE];
  const int first = blockIdx.x * ROWS;
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += 4 * ROWS) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[place(r, c)] = first + r < N ? Q[(size_t)(first + r) * HEAD_DIM + c] : 0.0f;
  }
  __syncthreads();  // hazard: a row is read before the other threads have written it

  const int r = threadIdx.x / 4, part = threadIdx.x % 4;
  float sum = 0.0f;
  for (int c = part; c < HEAD_DIM; c += 4) {
    const float x = tile[place(r, c)];
    sum += x * x;
  }
  if (first + r < N) PART[(size_t)(first + r) * 4 + part] = sum;
}
