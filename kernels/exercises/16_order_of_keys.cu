// Exercise 16: O = P V for 64 rows and 32 keys, with P in registers. Which key takes which place?
//
// Of P, thread 4 g + t of a warp holds what the accumulators of Q K^T left there:
//   p[4 j + e]: row g + 8 (e / 2), key 8 j + 2 t + e % 2
// Of the left operand of P V, it supplies four bytes a register, for neighbouring places:
//   a[0]: row g, places 4 t to 4 t + 3    a[2]: row g, places 16 + 4 t to 16 + 4 t + 3
//   a[1], a[3]: the same places of row g + 8
// The product adds over 32 places. A key may take any of them, if V^T has the same order.
//
// Launch   grid 1, block 128
// Shapes   P (N, N_kv): float32; V (N_kv, 16): e4m3; O (N, 16): float32; N <= 64, N_kv <= 32
// Limit    no shuffles; P in no shared memory
#include "fp8.cuh"

// The four floats of p that become a[i], the first in the lowest byte: pack_e4m3(first, ..., last).
__device__ unsigned operand(const float (&p)[16], int i) {
  // BEGIN hole: about 2 lines - four of this thread's numbers, all of the row of a[i]
  // DEFAULT: return pack_e4m3(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  const float* const of_row = p + i / 2 * 8 + i % 2 * 2;
  return pack_e4m3(of_row[0], of_row[1], of_row[4], of_row[5]);
  // END hole
}

// The key, 0 to 31, that takes this place, 0 to 31.
__device__ int key_at(int place) {
  // BEGIN hole: about 2 lines - which thread t supplies it, and which key that number belongs to
  // DEFAULT: return place;
  const int t = place % 16 / 4, number = place % 4;
  return place / 16 * 16 + 2 * t + number % 2 + number / 2 * 8;
  // END hole
}

extern "C" __global__ void __launch_bounds__(128)
    one_tile(const float* P, const unsigned char* V, float* O, int N, int N_kv) {
  __shared__ __align__(1024) unsigned char VT_smem[16 * 32];  // 16 rows of 32 places
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16 + g;
  for (int i = threadIdx.x; i < 16 * 32; i += 128) {
    const int column = i / 32, place = i % 32, key = key_at(place);
    const int chunk = place / 16 ^ column / 4 % 2;  // swizzle
    VT_smem[column * 32 + chunk * 16 + place % 16] = key < N_kv ? V[key * 16 + column] : 0;
  }
  async_proxy_fence();
  __syncthreads();  // hazard: others' bytes of V^T are not there yet

  float p[16], d[8] = {};
  for (int i = 0; i < 16; ++i) {
    const int r = row + i / 2 % 2 * 8, key = i / 4 * 8 + 2 * t + i % 2;
    p[i] = r < N && key < N_kv ? P[r * N_kv + key] : 0.0f;
  }
  const unsigned a[4] = {operand(p, 0), operand(p, 1), operand(p, 2), operand(p, 3)};
  wgmma_registers(d);
  wgmma_fence();
  wgmma_rs(e4m3(), d, a, wgmma_descriptor_of_rows<32>(smem_address(VT_smem)), false);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(d);
  for (int i = 0; i < 8; ++i) {
    const int r = row + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
    if (r < N) O[r * 16 + column] = d[i];
  }
}
