// Exercise 15: S = Q K^T with the accuracy of float32, by TF32 products. A warp has 16 rows and 8
// keys.
//
// A tensor core ignores the last 13 of a float's 32 bits. So each element is split in two: hi, the
// nearest number whose last 13 bits are 0, and lo, the rest.
//
// Launch   grid (ceil(N / 16), ceil(N_kv / 8)), block 32
// Shapes   Q (N, 64), K (N_kv, 64), S (N, N_kv): float32, row-major
// Limit    three TF32 products for each 8 columns of Q and K

// D += A B on the tensor cores, 16 x 8 x 8. Lane 4 g + t holds
//   A: a[0] = (g, t)   a[1] = (g+8, t)   a[2] = (g, t+4)   a[3] = (g+8, t+4)
//   B: b[0] = (t, g)   b[1] = (t+4, g)
//   D: d[0] = (g, 2t)  d[1] = (g, 2t+1)  d[2] = (g+8, 2t)  d[3] = (g+8, 2t+1)
__device__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// hi and lo as bits: __float_as_uint(x) has those of a float, __uint_as_float(bits) is the float
// that has them.
__device__ void split(float x, unsigned& hi, unsigned& lo) {
  // BEGIN hole: about 1 line - hi: x to the nearest number whose last 13 bits are 0
  // DEFAULT: hi = __float_as_uint(x);
  hi = (__float_as_uint(x) + 0x1000) & 0xffffe000;
  // END hole
  // BEGIN hole: about 1 line - lo: what is left of x
  // DEFAULT: lo = 0;
  lo = __float_as_uint(x - __uint_as_float(hi));
  // END hole
}

extern "C" __global__ void __launch_bounds__(32) scores(
    const float* __restrict__ Q, const float* __restrict__ K, float* __restrict__ S, int N,
    int N_kv) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int row = blockIdx.x * 16 + g, key = blockIdx.y * 8 + g;
  float d[4] = {};
  for (int first = 0; first < 64; first += 8) {
    unsigned a_hi[4], a_lo[4], b_hi[2], b_lo[2];
    for (int i = 0; i < 4; ++i) {
      const int r = row + i % 2 * 8, column = first + t + i / 2 * 4;
      split(r < N ? Q[r * 64 + column] : 0.0f, a_hi[i], a_lo[i]);
    }
    for (int i = 0; i < 2; ++i)
      split(key < N_kv ? K[key * 64 + first + t + 4 * i] : 0.0f, b_hi[i], b_lo[i]);
    // BEGIN hole: about 3 lines - add three products to d, the small ones first
    // DEFAULT: mma(d, a_hi, b_hi);
    mma(d, a_lo, b_hi);
    mma(d, a_hi, b_lo);
    mma(d, a_hi, b_hi);
    // END hole
  }
  for (int e = 0; e < 4; ++e) {
    const int r = row + e / 2 * 8, k = blockIdx.y * 8 + 2 * t + e % 2;
    if (r < N && k < N_kv) S[r * N_kv + k] = d[e];
  }
}
