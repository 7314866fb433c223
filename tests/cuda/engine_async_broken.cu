// Of tests/test_engine_async.py.
#define CP(BYTES, TO, FROM) asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" \
                                         :: "r"(TO), "l"(FROM), "n"(BYTES))
extern "C" __global__ void target(const float *in) {
  __shared__ __align__(16) float s[64];
  CP(16, (unsigned)__cvta_generic_to_shared(s + threadIdx.x), in + 4 * threadIdx.x);
}
extern "C" __global__ void source(const float *in) {
  __shared__ __align__(16) float s[256];
  CP(16, (unsigned)__cvta_generic_to_shared(s + 4 * threadIdx.x), in + threadIdx.x);
}
extern "C" __global__ void not_shared(float *in) {
  __shared__ float s[64];
  CP(4, (unsigned)__cvta_generic_to_shared(in + threadIdx.x), in);
}
extern "C" __global__ void no_address(float *in) {
  CP(4, 0xfff00000u, in);
}
extern "C" __global__ void wild_target(const float *in) {
  __shared__ float s[64];
  CP(4, (unsigned)__cvta_generic_to_shared(s) + 1024 * 256 * threadIdx.x, in);
}
extern "C" __global__ void wild_source(const float *in) {
  __shared__ float s[64];
  CP(4, (unsigned)__cvta_generic_to_shared(s), in + 100000 * threadIdx.x);
}
extern "C" __global__ void too_much(const float *in) {
  __shared__ float s[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(in), "r"(5));
}
extern "C" __global__ void odd_pipeline(const float *in) {
  __shared__ float s[64];
  __pipeline_memcpy_async(s, in, 12);
}
