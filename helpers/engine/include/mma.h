// nvcuda::wmma: matrix fragments and their product on tensor cores.
//
// Which lane holds which element is not promised by CUDA; here it is what GPUs of compute capability 8.0 and more do
// (held against an H200): the registers of two mma.m16n8k16, so with lane l = 4 g + t, in m16n16k16,
//   A:            x[0], x[1] = (g, 2t), (g, 2t+1)   x[2], x[3] = row g + 8     x[4..7] = the same 8 columns on
//   B:            x[0], x[1] = (2t, g), (2t+1, g)   x[2], x[3] = 8 rows down   x[4..7] = the same 8 columns on
//   accumulator:  as A
// m32n8k16 has the 32 rows as twice 16, and m8n32k16 is that transposed. Factors of __half fill 16 elements: what is
// left over repeats the others.
//
// With -D__ENGINE_WMMA_SWAP=2 the m16n16k16 accumulators of float exchange x[0], x[1] with x[2], x[3], and likewise
// x[4..7]: a layout that no GPU has, and that a kernel which relies on none cannot notice.
#pragma once
#include "mma_types.h"

#ifndef __ENGINE_WMMA_SWAP
#define __ENGINE_WMMA_SWAP 0  // x[i] of an accumulator is register i ^ __ENGINE_WMMA_SWAP
#endif

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
struct IsSame {
  static constexpr bool value = false;
};
template <typename A>
struct IsSame<A, A> {
  static constexpr bool value = true;
};

// Rows and columns; how many different elements a lane holds.
template <typename Use, int M, int N, int K>
struct Extent {
  static constexpr int rows = M, columns = N;
};
template <int M, int N, int K>
struct Extent<matrix_a, M, N, K> {
  static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Extent<matrix_b, M, N, K> {
  static constexpr int rows = K, columns = N;
};

template <typename Use, int M, int N, int K>
constexpr int different() {
  return Extent<Use, M, N, K>::rows * Extent<Use, M, N, K>::columns / 32;
}

template <typename Use, int M, int N, int K, typename T>
constexpr int held() {
  return !IsSame<Use, accumulator>::value && IsSame<T, __half>::value ? 16 : different<Use, M, N, K>();
}

template <size_t Bytes>
struct Bits {
  typedef unsigned type;
};
template <>
struct Bits<8> {
  typedef unsigned long long type;
};
template <>
struct Bits<16> {
  typedef Words type;
};

template <typename T>
ENGINE_INLINE void check(const void* pointer, unsigned ldm, const char* file, int line) {
  if ((uintptr_t)pointer % 16 != 0) engine_misaligned("wmma takes matrices at multiples of 16 bytes", file, line);
  if ((uintptr_t)pointer % 32 != 0) engine_note(4, (uintptr_t)pointer);  // the documentation says 32
  if (ldm * sizeof(T) % 16 != 0)
    engine_misaligned("wmma takes a distance of rows that is a multiple of 16 bytes", file, line);
}

// A factor comes in words, as GPUs load it: each word is of one of the lane's 8 x 8 matrices, in pairs along K. From
// shared memory that is ldmatrix; from global memory each lane reads its word, and where memory does not go along K,
// the matrix is transposed between registers.
template <typename F, typename T>
ENGINE_INLINE void load_factor(F& fragment, const T* from, unsigned ldm, bool along_k, const char* file, int line) {
  constexpr const char* name = "wmma::load_matrix_sync";
  constexpr int words = F::engine_words, n = words < 4 ? words : 4;
  check<T>(from, ldm, file, line);
  const int lane = (int)lane_id();
  // Row `row` of matrix i in memory: `across` is along the 16 rows of A or the 8 columns of B.
  auto matrix = [=](int i, int row) {
    const int across = F::engine_is_tall ? i % 2 * 8 + i / 4 * 16 : i / 2 * 8,
              along = F::engine_is_tall ? i / 2 % 2 * 8 : i % 2 * 8;
    return from + (along_k ? (across + row) * (size_t)ldm + along : (along + row) * (size_t)ldm + across);
  };
  const bool shared = engine_is_shared(from);
  for (int first = 0; first < words; first += n) {
    Words row = {};
    if (shared) {
      if (lane < 8 * n) row = *(const Words*)matrix(first + lane / 8, lane % 8);
    } else {
      for (int i = 0; i < n; ++i) row[i] = *(const unsigned*)(matrix(first + i, lane / 4) + lane % 4 * 2);
      if (along_k) engine_whole_warp(name, file, line);
      else row = engine_stmatrix(name, n, row, file, line);
    }
    if (shared || !along_k) row = engine_ldmatrix(name, along_k ? n : n + 8, row, file, line);
    __builtin_memcpy((void*)(fragment.x + 2 * first), &row, 4 * n);
  }
  for (int i = 2 * words; i < F::num_elements; ++i) fragment.x[i] = fragment.x[i - 2 * words];
}

// An accumulator: two neighbours at once where they are neighbours in memory.
template <typename F, typename Each>
ENGINE_INLINE void for_pairs(unsigned ldm, bool by_rows, Each each) {
  const int lane = (int)lane_id();
  for (int i = 0; i < F::num_elements; i += 2) {
    const Position first = F::engine_position(lane, i ^ F::engine_swap),
                   second = F::engine_position(lane, (i + 1) ^ F::engine_swap);
    auto index = [=](Position p) { return by_rows ? p.row * (size_t)ldm + p.column : p.column * (size_t)ldm + p.row; };
    each(i, index(first), index(second));
  }
}

template <typename F, typename T>
ENGINE_INLINE void load(F& fragment, const T* from, unsigned ldm, bool by_rows, const char* file, int line) {
  check<T>(from, ldm, file, line);
  for_pairs<F>(ldm, by_rows, [&](int i, size_t first, size_t second) {
    if (second == first + 1) {
      const auto both = *(const typename Bits<2 * sizeof(T)>::type*)(from + first);
      __builtin_memcpy((void*)&fragment.x[i], &both, sizeof both);
    } else {
      fragment.x[i] = from[first];
      fragment.x[i + 1] = from[second];
    }
  });
  engine_whole_warp("wmma::load_matrix_sync", file, line);
}

template <typename F, typename T>
ENGINE_INLINE void store(T* to, const F& fragment, unsigned ldm, bool by_rows, const char* file, int line) {
  check<T>(to, ldm, file, line);
  engine_whole_warp("wmma::store_matrix_sync", file, line);
  for_pairs<F>(ldm, by_rows, [&](int i, size_t first, size_t second) {
    if (second == first + 1) {
      typename Bits<2 * sizeof(T)>::type both;
      __builtin_memcpy(&both, &fragment.x[i], sizeof both);
      *(typename Bits<2 * sizeof(T)>::type*)(to + first) = both;
    } else {
      to[first] = fragment.x[i];
      to[second] = fragment.x[i + 1];
    }
  });
}

// Up to 16 bytes of a fragment as registers.
template <typename T>
ENGINE_INLINE Words registers(const T* x, size_t bytes) {
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
  template <typename Other>
  static constexpr bool engine_is = engine::wmma::IsSame<T, Other>::value;
  static constexpr bool engine_sums = engine::wmma::IsSame<Use, accumulator>::value;
  static constexpr bool engine_is_half = engine_is<__half>;
  static constexpr bool engine_wide = K == 16 && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32));
  static constexpr bool engine_is_of_wide = engine_is_half || engine_is<__nv_bfloat16> || engine_is<signed char> ||
                                            engine_is<unsigned char> ||
                                            (engine_sums && (engine_is<float> || engine_is<int>));
  static constexpr bool engine_is_of_tf32 = engine_is<precision::tf32> || (engine_sums && engine_is<float>);
  static_assert(
      engine_wide || (M == 16 && N == 16 && K == 8) || (M == 8 && N == 8 && K == 4),
      "the engine has wmma fragments of 16 x 16 x 16, 32 x 8 x 16 and 8 x 32 x 16, of 16 x 16 x 8 for tf32 and of "
      "8 x 8 x 4 for double");
  static_assert(
      engine_wide ? engine_is_of_wide
      : K == 8    ? engine_is_of_tf32
                  : engine_is<double>,
      "the engine has wmma fragments of __half, __nv_bfloat16, signed char and unsigned char with accumulators of "
      "float, __half and int; of tf32 in 16 x 16 x 8; and of double in 8 x 8 x 4");
  typedef typename engine::wmma::Element<T>::type element_type;
  typedef element_type storage_element_type;
  static constexpr int num_elements = engine::wmma::held<Use, M, N, K, T>(), num_storage_elements = num_elements;
  element_type x[num_elements];

  // Of a factor: whether it has 16 rows (columns in m8n32k16, where all is transposed) for each mma, or 8.
  static constexpr bool engine_is_tall = engine::wmma::IsSame<Use, matrix_a>::value == (M != 8);
  static constexpr int engine_words = engine::wmma::different<Use, M, N, K>() / 2;
  static constexpr int engine_swap =
      engine_sums && engine_is<float> && M == 16 && N == 16 && K == 16 ? __ENGINE_WMMA_SWAP : 0;
  static inline __attribute__((always_inline)) engine::wmma::Position engine_position(int lane, int i) {
    return K == 4 ? engine::wmma::Position{lane / 4, lane % 4 * 2 + i} : engine::wmma::position<M>(lane, i);
  }
};

template <typename Use, int M, int N, int K, typename T, typename Layout>
ENGINE_INLINE void fill_fragment(
    fragment<Use, M, N, K, T, Layout>& f, const typename engine::wmma::Element<T>::type& value) {
  for (auto& x : f.x) x = value;
}

template <typename Use, int M, int N, int K, typename T, typename Layout>
ENGINE_INLINE void load_matrix_sync(
    fragment<Use, M, N, K, T, Layout>& f, const typename engine::wmma::Element<T>::type* from, unsigned ldm,
    ENGINE_HERE) {
  static_assert(
      !engine::wmma::IsSame<Layout, void>::value, "load_matrix_sync of an accumulator takes its layout as well");
  constexpr bool along_k = engine::wmma::IsSame<Layout, row_major>::value == engine::wmma::IsSame<Use, matrix_a>::value;
  if constexpr (engine::wmma::Element<T>::other) {
    engine::wmma::check<typename engine::wmma::Element<T>::type>(from, ldm, file, line);
    engine::wmma::load_other<engine::wmma::IsSame<Use, matrix_a>::value>(f, from, ldm, along_k);
    engine_whole_warp("wmma::load_matrix_sync", file, line);
  } else {
    engine::wmma::load_factor(f, from, ldm, along_k, file, line);
  }
}
template <int M, int N, int K, typename T>
ENGINE_INLINE void load_matrix_sync(
    fragment<accumulator, M, N, K, T>& f, const engine::Plain<T>* from, unsigned ldm, layout_t layout, ENGINE_HERE) {
  engine::wmma::load(f, from, ldm, layout == mem_row_major, file, line);
}
template <int M, int N, int K, typename T>
ENGINE_INLINE void store_matrix_sync(
    engine::Plain<T>* to, const fragment<accumulator, M, N, K, T>& f, unsigned ldm, layout_t layout, ENGINE_HERE) {
  engine::wmma::store(to, f, ldm, layout == mem_row_major, file, line);
}

template <int M, int N, int K, typename D, typename T, typename LayoutA, typename LayoutB, typename C>
ENGINE_INLINE void mma_sync(
    fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, T, LayoutA>& a,
    const fragment<matrix_b, M, N, K, T, LayoutB>& b, const fragment<accumulator, M, N, K, C>& c,
    bool saturates = false, ENGINE_HERE) {
  static_assert(engine::wmma::IsSame<C, D>::value, "the engine has both accumulators of one type");
  if constexpr (sizeof(typename engine::wmma::Element<T>::type) == 1 || K == 4) {
    static_assert(engine::wmma::IsSame<C, int>::value || K == 4, "factors of 8 bits are summed in accumulators of int");
    engine::wmma::multiply<M, N, K>(d, a, b, c, saturates, file, line);
  } else {
    constexpr bool half = engine::wmma::IsSame<T, __half>::value, small = sizeof(D) == 2, tf32 = K == 8;
    static_assert(!engine::wmma::IsSame<C, int>::value, "accumulators of int take factors of 8 bits");
    static_assert(half || !small, "accumulators of __half take factors of __half");
    constexpr engine::Mma kind = tf32    ? engine::K8_TF32
                                 : small ? engine::K16_HALF
                                 : half  ? engine::K16_F16
                                         : engine::K16_BF16;
    constexpr int swap = fragment<accumulator, M, N, K, D>::engine_swap;
    D sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = c.x[i ^ swap];
    // Two products of 16 x 8: side by side, or stacked where the matrix has 32 rows (or 32 columns, all transposed).
    for (int i = 0; i < 2; ++i) {
      const auto *tall = M == 8 ? b.x : a.x, *wide = M == 8 ? a.x : b.x;
      const engine::Words words = engine_mma(
          kind, engine::wmma::registers(tall + (M == 16 ? 0 : 8 * i), 16),
          engine::wmma::registers(wide + (M == 16 ? (tf32 ? 2 : 4) * i : 0), 8),
          engine::wmma::registers(sums + 4 * i, 4 * sizeof(C)), file, line);
      __builtin_memcpy((void*)(sums + 4 * i), &words, 4 * sizeof(D));
    }
    for (int i = 0; i < 8; ++i) d.x[i] = sums[i ^ swap];
  }
}

}  // namespace wmma
}  // namespace nvcuda
