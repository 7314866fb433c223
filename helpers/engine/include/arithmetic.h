// Arithmetic where C++ says "undefined" and a GPU says a number: shifts by the width or more, and real numbers that do
// not fit the integer they become. arithmetic.py puts these names into a kernel's source, so that its operators keep
// their precedence:
//   a << b       a << ::engine_left << b            a <<= b     a <<= ::engine_left = b
//   (int)x       (int)(::engine_to<int>)x           int(x)      int((::engine_in<int>)(x))
// and where a compiler says that a real number silently becomes an integer:
//   i = x        i = ::engine_soft(x)               i += x      ::engine_at(i) += (x)
#pragma once
#include <limits.h>

namespace engine {

template <typename T>
struct IsFloat {
  static constexpr bool value = false;
};
template <typename T>
struct IsInteger {
  static constexpr bool value = false;
};
template <typename T>
struct Unsigned;
#define ENGINE_FLOAT(T)                 \
  template <>                           \
  struct IsFloat<T> {                   \
    static constexpr bool value = true; \
  };
#define ENGINE_INTEGER(T, U)            \
  template <>                           \
  struct IsInteger<T> {                 \
    static constexpr bool value = true; \
  };                                    \
  template <>                           \
  struct Unsigned<T> {                  \
    typedef U type;                     \
  };
// clang-format off
ENGINE_FLOAT(float)
ENGINE_FLOAT(double)
ENGINE_INTEGER(char, unsigned char)
ENGINE_INTEGER(signed char, unsigned char)
ENGINE_INTEGER(unsigned char, unsigned char)
ENGINE_INTEGER(short, unsigned short)
ENGINE_INTEGER(unsigned short, unsigned short)
ENGINE_INTEGER(int, unsigned)
ENGINE_INTEGER(unsigned, unsigned)
ENGINE_INTEGER(long, unsigned long)
ENGINE_INTEGER(unsigned long, unsigned long)
ENGINE_INTEGER(long long, unsigned long long)
ENGINE_INTEGER(unsigned long long, unsigned long long)
ENGINE_INTEGER(__int128, unsigned __int128)
ENGINE_INTEGER(unsigned __int128, unsigned __int128)
// clang-format on
#undef ENGINE_FLOAT
#undef ENGINE_INTEGER

template <typename T>
struct Bare {
  typedef T type;
};
template <typename T>
struct Bare<const T> : Bare<T> {};
template <typename T>
struct Bare<volatile T> : Bare<T> {};
template <typename T>
struct Bare<const volatile T> : Bare<T> {};
template <typename T>
struct Bare<T&> : Bare<T> {};
template <typename T>
struct Bare<T&&> : Bare<T> {};

#define ENGINE_NOW constexpr inline __attribute__((always_inline))

// ---------------------------------------------------------------- shifts

// PTX takes the low 32 bits of the count as an unsigned number, and clamps: nothing of the value is left.
template <typename T>
ENGINE_NOW T shifted_left(T value, unsigned count) {
  return count < 8 * sizeof(T) ? (T)((typename Unsigned<T>::type)value << count) : T(0);
}
template <typename T>
ENGINE_NOW T shifted_right(T value, unsigned count) {
  constexpr unsigned last = 8 * sizeof(T) - 1;
  return T(-1) < T(0) ? value >> (count < last ? count : last) : count <= last ? value >> count : T(0);
}

struct Left {
  template <typename T>
  struct By {
    const T& count;
  };
  template <typename T>
  ENGINE_NOW By<T> operator=(const T& count) const {
    return {count};
  }
};
struct Right {
  template <typename T>
  struct By {
    const T& count;
  };
  template <typename T>
  ENGINE_NOW By<T> operator=(const T& count) const {
    return {count};
  }
};

// What stands before the operator: a number, promoted as C++ does it, or anything else, with an operator of its own.
template <typename T>
struct Number {
  T value;
};
template <typename T>
struct Thing {
  const T& value;
};
template <typename T, bool object>
struct Before {
  static ENGINE_NOW auto of(const T& value) { return Number<typename Bare<decltype(+value)>::type>{+value}; }
};
template <typename T>
struct Before<T, true> {
  static ENGINE_NOW Thing<T> of(const T& value) { return {value}; }
};

template <typename L, typename R>
ENGINE_NOW auto left_shift(L value, const R& count) {
  if constexpr (IsInteger<L>::value && !__is_class(R)) return shifted_left<L>(value, (unsigned)count);
  else return value << count;
}
template <typename L, typename R>
ENGINE_NOW auto right_shift(L value, const R& count) {
  if constexpr (IsInteger<L>::value && !__is_class(R)) return shifted_right<L>(value, (unsigned)count);
  else return value >> count;
}

#define ENGINE_SHIFT(SIDE, OP, FUNCTION)                                        \
  template <typename T>                                                         \
  ENGINE_NOW auto operator OP(const T& value, SIDE) {                           \
    return Before < T, __is_class(T) || __is_union(T) > ::of(value);            \
  }                                                                             \
  template <typename L, typename R>                                             \
  ENGINE_NOW auto operator OP(const Number<L>& left, const R& count) {          \
    return FUNCTION<L>(left.value, count);                                      \
  }                                                                             \
  template <typename L, typename R>                                             \
  ENGINE_NOW decltype(auto) operator OP(const Thing<L>& left, const R& count) { \
    return left.value OP count;                                                 \
  }                                                                             \
  template <typename T, typename R>                                             \
  ENGINE_NOW T& operator OP## = (T & target, const SIDE::By<R>& by) {           \
    if constexpr (__is_class(T) || __is_union(T)) target OP## = by.count;       \
    else target = (typename Bare<T>::type)(target OP SIDE() OP by.count);       \
    return target;                                                              \
  }
ENGINE_SHIFT(Left, <<, left_shift)
ENGINE_SHIFT(Right, >>, right_shift)
#undef ENGINE_SHIFT

// ---------------------------------------------------------------- real numbers that become integers

// As cvt.rzi does it: to the nearest number there is. A NaN becomes 0, except from double or to 64 bits. Narrower
// integers are made of one of 32 bits, as NVIDIA's compiler makes them.
template <typename To, typename From>
ENGINE_NOW To saturated(From v) {
  constexpr bool is_signed = To(-1) < To(0);
  if constexpr (sizeof(To) < 4) {
    if constexpr (is_signed) return (To)saturated<int>(v);
    else return (To)saturated<unsigned>(v);
  } else {
    typedef typename Unsigned<To>::type U;
    constexpr U top = U(1) << (8 * sizeof(To) - 1);
    constexpr From high = (is_signed ? From(1) : From(2)) * From(top);
    constexpr To highest = To(is_signed ? top - 1 : U(-1)), lowest = is_signed ? To(top) : To(0);
    constexpr To of_nan = sizeof(From) == 4 && sizeof(To) == 4 ? To(0) : To(top);
    constexpr From low = is_signed ? -high : From(0);
    return v >= high ? highest : v > low ? To(v) : v != v ? of_nan : lowest;
  }
}

template <typename To, typename From>
ENGINE_NOW To cast(const From& v) {
  if constexpr (IsFloat<typename Bare<From>::type>::value) return saturated<To, typename Bare<From>::type>(v);
  else return (To)v;
}
template <typename To>
struct Integer {  // an integer made of anything
  To value;
  template <typename From>
  ENGINE_NOW Integer(const From& v) : value(cast<To>(v)) {}
  ENGINE_NOW operator To() const { return value; }
};
template <typename To, bool is_integer>
struct Into {
  typedef To type;
};
template <typename To>
struct Into<To, true> {
  typedef Integer<typename Bare<To>::type> type;
};

template <bool>
struct When {};
template <>
struct When<true> {
  typedef int type;
};
template <typename F>
struct Soft {  // becomes what it is assigned to
  F value;
  template <typename I, typename When<IsInteger<I>::value>::type = 0>
  ENGINE_NOW operator I() const {
    return saturated<I, F>(value);
  }
};
template <typename T>
struct At {
  T& target;
#define ENGINE_UPDATE(OP)                                              \
  template <typename V>                                                \
  ENGINE_NOW T& operator OP## = (const V& v) const {                   \
    return target = cast<typename Bare<T>::type>(target OP v), target; \
  }
  ENGINE_UPDATE(+)
  ENGINE_UPDATE(-)
  ENGINE_UPDATE(*)
  ENGINE_UPDATE(/)
#undef ENGINE_UPDATE
};

}  // namespace engine

constexpr engine::Left engine_left{};
constexpr engine::Right engine_right{};

template <typename To>
using engine_to = typename engine::Into<To, engine::IsInteger<typename engine::Bare<To>::type>::value>::type;
template <typename To>
using engine_in = engine_to<To>;  // where parentheses were added
template <typename T>
ENGINE_NOW decltype(auto) engine_soft(T&& v) {
  typedef typename engine::Bare<T>::type F;
  if constexpr (engine::IsFloat<F>::value) return engine::Soft<F>{v};
  else return static_cast<T&&>(v);
}
template <typename T>
ENGINE_NOW engine::At<T> engine_at(T& target) {
  return {target};
}
