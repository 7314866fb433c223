// Of tests/test_engine_cupy.py.
#include <cuComplex.h>
extern "C" __global__ void single(const cuFloatComplex* a, const cuComplex* b, cuFloatComplex s, cuFloatComplex* out) {
  int i = threadIdx.x, n = blockDim.x;
  out[i] = cuCaddf(a[i], b[i]);
  out[n + i] = cuCsubf(a[i], b[i]);
  out[2 * n + i] = cuCmulf(a[i], s);
  out[3 * n + i] = cuCdivf(a[i], b[i]);
  out[4 * n + i] = cuCfmaf(a[i], b[i], s);
  out[5 * n + i] = make_cuComplex(cuCabsf(a[i]), cuCimagf(cuConjf(b[i])) + cuCrealf(s));
  out[6 * n + i] = cuComplexDoubleToFloat(cuComplexFloatToDouble(b[i]));
}
extern "C" __global__ void twice(const cuDoubleComplex* a, const double2* b, cuDoubleComplex s, cuDoubleComplex* out) {
  int i = threadIdx.x, n = blockDim.x;
  out[i] = cuCadd(a[i], b[i]);
  out[n + i] = cuCsub(a[i], b[i]);
  out[2 * n + i] = cuCmul(a[i], s);
  out[3 * n + i] = cuCdiv(a[i], b[i]);
  out[4 * n + i] = cuCfma(a[i], b[i], s);
  out[5 * n + i] = make_cuDoubleComplex(cuCabs(a[i]), cuCimag(cuConj(b[i])) + cuCreal(s));
  out[6 * n + i] = b[i];
}
