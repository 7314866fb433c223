// Of tests/test_cute_engine.py.
#include <cute/tensor.hpp>
using namespace cute;

// C = A B^T of one tile: A (64, 64) and B (32, 64), of A the first rows alone. A thread waits for its copies,
// and meets the others, or not.
template <class T>
using Atom =
    conditional_t<is_same_v<T, half_t>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;

template <class Element, int BITS>
__global__ void gemm_tile(const unsigned short* a, const unsigned short* b, float* c, int rows,
                          bool waits, bool meets) {
  extern __shared__ __align__(128) char smem[];
  using Row = Layout<Shape<_8, _64>, Stride<_64, _1>>;
  const auto atom = composition(Swizzle<BITS, 3, 3>{}, Row{});
  Tensor sA = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem)), tile_to_shape(atom, Shape<_64, _64>{}));
  Tensor sB = make_tensor(sA.data() + size(sA), tile_to_shape(atom, Shape<_32, _64>{}));
  Tensor gA = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(a)), Shape<_64, _64>{}, Stride<_64, _1>{});
  Tensor gB = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(b)), Shape<_32, _64>{}, Stride<_64, _1>{});
  Tensor gC = make_tensor(make_gmem_ptr(c), Shape<_64, _32>{}, Stride<_32, _1>{});

  const auto load = make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                                    Layout<Shape<_16, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{});
  const auto mine = load.get_slice(threadIdx.x);
  Tensor row = mine.partition_S(make_identity_tensor(Shape<_64, _64>{}));
  for (int m = 0; m < 4; ++m)
    copy(load.with(get<0>(row(0, m, 0)) < rows), mine.partition_S(gA)(_, m, _), mine.partition_D(sA)(_, m, _));  // A
  for (int m = 0; m < 2; ++m)
    copy(load.with(true), mine.partition_S(gB)(_, m, _), mine.partition_D(sB)(_, m, _));
  cp_async_fence();
  if (waits) cp_async_wait<0>();
  if (meets) __syncthreads();

  TiledMMA<MMA_Atom<Atom<Element>>, Layout<Shape<_4, _1, _1>>, Tile<_64, _16, _16>> mma{};
  const auto part = mma.get_slice(threadIdx.x);
  Tensor rA = part.partition_fragment_A(sA);
  Tensor rB = part.partition_fragment_B(sB);
  Tensor rC = part.partition_fragment_C(gC);
  clear(rC);
  const auto copy_a = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  const auto copy_b = make_tiled_copy_B(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  const auto from_a = copy_a.get_slice(threadIdx.x);
  const auto from_b = copy_b.get_slice(threadIdx.x);
  for (int k = 0; k < 4; ++k) {
    copy(copy_a, from_a.partition_S(sA)(_, _, k), from_a.retile_D(rA)(_, _, k));  // ldmatrix of A
    copy(copy_b, from_b.partition_S(sB)(_, _, k), from_b.retile_D(rB)(_, _, k));  // ldmatrix of B
    gemm(mma, rA(_, _, k), rB(_, _, k), rC);
  }
  copy(rC, part.partition_C(gC));
}
