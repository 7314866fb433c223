// Of wmma, what the types other than __half and __nv_bfloat16 need: tf32, bytes with sums in int, and double.
//
// Their fragments are the registers of mma.m16n8k8 (tf32), m16n8k16 (bytes) and m8n8k4 (double), so with lane
// l = 4 g + t, and "across" for a row of A or a column of B,
//   bytes:   x[4 w + j] = (across g + 8 w, k = 4 t + j)
//   tf32 A:  x[i] = (across g + 8 (i % 2), k = t + 4 (i / 2)); B: the halves of i the other way round
//   double:  x[0] = (across g, k = t); accumulator: x[i] = (g, 2 t + i)
#pragma once
#include "cuda_bf16.h"

namespace nvcuda {
namespace wmma {
namespace precision {
struct tf32;
}
// The nearest number of tf32, which has ten bits of mantissa; from the middle, away from zero.
static inline float __float_to_tf32(float value) {
  const unsigned all = __float_as_uint(value);
  if (value != value) return __uint_as_float(0x7FFFFFFF);
  return (all & 0x7F800000) == 0x7F800000 ? value : __uint_as_float((all + 0x1000) & 0xFFFFE000);
}
}  // namespace wmma
}  // namespace nvcuda

namespace engine {
namespace wmma {

// What a kernel sees of an element, and what is accumulated.
template <typename T>
struct Element {
  typedef T type;
  static constexpr bool other = false;  // than those that go through ldmatrix
};
template <>
struct Element<nvcuda::wmma::precision::tf32> {
  typedef float type;
  static constexpr bool other = true;
};
#define ENGINE_OTHER_ELEMENT(T)         \
  template <>                           \
  struct Element<T> {                   \
    typedef T type;                     \
    static constexpr bool other = true; \
  };
ENGINE_OTHER_ELEMENT(signed char)
ENGINE_OTHER_ELEMENT(unsigned char)
ENGINE_OTHER_ELEMENT(double)
#undef ENGINE_OTHER_ELEMENT

struct Position {
  int row, column;
};

// Of element i of a lane's accumulator.
template <int M>
ENGINE_INLINE Position position(int lane, int i) {
  const int row = lane / 4 + i / 2 % 2 * 8, pair = lane % 4 * 2 + i % 2, far = i / 4;
  if (M == 8) return {pair, row + 16 * far};
  return M == 32 ? Position{row + 16 * far, pair} : Position{row, pair + 8 * far};
}

struct FactorPosition {
  int across, k;
};
// Of element i of a factor with elements of so many bytes.
template <int Bytes, bool IsA>
ENGINE_INLINE FactorPosition factor_position(int lane, int i) {
  const int g = lane / 4, t = lane % 4;
  if (Bytes == 1) return {g + i / 4 * 8, 4 * t + i % 4};
  if (Bytes == 8) return {g, t};
  const int far = IsA ? i % 2 : i / 2, deep = IsA ? i / 2 : i % 2;
  return {g + 8 * far, t + 4 * deep};
}

// Four bytes along K are one word in memory, if memory goes along K.
template <bool IsA, typename F, typename T>
ENGINE_INLINE void load_other(F& fragment, const T* from, unsigned ldm, bool along_k) {
  const int lane = (int)lane_id();
  if (sizeof(T) == 1 && along_k) {
    for (int i = 0; i < F::num_elements; i += 4) {
      const FactorPosition at = factor_position<1, IsA>(lane, i);
      const unsigned word = *(const unsigned*)(from + at.across * (size_t)ldm + at.k);
      __builtin_memcpy((void*)&fragment.x[i], &word, 4);
    }
    return;
  }
  for (int i = 0; i < F::num_elements; ++i) {
    const FactorPosition at = factor_position<sizeof(T), IsA>(lane, i);
    fragment.x[i] = from[along_k ? at.across * (size_t)ldm + at.k : at.k * (size_t)ldm + at.across];
  }
}

// The product of a warp, computed from the fragments of all lanes at once: in int, or in double with fused sums.
template <int M, int N, int K, typename A, typename B, typename C>
struct Product {
  A a[M * K / 32];
  B b[K * N / 32];
  C c[M * N / 32];
  bool saturates;
};
template <typename C>
struct Sums {
  C d[8];
};

template <typename C>
ENGINE_INLINE C product_sum(const C* a, const C* b, int count, C sum, bool saturates) {
  if constexpr (sizeof(C) == 8) {
    for (int k = 0; k < count; ++k) sum = fma(a[k], b[k], sum);
    return sum;
  } else {
    long long exact = sum;
    for (int k = 0; k < count; ++k) exact += (long long)a[k] * b[k];
    if (saturates) exact = exact > INT_MAX ? INT_MAX : exact < INT_MIN ? INT_MIN : exact;
    return (C)(unsigned)exact;
  }
}

template <int M, int N, int K, typename A, typename B, typename C>
void run_product(Collective* const* lanes, unsigned) {
  if (sizeof(C) == 8) engine_tensor_flop(M, N, K);
  typedef Product<M, N, K, A, B, C> In;
  C a[M][K], b[N][K];
  auto each = [&](auto f) {
    for (int lane = 0; lane < 32; ++lane) f(lane, *static_cast<Exchange<In, Sums<C>>*>(lanes[lane]));
  };
  each([&](int lane, Exchange<In, Sums<C>>& mine) {
    for (int i = 0; i < M * K / 32; ++i) {
      const FactorPosition at = factor_position<sizeof(A), true>(lane, i);
      a[at.across][at.k] = mine.in.a[i];
    }
    for (int i = 0; i < K * N / 32; ++i) {
      const FactorPosition at = factor_position<sizeof(B), false>(lane, i);
      b[at.across][at.k] = mine.in.b[i];
    }
  });
  each([&](int lane, Exchange<In, Sums<C>>& mine) {
    for (int i = 0; i < M * N / 32; ++i) {
      const Position at = sizeof(C) == 8 ? Position{lane / 4, lane % 4 * 2 + i} : position<M>(lane, i);
      mine.out.d[i] = product_sum<C>(a[at.row], b[at.column], K, mine.in.c[i], mine.in.saturates);
    }
  });
}

template <int M, int N, int K, typename D, typename A, typename B, typename C>
ENGINE_INLINE void multiply(D& d, const A& a, const B& b, const C& c, bool saturates, const char* file, int line) {
  typedef typename C::element_type Sum;
  typedef Product<M, N, K, typename A::element_type, typename B::element_type, Sum> In;
  In in;
  __builtin_memcpy((void*)in.a, a.x, sizeof in.a);
  __builtin_memcpy((void*)in.b, b.x, sizeof in.b);
  __builtin_memcpy((void*)in.c, c.x, sizeof in.c);
  in.saturates = saturates;
  const Sums<Sum> sums = exchange<In, Sums<Sum>>(
      "wmma::mma_sync", run_product<M, N, K, typename A::element_type, typename B::element_type, Sum>, ~0u, in, 0, file,
      line);
  __builtin_memcpy((void*)d.x, sums.d, sizeof d.x);
}

}  // namespace wmma
}  // namespace engine
