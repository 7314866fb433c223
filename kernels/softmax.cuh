// The constants of the softmax, a reduction over the four lanes that hold a row of an MMA
// accumulator, and a weight. Explained in 05's notebook, in 07's and in 10's.

#pragma once

#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC does not define INFINITY
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float M_INIT = -3.402823466e38f;  // m_i at first: finite, as -inf - (-inf) is NaN

// The maximum or the sum over the four lanes of a row.
template <typename Op>
__device__ __forceinline__ float row_allreduce(float a, Op op) {
  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
  return op(a, __shfl_xor_sync(0xffffffff, a, 2));
}

// The weight of a score, 2^(softmax_scale_log2 s - m_i): one FFMA and one ex2. volatile: it must not
// move behind a wait for products.
__device__ __forceinline__ float weight(float s, float softmax_scale_log2, float m_i) {
  const float x = fmaf(s, softmax_scale_log2, -m_i);
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
