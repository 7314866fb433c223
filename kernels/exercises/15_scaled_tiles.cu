// Exercise 15b: S = Q K^T with the accuracy of float32, by products of fp16. A warp has a tile of
// 16 rows of Q and one of 8 keys.
//
// fp16 has as many significant bits as TF32, but ends at 65,504, and its smallest step is 2^-24. So
// a tile is multiplied by 2^exponent, which brings its largest |x| to 2^14 or above, below 2^15.
//
// Launch   grid (ceil(N / 16), ceil(N_kv / 8)), block 32
// Shapes   Q (N, 64), K (N_kv, 64), S (N, N_kv): float32, row-major
// Limit    three fp16 products for each 16 columns of Q and K
#include "half2.cuh"
#include "ptx.cuh"

__device__ float power_of_two(int exponent) {  // -126 .. 127
  return __int_as_float((exponent + 127) << 23);
}

// The exponent of a tile whose largest |x| is `largest`. Bits 23 to 30 of a float of size 2^e to
// 2^(e+1) are e + 127.
__device__ int tile_exponent(float largest) {
  int exponent = 0;
  // BEGIN hole: about 1 line - largest * 2^exponent is at least 2^14 and below 2^15
  exponent = 14 + 127 - (int)(__float_as_uint(largest) >> 23);
  // END hole
  return min(exponent, 126);  // less for tiles of zeros alone, as 2^exponent is a float
}

// Two neighbours, multiplied by `scale`, are hi + lo.
__device__ void split(const float (&x)[2], float scale, unsigned& hi, unsigned& lo) {
  hi = pack(__half(), x[0] * scale, x[1] * scale);
  const float2 rounded = unpack(__half(), hi);
  lo = pack(__half(), x[0] * scale - rounded.x, x[1] * scale - rounded.y);
}

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, mask));
  return x;
}

extern "C" __global__ void __launch_bounds__(32) scores(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ S, int N,
    int N_kv) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int row = blockIdx.x * 16 + g, key = blockIdx.y * 8 + g;
  float q[4][4][2], k[4][2][2];  // this lane's pairs, for 16 columns at a time: ptx.cuh lists them
  float q_largest = 0.0f, k_largest = 0.0f;
  for (int n = 0; n < 4; ++n)
    for (int e = 0; e < 2; ++e) {
      for (int i = 0; i < 4; ++i) {
        const int r = row + i % 2 * 8, column = 16 * n + 2 * t + i / 2 * 8 + e;
        q[n][i][e] = r < N ? Q[r * 64 + column] : 0.0f;
        q_largest = fmaxf(q_largest, fabsf(q[n][i][e]));
      }
      for (int i = 0; i < 2; ++i) {
        k[n][i][e] = key < N_kv ? K[key * 64 + 16 * n + 2 * t + i * 8 + e] : 0.0f;
        k_largest = fmaxf(k_largest, fabsf(k[n][i][e]));
      }
    }
  const int q_exponent = tile_exponent(warp_max(q_largest));
  const int k_exponent = tile_exponent(warp_max(k_largest));

  float d[4] = {};
  for (int n = 0; n < 4; ++n) {
    unsigned a_hi[4], a_lo[4], b_hi[2], b_lo[2];
    for (int i = 0; i < 4; ++i) split(q[n][i], power_of_two(q_exponent), a_hi[i], a_lo[i]);
    for (int i = 0; i < 2; ++i) split(k[n][i], power_of_two(k_exponent), b_hi[i], b_lo[i]);
    // BEGIN hole: about 3 lines - of hi hi, hi lo, lo hi and lo lo three, the small ones first
    // DEFAULT: mma_m16n8k16(__half(), d, a_hi, b_hi[0], b_hi[1]);
    mma_m16n8k16(__half(), d, a_lo, b_hi[0], b_hi[1]);
    mma_m16n8k16(__half(), d, a_hi, b_lo[0], b_lo[1]);
    mma_m16n8k16(__half(), d, a_hi, b_hi[0], b_hi[1]);
    // END hole
  }
  for (int e = 0; e < 4; ++e) {
    const int r = row + e / 2 * 8, c = blockIdx.y * 8 + 2 * t + e % 2;
    float s = d[e];
    // BEGIN hole: about 1 line - both tiles' scales are still in s
    s *= power_of_two(-q_exponent) * power_of_two(-k_exponent);
    // END hole
    if (r < N && c < N_kv) S[r * N_kv + c] = s;
  }
}
