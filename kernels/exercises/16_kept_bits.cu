// Exercise 16: where the bits go. A tensor core adds products of e4m3. How many bits of a sum does
// it keep?
//
// sum(a, b) returns 1 * 1 + a * b, as the tensor core adds it; the grader also passes other adders.
// Both factors are rounded to e4m3, whose powers of two are 2^-9 to 2^8. So 2^-j is no e4m3 for
// most j: make it of two factors. j is at most 18.
//
// Launch   grid 1, block 128: all of a warpgroup call sum together, and get the same number
// Shapes   answers (2,): int32
// Limit    24 products
#include "fp8.cuh"

// The largest j for which 1 + 2^-j does not come out as 1; 0 if there is none.
template <typename Sum>
__device__ int bits_kept(Sum sum) {
  // BEGIN hole: about 3 lines - ask for smaller and smaller 2^-j; exp2f(x) is 2^x
  // DEFAULT: return 0;
  int j = 0;
  while (j < 18 && sum(exp2f(-(j + 1) / 2), exp2f(-(j + 2) / 2)) != 1.0f) ++j;
  return j;
  // END hole
}

// Whether what is below the last kept bit is cut off; false if it is rounded to the nearest.
template <typename Sum>
__device__ bool truncates(Sum sum, int bits) {
  // BEGIN hole: about 1 line - ask for more than half of the last kept bit, 2^-bits
  // DEFAULT: return false;
  return sum(1.75f * exp2f(-(bits + 1) / 2), exp2f(-(bits + 2) / 2)) == 1.0f;
  // END hole
}

// One wgmma: each row of A is 1 a 0 0 ..., each row of B^T is 1 b 0 0 ..., so all of D is 1 + a b.
struct TensorCore {
  unsigned char* B_smem;  // 16 rows of 32 elements

  __device__ float operator()(float a, float b) const {
    const int row = threadIdx.x / 8, word = threadIdx.x % 8, first = 4 * (row / 4 % 2);  // swizzle
    __syncthreads();  // hazard: other warps' product may still read B
    reinterpret_cast<unsigned*>(B_smem)[threadIdx.x] = word == first ? pack_e4m3(1, b, 0, 0) : 0;
    async_proxy_fence();
    __syncthreads();  // hazard: others' words of B are not there yet
    const unsigned pair = threadIdx.x % 4 == 0 ? pack_e4m3(1, a, 0, 0) : 0;
    const unsigned A[4] = {pair, pair, 0, 0};
    float d[8] = {};
    wgmma_registers(d);
    wgmma_fence();
    wgmma_rs(e4m3(), d, A, wgmma_descriptor_of_rows<32>(smem_address(B_smem)), false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_registers(d);
    return d[0];
  }
};

extern "C" __global__ void __launch_bounds__(128) probe(int* answers) {
  __shared__ __align__(1024) unsigned char B_smem[16 * 32];
  const TensorCore sum{B_smem};
  const int bits = bits_kept(sum);
  const bool cut = truncates(sum, bits);
  if (threadIdx.x == 0) {
    answers[0] = bits;
    answers[1] = cut;
  }
}
