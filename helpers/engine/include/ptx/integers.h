// Integers and bits.
#pragma once
#include "operands.h"

namespace engine {
namespace ptx {

template <typename T>
constexpr bool is_signed = is<T, signed char> || is<T, short> || is<T, int> || is<T, long long>;
template <typename T>
constexpr unsigned width = 8 * sizeof(T);
template <typename T>
constexpr T least = is_signed<T> ? (T)((Raw<T>)1 << (width<T> - 1)) : T(0);
template <typename T>
constexpr T most = (T)(~(Raw<T>)least<T>);

// The nearest number that T has.
template <typename T, typename V>
ENGINE_INLINE T clamped(V value) {
  return value<(V)least<T> ? least<T> : value>(V) most<T> ? most<T> : (T)value;
}
template <typename T>
struct Twice;
// clang-format off
template <> struct Twice<short> { typedef int type; };
template <> struct Twice<unsigned short> { typedef unsigned type; };
template <> struct Twice<int> { typedef long long type; };
template <> struct Twice<unsigned> { typedef unsigned long long type; };
template <> struct Twice<long long> { typedef __int128 type; };
template <> struct Twice<unsigned long long> { typedef B128 type; };
// clang-format on

// Sums and products wrap around.
template <typename T>
ENGINE_INLINE T plus(T a, T b) {
  return (T)((Raw<T>)a + (Raw<T>)b);
}
template <typename T>
ENGINE_INLINE T minus(T a, T b) {
  return (T)((Raw<T>)a - (Raw<T>)b);
}
template <typename T>
ENGINE_INLINE T plus_saturated(T a, T b) {
  return clamped<T>((__int128)a + b);
}
template <typename T>
ENGINE_INLINE T minus_saturated(T a, T b) {
  return clamped<T>((__int128)a - b);
}
template <typename T>
ENGINE_INLINE typename Twice<T>::type mul_wide(T a, T b) {
  return (typename Twice<T>::type)a * b;
}
template <typename T>
ENGINE_INLINE T mul_lo(T a, T b) {
  return (T)((unsigned long long)a * (unsigned long long)b);
}
template <typename T>
ENGINE_INLINE T mul_hi(T a, T b) {
  return (T)(mul_wide(a, b) >> width<T>);
}
template <typename T>
ENGINE_INLINE T mad_lo(T a, T b, T c) {
  return plus(mul_lo(a, b), c);
}
template <typename T>
ENGINE_INLINE T mad_hi(T a, T b, T c) {
  return plus(mul_hi(a, b), c);
}
template <typename T>
ENGINE_INLINE T mad_hi_saturated(T a, T b, T c) {
  return plus_saturated(mul_hi(a, b), c);
}
template <typename T>
ENGINE_INLINE typename Twice<T>::type mad_wide(T a, T b, typename Twice<T>::type c) {
  return plus(mul_wide(a, b), c);
}
template <typename T>
ENGINE_INLINE T low24(T a) {
  return is_signed<T> ? (T)((int)((unsigned)a << 8) >> 8) : (T)((unsigned)a & 0xFFFFFFu);
}
template <typename T>
ENGINE_INLINE T mul24_lo(T a, T b) {
  return (T)((long long)low24(a) * low24(b));
}
template <typename T>
ENGINE_INLINE T mul24_hi(T a, T b) {
  return (T)((long long)low24(a) * low24(b) >> 16);
}
template <typename T>
ENGINE_INLINE T mad24_lo(T a, T b, T c) {
  return plus(mul24_lo(a, b), c);
}
template <typename T>
ENGINE_INLINE T mad24_hi(T a, T b, T c) {
  return plus(mul24_hi(a, b), c);
}
template <typename T>
ENGINE_INLINE T sad(T a, T b, T c) {
  return plus(a > b ? minus(a, b) : minus(b, a), c);
}
// By zero: all ones, and the dividend is left.
template <typename T>
ENGINE_INLINE T div(T a, T b) {
  return b == 0 ? (T)~T(0) : is_signed<T> && b == (T)-1 ? minus(T(0), a) : (T)(a / b);
}
template <typename T>
ENGINE_INLINE T rem(T a, T b) {
  return b == 0 ? a : is_signed<T> && b == (T)-1 ? T(0) : (T)(a % b);
}
template <typename T>
ENGINE_INLINE T abs(T a) {
  return a < 0 ? minus(T(0), a) : a;
}
template <typename T>
ENGINE_INLINE T neg(T a) {
  return minus(T(0), a);
}
template <typename T>
ENGINE_INLINE T least_of(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
ENGINE_INLINE T most_of(T a, T b) {
  return a < b ? b : a;
}

// ---------------------------------------------------------------- carries

template <typename T>
ENGINE_INLINE T add_carry(T a, T b, bool take, bool give) {
  const B128 sum = (B128)(Raw<T>)a + (Raw<T>)b + (take ? engine_carry(-1) : 0);
  if (give) engine_carry((int)(sum >> width<T> & 1));
  return (T)sum;
}
// The carry of a difference is its borrow.
template <typename T>
ENGINE_INLINE T sub_borrow(T a, T b, bool take, bool give) {
  const B128 difference = (B128)(Raw<T>)a - (Raw<T>)b - (take ? engine_carry(-1) : 0);
  if (give) engine_carry((int)(difference >> width<T> & 1));
  return (T)difference;
}

// ---------------------------------------------------------------- bits

template <typename T>
ENGINE_INLINE T both(T a, T b) {
  return a & b;
}
template <typename T>
ENGINE_INLINE T either(T a, T b) {
  return a | b;
}
template <typename T>
ENGINE_INLINE T differ(T a, T b) {
  return a ^ b;
}
template <typename T>
ENGINE_INLINE T invert(T a) {
  return is<T, bool> ? (T)!a : (T)~a;
}
template <typename T>
ENGINE_INLINE T cnot(T a) {
  return a == 0;
}
// By the width or more: nothing is left but, of a signed number, its sign.
template <typename T>
ENGINE_INLINE T shl(T a, unsigned by) {
  return by >= width<T> ? T(0) : (T)((Raw<T>)a << by);
}
template <typename T>
ENGINE_INLINE T shr(T a, unsigned by) {
  if (by < width<T>) return (T)(a >> by);
  return is_signed<T> && a < 0 ? (T)-1 : T(0);
}
template <bool Left, bool Clamp>
ENGINE_INLINE unsigned shf(unsigned low, unsigned high, unsigned by) {
  if (Left) return Clamp ? __funnelshift_lc(low, high, by) : __funnelshift_l(low, high, by);
  return Clamp ? __funnelshift_rc(low, high, by) : __funnelshift_r(low, high, by);
}
template <typename T>
ENGINE_INLINE unsigned popc(T a) {
  return (unsigned)__builtin_popcountll((unsigned long long)(Raw<T>)a);
}
template <typename T>
ENGINE_INLINE unsigned clz(T a) {
  return (Raw<T>)a ? (unsigned)__builtin_clzll((unsigned long long)(Raw<T>)a) - (64 - width<T>) : width<T>;
}
// The highest bit that differs from the sign; all ones if there is none.
template <typename T, bool ShiftAmount>
ENGINE_INLINE unsigned bfind(T a) {
  const Raw<T> bits = (Raw<T>)(is_signed<T> && a < 0 ? ~a : a);
  if (!bits) return ~0u;
  const unsigned leading = clz(bits);
  return ShiftAmount ? leading : width<T> - 1 - leading;
}
template <typename T>
ENGINE_INLINE T brev(T a) {
  return width<T> == 64 ? (T)__brevll((unsigned long long)a) : (T)__brev((unsigned)a);
}
// Bits from `at` on, their highest as the sign; past the end of the register the sign goes on.
template <typename T>
ENGINE_INLINE T bfe(T a, unsigned at, unsigned n) {
  at &= 255, n &= 255;
  const unsigned top = at + n - 1 < width<T> - 1 ? at + n - 1 : width<T> - 1;
  const bool sign = is_signed<T> && n && ((Raw<T>)a >> top & 1);
  Raw<T> found = 0;
  for (unsigned i = 0; i < width<T>; ++i) {
    const bool bit = i < n && at + i < width<T> ? (Raw<T>)a >> (at + i) & 1 : sign;
    found |= (Raw<T>)bit << i;
  }
  return (T)found;
}
template <typename T>
ENGINE_INLINE T bfi(T a, T into, unsigned at, unsigned n) {
  at &= 255, n &= 255;
  for (unsigned i = 0; i < n && at + i < width<T>; ++i) {
    const T bit = (T)1 << (at + i);
    into = (into & ~bit) | (a >> i & 1 ? bit : 0);
  }
  return into;
}
template <bool Clamp>
ENGINE_INLINE unsigned bmsk(unsigned at, unsigned n) {
  if (!Clamp) at &= 31, n &= 31;
  return shl(n >= 32 ? ~0u : (1u << n) - 1, at);
}
template <typename T, bool Clamp>
ENGINE_INLINE T szext(T a, unsigned n) {
  if (!Clamp) n &= 31;
  if (n == 0) return 0;
  return n >= 32 ? a : (T)((T)((unsigned)a << (32 - n)) >> (32 - n));
}

template <unsigned Table>
ENGINE_INLINE unsigned lop3(unsigned a, unsigned b, unsigned c) {
  unsigned found = 0;
  for (int i = 0; i < 8; ++i)
    if (Table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return found;
}

// The bytes that a selector picks from eight: its bit 3 copies the byte's sign instead.
ENGINE_INLINE unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long all = (unsigned long long)b << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 15;
    unsigned byte = (unsigned)(all >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    found |= byte << 8 * i;
  }
  return found;
}
enum class Pick { forward, backward, replicate, clamp_left, clamp_right, replicate16 };
template <Pick P>
ENGINE_INLINE unsigned prmt_mode(unsigned a, unsigned b, unsigned selector) {
  const int s = selector & 3;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = P == Pick::forward       ? s + i
                     : P == Pick::backward    ? (s - i) & 7
                     : P == Pick::replicate   ? s
                     : P == Pick::clamp_left  ? (i < s ? s : i)
                     : P == Pick::clamp_right ? (i < s ? i : s)
                                              : (s & 1) * 2 + i % 2;
    picked |= (unsigned)byte << 4 * i;
  }
  return prmt(a, b, picked);
}

// Dot products of bytes; of two of them with two numbers of 16 bits.
template <typename A, typename B, typename T>
ENGINE_INLINE T dp4a(unsigned a, unsigned b, T c) {
  for (int i = 0; i < 32; i += 8) c = plus(c, (T)((int)(A)(a >> i) * (int)(B)(b >> i)));
  return c;
}
template <typename A, typename B, typename T, bool High>
ENGINE_INLINE T dp2a(unsigned a, unsigned b, T c) {
  for (int i = 0; i < 2; ++i) c = plus(c, (T)((int)(A)(a >> 16 * i) * (int)(B)(b >> (8 * i + 16 * High))));
  return c;
}

}  // namespace ptx
}  // namespace engine
