// Exercise 12: two tiles of 32 x 32 elements in shared memory. Give each a layout without bank
// conflicts.
//
// A Layout maps (row, column) to an offset in elements. Swizzle<B, M, S> then changes bits of that
// offset: each of the B bits from bit M on becomes its exclusive or with the bit S places above it.
//
// Launch   grid ceil(N / 32), block 32
// Shapes   K (N, 32): float16; O (N, 32): float32, the elements of K as the lanes hold them;
//          T (32, N): float32, K^T
// Limit    no bank conflict, and no more memory than the elements take
#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
#include "ptx.cuh"

using namespace cute;
using ByRows = Layout<Shape<_32, _32>, Stride<_32, _1>>;

// float16: cp.async stores chunks of 8 elements, ldmatrix reads the same chunk of 8 rows. A row
// takes 64 bytes.
// BEGIN hole: about 1 line - B, M and S: keep chunks whole, and spread 8 rows over all banks
// DEFAULT: using HalfTile = decltype(composition(Swizzle<0, 3, 3>{}, ByRows{}));
using HalfTile = decltype(composition(Swizzle<2, 3, 3>{}, ByRows{}));
// END hole

// float32: the lanes of the warp store a row, and read a column. A row takes 128 bytes.
// BEGIN hole: about 1 line - B, M and S
// DEFAULT: using FloatTile = decltype(composition(Swizzle<0, 3, 3>{}, ByRows{}));
using FloatTile = decltype(composition(Swizzle<5, 0, 5>{}, ByRows{}));
// END hole

extern "C" __global__ void __launch_bounds__(32) tiles(const __half* K, float* O, float* T, int N) {
  __shared__ __align__(128) __half K_smem[32 * 32];
  __shared__ __align__(128) float F_smem[32 * 32];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4, first_row = blockIdx.x * 32;
  for (int i = lane; i < 32 * 4; i += 32) {
    const int r = first_row + i / 4, c = i % 4 * 8;
    const __half* chunk = K + (r < N ? r * 32 + c : 0);
    cp_async(smem_address(K_smem + HalfTile{}(i / 4, c)), chunk, r < N ? 16 : 0);
  }
  cp_async_commit();
  for (int r = 0; r < 32; ++r) {
    const int row = first_row + r;
    F_smem[FloatTile{}(r, lane)] = row < N ? __half2float(K[row * 32 + lane]) : 0.0f;
  }
  cp_async_wait<0>();
  __syncwarp();  // hazard: the tiles are read before the other lanes' copies have arrived

  // Operand A of 16 rows and 16 columns; lane 8 j + l gives row l of matrix j.
  for (int i = 0; i < 4; ++i) {
    const int first = i / 2 * 16, k = i % 2 * 16;
    unsigned a[4];
    ldmatrix_x4(a, smem_address(K_smem + HalfTile{}(first + lane % 16, k + lane / 16 * 8)));
    for (int j = 0; j < 8; ++j) {
      const int row = first_row + first + g + j / 2 % 2 * 8, column = k + j / 4 * 8 + 2 * t + j % 2;
      if (row < N) O[row * 32 + column] = __half2float(reinterpret_cast<const __half*>(a)[j]);
    }
  }
  for (int c = 0; c < 32; ++c)
    if (first_row + lane < N) T[c * N + first_row + lane] = F_smem[FloatTile{}(lane, c)];
}
