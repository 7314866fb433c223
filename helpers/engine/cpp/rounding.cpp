// Arithmetic in the rounding modes other than to-nearest, such as __fadd_rz. The mode is a state of the OS thread, so a
// kernel must not be interrupted until the usual one is restored.
#include "worker.h"

#include <fenv.h>
#include <math.h>

extern "C" double engine_rounded(
    engine::Operation operation, engine::Toward mode, double first, double second, double third) {
  static const int MODES[] = {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD};
  Critical guard(here());
  // volatile: nothing may be computed before the mode is set, or after it is set back.
  volatile double a = first, b = second, c = third, result;
  fesetround(MODES[(int)mode]);
  const double x = a, y = b, z = c;
  switch (operation) {
    case engine::Operation::add:
      result = x + y;
      break;
    case engine::Operation::multiply:
      result = x * y;
      break;
    case engine::Operation::divide:
      result = x / y;
      break;
    case engine::Operation::root:
      result = sqrt(x);
      break;
    case engine::Operation::fma:
      result = fma(x, y, z);
      break;
  }
  fesetround(FE_TONEAREST);
  return result;
}
