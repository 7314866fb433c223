// Operands of asm statements: as their constraints say, as the type that an instruction takes, and back.
#pragma once
#include "../float16_formats.h"

namespace engine {
namespace ptx {

template <typename A, typename B>
struct IsSame {
  static constexpr bool value = false;
};
template <typename A>
struct IsSame<A, A> {
  static constexpr bool value = true;
};
template <typename A, typename B>
constexpr bool is = IsSame<A, B>::value;

typedef unsigned __int128 B128;

// Floats of 16 bits as an instruction sees them, and two of them in a register.
template <typename F>
struct Small {
  typedef F Format;
  unsigned short bits;
  float value() const { return F::to_float(bits); }
  static Small of(float x, Round mode = Round::nearest) {
    return Small{mode == Round::nearest ? F::from_float(x) : F::from_float(x, mode)};
  }
};
typedef Small<Binary16> F16;
typedef Small<Bfloat16> Bf16;
template <typename E>
struct Two {
  typedef E Element;
  E low, high;
};
typedef Two<F16> F16x2;
typedef Two<Bf16> Bf16x2;

template <typename T>
constexpr bool is_float = is<T, float> || is<T, double>;
template <typename T>
constexpr bool is_small = is<T, F16> || is<T, Bf16>;
template <typename T>
constexpr bool is_pair = is<T, F16x2> || is<T, Bf16x2>;
template <typename T>
constexpr bool is_whole = !is_float<T> && !is_small<T> && !is_pair<T>;

// The integer of as many bytes.
template <size_t Bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  typedef unsigned char type;
};
template <>
struct BitsOf<2> {
  typedef unsigned short type;
};
template <>
struct BitsOf<4> {
  typedef unsigned type;
};
template <>
struct BitsOf<8> {
  typedef unsigned long long type;
};
template <>
struct BitsOf<16> {
  typedef B128 type;
};
template <typename T>
using Raw = typename BitsOf<sizeof(T)>::type;

// ---------------------------------------------------------------- constraints

template <char Constraint, typename T>
constexpr bool fits() {
  return Constraint == 'f'   ? is<T, float>
         : Constraint == 'd' ? is<T, double>
         : Constraint == 'q' ? sizeof(T) == 16
         : Constraint == 'h' ? !is_float<T> && sizeof(T) == 2
         : Constraint == 'l' ? !is_float<T> && sizeof(T) == 8
                             : !is_float<T> && sizeof(T) == 4;
}

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

template <char Constraint, typename T>
ENGINE_INLINE T in(T value) {
  static_assert(fits<Constraint, T>(), "an asm operand has another size or type than its constraint says");
  return value;
}
template <char Constraint, typename T>
ENGINE_INLINE T& out(T& value) {
  static_assert(
      fits<Constraint, typename Bare<T>::type>(), "an asm operand has another size or type than its constraint says");
  return value;
}

// ---------------------------------------------------------------- registers as the types of an instruction

// The same bits as another type.
template <typename To, typename From>
ENGINE_INLINE To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "an operand of this instruction has another size");
  To to;
  __builtin_memcpy((void*)&to, (const void*)&value, sizeof to);
  return to;
}
// An instruction that may take a wider register takes its low bits.
template <typename To, typename From>
ENGINE_INLINE To low_as(From value) {
  static_assert(sizeof(To) <= sizeof(From), "an operand of this instruction is wider than its register");
  To to;
  __builtin_memcpy((void*)&to, (const void*)&value, sizeof to);
  return to;
}
// An immediate is converted by its value. 0 is the only one that all types have.
template <typename To, typename From>
ENGINE_INLINE To constant(From value) {
  if constexpr (is_small<To> || is_pair<To>) return as<To>((Raw<To>)value);
  else return (To)value;
}

template <typename T, typename V>
ENGINE_INLINE void assign(T& target, V value) {
  target = as<typename Bare<T>::type>(value);
}
// Into a register that may be wider: integers keep their value.
template <typename T, typename V>
ENGINE_INLINE void assign_wide(T& target, V value) {
  typedef typename Bare<T>::type R;
  static_assert(sizeof(R) >= sizeof(V), "the register is too small for the result of this instruction");
  if constexpr (sizeof(R) == sizeof(V)) target = as<R>(value);
  else if constexpr (is_whole<V>) target = as<R>((Raw<R>)value);
  else target = as<R>((Raw<R>)as<Raw<V>>(value));
}
struct Nowhere {};  // the register _
template <typename V>
ENGINE_INLINE void assign(Nowhere, V) {}
template <typename V>
ENGINE_INLINE void assign_wide(Nowhere, V) {}

// Up to four registers of 32 bits in, and out again.
template <typename... T>
ENGINE_INLINE Words words(T... values) {
  return Words{as<unsigned>(values)...};
}
template <typename T>
ENGINE_INLINE void take_one(unsigned word, T& target) {
  if constexpr (!is<T, Nowhere>) target = as<typename Bare<T>::type>(word);
}
template <typename... T>
ENGINE_INLINE void take(Words found, T&&... targets) {
  int i = 0;
  (take_one((unsigned)found[i++], targets), ...);
}

// A register made of smaller ones, the first lowest, and taken apart.
template <typename To, typename... T>
ENGINE_INLINE To pack(T... parts) {
  static_assert((sizeof(T) + ...) == sizeof(To), "the parts in braces do not fill the register");
  To whole;
  char* at = (char*)&whole;
  ((__builtin_memcpy(at, &parts, sizeof parts), at += sizeof parts), ...);
  return whole;
}
template <typename T, typename P>
ENGINE_INLINE void unpack_one(T whole, unsigned size, unsigned& at, P& part) {
  if constexpr (!is<P, Nowhere>) __builtin_memcpy((void*)&part, (const char*)&whole + at, size);
  at += size;
}
template <typename P>
constexpr bool fits_part(unsigned bytes) {
  return is<P, Nowhere> || sizeof(P) == bytes;
}
template <typename T, typename... P>
ENGINE_INLINE void unpack(T whole, P&&... parts) {
  constexpr unsigned bytes = sizeof(T) / sizeof...(P);
  static_assert((fits_part<typename Bare<P>::type>(bytes) && ...), "the parts in braces do not fill the register");
  unsigned at = 0;
  (unpack_one(whole, bytes, at, parts), ...);
}

// ---------------------------------------------------------------- what the engine does not know

ENGINE_INLINE void unknown(const char* message, ENGINE_HERE) { engine_fail(message, file, line); }

}  // namespace ptx
}  // namespace engine
