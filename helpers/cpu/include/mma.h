// nvcuda::wmma: matrix fragments and their product on tensor cores.
//
// Which lane holds which element is not promised by CUDA; here it is what GPUs of compute capability 8.0 and more do: a
// fragment is that of one or two mma.m16n8k16. Lane l = 4 g + t. Of a 16 x 16 matrix A, x[0], x[1] are the elements
// (g, 2t), (g, 2t+1), x[2], x[3] those of row g + 8, x[4..7] the same 8 columns on. B is the transpose of that; the
// accumulator has x[0..3] = (g, 2t), (g, 2t+1) and row g + 8, and x[4..7] = the same 8 columns on. In m8n32k16 all of it is
// transposed. Fragments of __half with fewer than 16 elements hold them more than once.
#pragma once
#include "cuda_bf16.h"

namespace nvcuda {
namespace wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

}  // namespace wmma
}  // namespace nvcuda

namespace engine {
namespace wmma {

using namespace nvcuda::wmma;

template <typename A, typename B>
struct IsSame { static constexpr bool value = false; };
template <typename A>
struct IsSame<A, A> { static constexpr bool value = true; };

// Rows and columns; how many different elements a lane holds.
template <typename Use, int M, int N, int K>
struct Extent { static constexpr int rows = M, columns = N; };
template <int M, int N, int K>
struct Extent<matrix_a, M, N, K> { static constexpr int rows = M, columns = K; };
template <int M, int N, int K>
struct Extent<matrix_b, M, N, K> { static constexpr int rows = K, columns = N; };

template <typename Use, int M, int N, int K>
constexpr int different() { return Extent<Use, M, N, K>::rows * Extent<Use, M, N, K>::columns / 32; }

template <typename Use, int M, int N, int K, typename T>
constexpr int held() {
  return !IsSame<Use, accumulator>::value && IsSame<T, __half>::value ? 16 : different<Use, M, N, K>();
}

template <size_t Bytes>
struct Bits { typedef unsigned type; };
template <>
struct Bits<8> { typedef unsigned long long type; };

struct Position { int row, column; };

// Of element i of a lane. The 16 rows of the mma are those of A, or, in m8n32k16, the columns of B.
template <typename Use, int M, int N, int K>
ENGINE_INLINE Position position(int lane, int i) {
  i %= different<Use, M, N, K>();
  const int g = lane / 4, pair = lane % 4 * 2 + i % 2;
  const bool swapped = M == 8;
  if (IsSame<Use, accumulator>::value) {
    const int row = g + i / 2 % 2 * 8, far = i / 4;
    if (swapped) return {pair, row + 16 * far};
    return M == 32 ? Position{row + 16 * far, pair} : Position{row, pair + 8 * far};
  }
  const bool tall = IsSame<Use, matrix_a>::value != swapped;  // the operand of 16 rows
  const int across = tall ? g + i / 2 % 2 * 8 + i / 8 * 16 : g + i / 4 * 8, along = tall ? pair + i / 4 % 2 * 8 : pair + i / 2 % 2 * 8;
  return IsSame<Use, matrix_a>::value ? Position{across, along} : Position{along, across};
}

// The place of each element in memory, taken two at a time where they are neighbours.
template <typename F, typename Each>
ENGINE_INLINE void for_pairs(unsigned ldm, bool by_rows, Each each) {
  const int lane = (int)lane_id();
  for (int i = 0; i < F::num_elements; i += 2) {
    const Position first = F::engine_position(lane, i), second = F::engine_position(lane, i + 1);
    auto index = [=](Position p) { return by_rows ? p.row * (size_t)ldm + p.column : p.column * (size_t)ldm + p.row; };
    each(i, index(first), index(second));
  }
}

template <typename T>
ENGINE_INLINE void check(const void *pointer, unsigned ldm, const char *name, const char *file, int line) {
  if ((uintptr_t)pointer % 32 != 0 || ldm * sizeof(T) % 16 != 0) {
    engine_fail(
        (uintptr_t)pointer % 32 != 0 ? "misaligned address: wmma takes matrices at multiples of 32 bytes"
                                     : "misaligned address: wmma takes a distance of rows that is a multiple of 16 bytes",
        file, line);
  }
  engine_whole_warp(name, file, line);
}

template <typename F, typename T>
ENGINE_INLINE void load(F &fragment, const T *from, unsigned ldm, bool by_rows, const char *file, int line) {
  check<T>(from, ldm, "wmma::load_matrix_sync", file, line);
  for_pairs<F>(ldm, by_rows, [&](int i, size_t first, size_t second) {
    if (second == first + 1) {
      const auto both = *(const typename Bits<2 * sizeof(T)>::type *)(from + first);
      __builtin_memcpy((void *)&fragment.x[i], &both, sizeof both);
    } else {
      fragment.x[i] = from[first];
      fragment.x[i + 1] = from[second];
    }
  });
}

template <typename F, typename T>
ENGINE_INLINE void store(T *to, const F &fragment, unsigned ldm, bool by_rows, const char *file, int line) {
  check<T>(to, ldm, "wmma::store_matrix_sync", file, line);
  for_pairs<F>(ldm, by_rows, [&](int i, size_t first, size_t second) {
    if (second == first + 1) {
      typename Bits<2 * sizeof(T)>::type both;
      __builtin_memcpy(&both, &fragment.x[i], sizeof both);
      *(typename Bits<2 * sizeof(T)>::type *)(to + first) = both;
    } else {
      to[first] = fragment.x[i];
      to[second] = fragment.x[i + 1];
    }
  });
}

// Up to 16 bytes of a fragment as registers.
template <typename T>
ENGINE_INLINE Words registers(const T *x, size_t bytes) {
  Words words = {};
  __builtin_memcpy(&words, x, bytes);
  return words;
}

}  // namespace wmma
}  // namespace engine

namespace nvcuda {
namespace wmma {

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(
      K == 16 && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32)),
      "the engine has wmma fragments of 16 x 16 x 16, 32 x 8 x 16 and 8 x 32 x 16");
  static constexpr bool engine_is_half = engine::wmma::IsSame<T, __half>::value;
  static_assert(
      engine_is_half || engine::wmma::IsSame<T, __nv_bfloat16>::value ||
          (engine::wmma::IsSame<T, float>::value && engine::wmma::IsSame<Use, accumulator>::value),
      "the engine has wmma fragments of __half and __nv_bfloat16, and accumulators of float and __half");
  typedef T element_type;
  typedef T storage_element_type;
  static constexpr int num_elements = engine::wmma::held<Use, M, N, K, T>(), num_storage_elements = num_elements;
  T x[num_elements];

  static inline __attribute__((always_inline)) engine::wmma::Position engine_position(int lane, int i) {
    return engine::wmma::position<Use, M, N, K>(lane, i);
  }
};

template <typename Use, int M, int N, int K, typename T, typename Layout>
ENGINE_INLINE void fill_fragment(fragment<Use, M, N, K, T, Layout> &f, const engine::Plain<T> &value) {
  for (T &x : f.x) x = value;
}

template <typename Use, int M, int N, int K, typename T, typename Layout>
ENGINE_INLINE void load_matrix_sync(fragment<Use, M, N, K, T, Layout> &f, const engine::Plain<T> *from, unsigned ldm,
                                    ENGINE_HERE) {
  static_assert(!engine::wmma::IsSame<Layout, void>::value, "load_matrix_sync of an accumulator takes its layout as well");
  engine::wmma::load(f, from, ldm, engine::wmma::IsSame<Layout, row_major>::value, file, line);
}
template <int M, int N, int K, typename T>
ENGINE_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T> &f, const engine::Plain<T> *from, unsigned ldm,
                                    layout_t layout, ENGINE_HERE) {
  engine::wmma::load(f, from, ldm, layout == mem_row_major, file, line);
}
template <int M, int N, int K, typename T>
ENGINE_INLINE void store_matrix_sync(engine::Plain<T> *to, const fragment<accumulator, M, N, K, T> &f, unsigned ldm,
                                     layout_t layout, ENGINE_HERE) {
  engine::wmma::store(to, f, ldm, layout == mem_row_major, file, line);
}

template <int M, int N, int K, typename D, typename T, typename LayoutA, typename LayoutB, typename C>
ENGINE_INLINE void mma_sync(fragment<accumulator, M, N, K, D> &d, const fragment<matrix_a, M, N, K, T, LayoutA> &a,
                            const fragment<matrix_b, M, N, K, T, LayoutB> &b, const fragment<accumulator, M, N, K, C> &c,
                            bool = false, ENGINE_HERE) {
  static_assert(engine::wmma::IsSame<C, D>::value, "the engine has both accumulators of one type");
  constexpr bool half = engine::wmma::IsSame<T, __half>::value, small = sizeof(D) == 2;
  static_assert(half || !small, "accumulators of __half take factors of __half");
  constexpr engine::Mma kind = small ? engine::K16_HALF : half ? engine::K16_F16 : engine::K16_BF16;
  // Two products of 16 x 8: side by side, or, where the matrix has 32 rows (or columns, and all is transposed), stacked.
  for (int i = 0; i < 2; ++i) {
    const T *tall = M == 8 ? b.x : a.x, *wide = M == 8 ? a.x : b.x;
    const engine::Words words = engine_mma(
        kind, engine::wmma::registers(tall + (M == 16 ? 0 : 8 * i), 16),
        engine::wmma::registers(wide + (M == 16 ? 4 * i : 0), 8), engine::wmma::registers(c.x + 4 * i, 4 * sizeof(C)),
        file, line);
    __builtin_memcpy((void *)(d.x + 4 * i), &words, 4 * sizeof(D));
  }
}

}  // namespace wmma
}  // namespace nvcuda
