// What the four warps of a warpgroup do together: products from shared memory, and the registers that they share out.
#pragma once
#include "operands.h"

namespace engine {
namespace ptx {

template <
    int N, Factor A, Factor B, bool REGISTERS, int SCALE_A, int SCALE_B, int TRANSPOSED_A = 0, int TRANSPOSED_B = 0>
ENGINE_INLINE void wgmma(
    float* const (&d)[N / 2], Words a, unsigned long long b, bool accumulate, const char* file, int line) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns, in steps of 8");
  static_assert((SCALE_A == 1 || SCALE_A == -1) && (SCALE_B == 1 || SCALE_B == -1), "wgmma's scales are 1 or -1");
  static_assert(TRANSPOSED_A >> 1 == 0 && TRANSPOSED_B >> 1 == 0, "wgmma's operands are transposed (1) or are not (0)");
  static constexpr WarpgroupProduct form = {N,           A,          B, REGISTERS, TRANSPOSED_A == 1, TRANSPOSED_B == 1,
                                            SCALE_A < 0, SCALE_B < 0};
  engine_wgmma(&form, d, a, b, accumulate, file, line);
}
ENGINE_INLINE Words descriptor(unsigned long long a) { return Words{(unsigned)a, (unsigned)(a >> 32)}; }

template <unsigned N, bool INCREASE>
ENGINE_INLINE void setmaxnreg(const char* file, int line) {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes 24 to 256 registers, a multiple of 8");
  engine_setmaxnreg(N, INCREASE, file, line);
}

}  // namespace ptx
}  // namespace engine
