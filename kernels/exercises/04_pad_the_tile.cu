// Exercise 04: rows of float4 in shared memory without bank conflicts. Each of 32 lanes reads a row
// of its own.
//
// The dot products are right already, but all lanes of a wavefront hit the same four banks.
// Limit    no bank conflicts at HEAD_DIM = 64 and 20, and at most one float4 of padding per row
// Shapes   q (HEAD_DIM); K (N_kv, HEAD_DIM); s (N_kv), the scores of one query, not scaled;
//          HEAD_DIM a multiple of 4

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
constexpr int BLOCK_N = 32;  // keys per block, and threads: one per key
constexpr int D4 = HEAD_DIM / 4;

// BEGIN hole: about 2 lines - float4 from one row to the next, and the place of float4 c of row j
// DEFAULT: constexpr int PITCH = D4;
// DEFAULT: __device__ __forceinline__ int place(int j, int c) { return j * PITCH + c; }
constexpr int PITCH = D4 | 1;
__device__ __forceinline__ int place(int j, int c) { return j * PITCH + c; }
// END hole

extern "C" __global__ void __launch_bounds__(BLOCK_N) scores_of_a_query(
    const float* __restrict__ q, const float* __restrict__ K, float* __restrict__ s, int N_kv) {
  __shared__ float4 K_smem[BLOCK_N * PITCH];
  const int first = blockIdx.x * BLOCK_N;
  for (int e = threadIdx.x; e < BLOCK_N * D4; e += BLOCK_N) {
    const int j = e / D4, c = e % D4;
    const float4* row = reinterpret_cast<const float4*>(K + (size_t)(first + j) * HEAD_DIM);
    K_smem[place(j, c)] = first + j < N_kv ? row[c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncthreads();  // hazard: a row is read before the other threads have written their parts of it

  float sum = 0.0f;
  for (int c = 0; c < D4; ++c) {
    const float4 k = K_smem[place(threadIdx.x, c)], a = reinterpret_cast<const float4*>(q)[c];
    sum += a.x * k.x + a.y * k.y + a.z * k.z + a.w * k.w;
  }
  if (first + threadIdx.x < N_kv) s[first + threadIdx.x] = sum;
}
