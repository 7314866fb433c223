// Exercise 14: a sequence was cut into parts, and each has its own output and log-sum-exp. Merge
// them, as 03_merge_halves did with two parts that were not divided yet.
//
// A part without keys has lse -inf, and nobody wrote its output: it may be NaN. A row without keys
// in any part gets 0, and lse -inf.
//
// Launch   grid N, block 64: thread c has column c of row blockIdx.x
// Shapes   O_part (parts, N, 64), lse_part (parts, N), O (N, 64), lse (N): float32; lse is a
//          natural logarithm
// Limit    each element of O_part is read once
#define NEG_INF __int_as_float(0xff800000)

extern "C" __global__ void __launch_bounds__(64) merge(
    const float* O_part, const float* lse_part, float* O, float* lse, int N, int parts) {
  const int row = blockIdx.x, c = threadIdx.x;
  float m = NEG_INF;
  for (int i = 0; i < parts; ++i) m = fmaxf(m, lse_part[i * N + row]);

  float sum = 0.0f, acc = 0.0f;
  for (int i = 0; i < parts; ++i) {
    const float lse_i = lse_part[i * N + row];
    const float* o = O_part + (i * N + row) * 64 + c;  // this part's element
    // BEGIN hole: about 4 lines - add the part, by its weight, to sum and to acc
    // DEFAULT: sum += 1.0f;  // as if all parts had the same weight
    // DEFAULT: acc += *o;
    if (lse_i == NEG_INF) continue;
    const float weight = expf(lse_i - m);
    sum += weight;
    acc += weight * *o;
    // END hole
  }
  float o_row = acc / sum, lse_row = m;
  // BEGIN hole: about 2 lines - what is still missing from lse_row, and the row without keys
  lse_row = m + logf(sum);
  if (sum == 0.0f) o_row = 0.0f;
  // END hole
  O[row * 64 + c] = o_row;
  if (c == 0) lse[row] = lse_row;
}
