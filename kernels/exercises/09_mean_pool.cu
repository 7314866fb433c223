// Exercise 09: the end of MiniLM as one kernel: the mean of the rows of each sentence, scaled to
// length 1.
//
// Sentences are packed: sentence s has rows cu_seqlens[s] .. cu_seqlens[s + 1] - 1 of X. One
// without rows gives zeros. The division by the number of rows is not needed, because the scaling
// undoes it.
//
// Launch   grid sentences, block 128: thread t has columns t, t + 128, ...
// Shapes   X (tokens, WIDTH), out (sentences, WIDTH): float32; cu_seqlens (sentences + 1,): int32
// Limit    each element of X is read once; one barrier

#ifndef WIDTH
#define WIDTH 384
#endif

constexpr int COLUMNS = (WIDTH + 127) / 128;  // of a thread

extern "C" __global__ void __launch_bounds__(128) mean_pool(
    const float* __restrict__ X, const int* __restrict__ cu_seqlens, float* __restrict__ out) {
  __shared__ float of_warp[4];
  float sum[COLUMNS] = {}, total = 0.0f;
  // BEGIN hole: about 4 lines - sum[i]: column threadIdx.x + 128 * i, over the rows of this sentence
  for (int row = cu_seqlens[blockIdx.x]; row < cu_seqlens[blockIdx.x + 1]; ++row)
    for (int i = 0; i < COLUMNS; ++i)
      if (threadIdx.x + 128 * i < WIDTH) sum[i] += X[(size_t)row * WIDTH + threadIdx.x + 128 * i];
  // END hole
  float squares = 0.0f;
  for (int i = 0; i < COLUMNS; ++i) squares += sum[i] * sum[i];
  // BEGIN hole: about 4 lines - total: squares of all threads, by shuffles in a warp, then of_warp
  // DEFAULT: of_warp[threadIdx.x / 32] = squares;
  // DEFAULT: total = of_warp[0];
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffff, squares, mask);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  total = of_warp[0] + of_warp[1] + of_warp[2] + of_warp[3];
  // END hole
  const float factor = total > 0.0f ? 1.0f / sqrtf(total) : 0.0f;
  for (int i = 0; i < COLUMNS; ++i) {
    const int c = threadIdx.x + 128 * i;
    if (c < WIDTH) out[(size_t)blockIdx.x * WIDTH + c] = factor * sum[i];
  }
}
