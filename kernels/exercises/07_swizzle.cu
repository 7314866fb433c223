// Exercise 07: a tile of 16 rows, copied to shared memory by cp.async, loaded by ldmatrix.
//
// Launch   grid ceil(N / 16), block 32
// Shapes   K (N, 64): float16; O (N, 64): float32, the elements of K as the lanes hold them
// Limit    no bank conflict, neither in the copies (8 lanes store one row) nor in ldmatrix (one
//          chunk of 8 rows)
#include "ptx.cuh"

// The byte offset of chunk `chunk` (16 bytes, 0 .. 7) of row `row` (0 .. 15) in the tile. A row
// takes 128 bytes.
__device__ unsigned swizzle(unsigned row, unsigned chunk) {
  // BEGIN hole: about 1 line - permute a row's chunks, neighbouring rows differently
  // DEFAULT: return 128 * row + 16 * chunk;
  return 128 * row + 16 * (chunk ^ row % 8);
  // END hole
}

extern "C" __global__ void __launch_bounds__(32) fragments(const __half* K, float* O, int N) {
  __shared__ __align__(128) __half K_smem[16 * 64];
  const unsigned tile = smem_address(K_smem), lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * 16;
  for (int i = threadIdx.x; i < 16 * 8; i += 32) {
    const int r = first_row + i / 8, c = i % 8;
    cp_async(tile + swizzle(i / 8, c), K + (r < N ? r * 64 + 8 * c : 0), r < N ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();  // hazard: the tile is read before the other lanes' copies have arrived

  // Operand A of 16 columns; lane 8 i + j gives the address of row j of matrix i.
  for (int k = 0; k < 4; ++k) {
    unsigned a[4];
    ldmatrix_x4(a, tile + swizzle(lane % 16, 2 * k + lane / 16));
    for (int i = 0; i < 8; ++i) {
      const int row = first_row + g + i / 2 % 2 * 8, column = 16 * k + i / 4 * 8 + 2 * t + i % 2;
      if (row < N) O[row * 64 + column] = __half2float(reinterpret_cast<const __half*>(a)[i]);
    }
  }
}
